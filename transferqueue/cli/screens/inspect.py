"""Screens of `inspect`: all tables, and the terms of one."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from transferqueue.cli.screens.layout import GridColumn, age, grid, wrap
from transferqueue.observe import units
from transferqueue.observe.table_terms import FieldTerms, TableDescription, TaskTerms
from transferqueue.wire.answers.stats import TableStats


def tables_lines(tables: Mapping[str, TableStats], width: int) -> list[Text]:
    """One line for each table."""
    if not tables:
        return [Text("no tables yet", style="dim")]
    every = tables.values()
    columns = [
        GridColumn(heading="table", cells=[Text(name, style="bold") for name in tables], left=True),
        GridColumn(heading="put", cells=_counts([table.rows_put for table in every])),
        GridColumn(heading="live", cells=_counts([table.rows_live for table in every])),
        GridColumn(heading="done", cells=_counts([table.rows_done for table in every])),
        GridColumn(heading="dropped", cells=_counts([table.rows_dropped for table in every])),
        GridColumn(heading="bytes", cells=[Text(units.size(table.bytes)) for table in every]),
        GridColumn(heading="version", cells=[_version(table) for table in every], rank=2),
        GridColumn(heading="oldest", cells=[age(table.age_s) for table in every], rank=3),
        GridColumn(heading="", cells=[_sealed(table) for table in every], rank=1, left=True),
        GridColumn(heading="tasks", cells=[Text(", ".join(table.tasks)) for table in every], rank=4, left=True),
    ]
    return grid(columns, len(tables), width)


def terms_lines(terms: TableDescription, width: int) -> list[Text]:
    """A table's limits, its fields, its tasks."""
    return [
        *_headline(terms, width),
        Text(),
        *_fields(terms.fields, width),
        Text(),
        *_tasks(terms.tasks, width),
    ]


def _headline(terms: TableDescription, width: int) -> list[Text]:
    stats = terms.stats
    bound = f" of {units.size(terms.bytes_limit)}" if terms.bytes_limit else ""
    first = Text(terms.name, style="bold").append(
        f" · {units.count(stats.rows_live)} of {units.count(terms.rows_limit)} rows · {units.size(stats.bytes)}{bound}",
        style="not bold",
    )
    if stats.sealed:
        first.append(" · sealed", style="not bold magenta")
    lines = [first, *_statement("retention", terms.retention, width)]
    if terms.pacing:
        lines += _statement("pacing", terms.pacing, width)
    dropped = ", ".join(f"{reason} {units.count(rows)}" for reason, rows in stats.dropped.items())
    fates = (
        f"{units.count(stats.rows_put)} put = {units.count(stats.rows_live)} live + {units.count(stats.rows_done)} done"
    )
    fates += f" + {units.count(stats.rows_dropped)} dropped" + (f" ({dropped})" if dropped else "")
    return [*lines, *_statement("rows", fates, width)]


def _statement(subject: str, text: str, width: int) -> list[Text]:
    lines = wrap(Text(text), width, indent=13)
    lines[0] = Text(f"  {subject:<9}  ", style="dim").append_text(lines[0][13:])
    return lines


def _fields(fields: list[FieldTerms], width: int) -> list[Text]:
    if not fields:
        return [Text("no fields yet: the first put declares them", style="dim")]
    columns = [
        GridColumn(heading="field", cells=[Text(field.name) for field in fields], left=True),
        GridColumn(heading="type", cells=[Text(field.type, style="cyan") for field in fields], left=True),
        GridColumn(
            heading="kept", cells=[Text("ledger" if field.inline else "arena") for field in fields], rank=1, left=True
        ),
        GridColumn(heading="given by", cells=[_names(field.given_by) for field in fields], left=True),
        GridColumn(heading="needed by", cells=[_names(field.needed_by) for field in fields], left=True),
    ]
    return grid(columns, len(fields), width)


def _tasks(tasks: list[TaskTerms], width: int) -> list[Text]:
    if not tasks:
        return [Text("no tasks", style="dim")]
    columns = [
        GridColumn(heading="task", cells=[Text(task.name, style="bold") for task in tasks], left=True),
        GridColumn(heading="next rows", cells=[Text(task.selector) for task in tasks], left=True),
        GridColumn(heading="lease", cells=[Text(units.span(task.lease_s)) for task in tasks]),
        GridColumn(heading="retry", cells=[Text(task.retry) for task in tasks]),
        GridColumn(heading="sees", cells=[Text(_starts(task)) for task in tasks], rank=1, left=True),
    ]
    lines = grid(columns, len(tasks), width)
    for task in tasks:
        lines += _remarks(task, width)
    return lines


def _remarks(task: TaskTerms, width: int) -> list[Text]:
    """The group rule of a task, and needed fields that the table lacks, if any."""
    lines: list[Text] = []
    if task.groups:
        lines += wrap(Text(f"{task.name} takes groups: {task.groups}", style="dim"), width, indent=2)
    if task.unknown:
        missing = f"{task.name} needs {', '.join(task.unknown)}: no field of the table yet"
        lines += wrap(Text(missing, style="yellow"), width, indent=2)
    return lines


def _starts(task: TaskTerms) -> str:
    return "every row" if task.starts == "start" else "rows put after it was declared"


def _counts(numbers: list[int]) -> list[Text]:
    return [Text(units.count(number), style="" if number else "bright_black") for number in numbers]


def _names(names: list[str]) -> Text:
    return Text(", ".join(names) or "–", style="" if names else "bright_black")


def _version(table: TableStats) -> Text:
    return Text(str(table.version)) if table.version >= 0 else Text("–", style="bright_black")


def _sealed(table: TableStats) -> Text:
    return Text("sealed", style="magenta") if table.sealed else Text()
