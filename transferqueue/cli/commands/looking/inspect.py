"""`transferqueue inspect`: all tables, the terms of one, or the life of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.completion import complete_row, complete_table
from transferqueue.cli.connection import address_of
from transferqueue.cli.options import AddressOption, json_option

if TYPE_CHECKING:
    from rich.text import Text

    from transferqueue.client import Queue

EXAMPLES = (
    ("transferqueue inspect", "all tables"),
    ("transferqueue inspect rollouts", "terms, fields and tasks of one table"),
    ("transferqueue inspect rollouts 4711", "one row: its put, its fields, its state in each task, its end"),
    ("transferqueue inspect rollouts --key gsm8k/17", "the same, of the row with this key"),
    ("transferqueue inspect rollouts --address tcp://trainer:7777 --json", "elsewhere, for a machine"),
)


def inspect(
    table: Annotated[
        str | None,
        typer.Argument(show_default=False, autocompletion=complete_table, help="A table; all tables if none is named."),
    ] = None,
    row: Annotated[
        int | None,
        typer.Argument(min=0, show_default=False, autocompletion=complete_row, help="A row id of the table."),
    ] = None,
    key: Annotated[
        str, typer.Option("--key", "-k", show_default=False, help="The key of a row, in place of its id.")
    ] = "",
    address: AddressOption = None,
    json: Annotated[bool, json_option("Print it as JSON; keys in `transferqueue docs figures`.")] = False,
) -> None:
    """Show all tables, the terms of one, or the life of one row.

    The life of a row: its put and producer, the fields that arrived, its state, lease and attempts in each task, and
    its end. The server forgets a finished row when it reuses the row's memory.
    """
    from transferqueue.cli.connection import connected
    from transferqueue.cli.screens.terminal import console, show, show_json

    _check_names(table, row, key)
    terminal = console()
    with connected(address_of(address), label="inspect") as queue:
        value, lines = _look(queue, table, row, key, terminal.width)
    if json:
        show_json(value)
    else:
        show(lines, terminal)


def _check_names(table: str | None, row: int | None, key: str) -> None:
    from transferqueue.errors import UsageError

    if row is not None and key:
        raise UsageError(f"row {row} and key {key!r} both name a row; give one of them")
    if table is None and key:
        raise UsageError(f"key {key!r} names a row of no table; name the table: inspect TABLE --key {key}")


def _look(queue: Queue, table: str | None, row: int | None, key: str, width: int) -> tuple[object, list[Text]]:
    """The answer as a value and as lines."""
    if table is None:
        return _tables(queue, width)
    if row is None and not key:
        return _terms(queue, table, width)
    return _row(queue, table, _row_of(queue, table, key) if row is None else row, width)


def _tables(queue: Queue, width: int) -> tuple[object, list[Text]]:
    from transferqueue.cli.screens.inspect import tables_lines
    from transferqueue.cli.screens.unreachable import unreachable_lines
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator, by_coordinator

    answers = by_coordinator(queue.address, queue.stats())
    tables = {
        name: table
        for answer in answers.values()
        if not isinstance(answer, UnreachableCoordinator)
        for name, table in answer.tables.items()
    }
    silent = [
        line
        for answer in answers.values()
        if isinstance(answer, UnreachableCoordinator)
        for line in unreachable_lines(answer, width)
    ]
    return tables, [*tables_lines(tables, width), *silent]


def _terms(queue: Queue, name: str, width: int) -> tuple[object, list[Text]]:
    from transferqueue.cli.screens.inspect import terms_lines
    from transferqueue.observe.table_terms import table_terms

    table = queue.table(name)
    terms = table_terms(
        table.name,
        fields=table.fields,
        tasks=table.tasks,
        limits=table.limits,
        pacing=table.pacing,
        retention=table.retention,
        stats=table.stats(),
    )
    return terms, terms_lines(terms, width)


def _row_of(queue: Queue, table: str, key: str) -> int:
    from transferqueue.errors import NotFound

    row = int(queue.table(table).find([key])[0])
    if row < 0:
        raise NotFound(f'key {key!r} is not in table "{table}"; it was never put, or its row is finished')
    return row


def _row(queue: Queue, table: str, row: int, width: int) -> tuple[object, list[Text]]:
    from transferqueue.cli.screens.row import row_lines

    life = queue.inspect(table, row)
    return life, row_lines(life, width)
