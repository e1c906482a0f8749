"""`transferqueue query`: one SELECT over the rows that a run has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from transferqueue.cli.options import json_option
from transferqueue.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

EXAMPLES = (
    ("transferqueue query records/math-7", "the tables, and how many rows each has"),
    ('transferqueue query records/math-7 "select _fate, count(*) from rollouts group by 1"', "one SELECT"),
    ('transferqueue query records/math-7 "select * from rollouts limit 5" --json', "for a machine"),
)
CELL_CHARS: Final = 60
"""A longer value is cut; `--json` has it whole."""
ROWS_SHOWN: Final = 1000


def query(
    run: Annotated[
        Path, typer.Argument(show_default=False, help="The directory of a record, or the folder of a job's run.")
    ],
    sql: Annotated[
        str | None, typer.Argument(show_default=False, help="One SELECT of DuckDB. Default: count rows by table.")
    ] = None,
    json: Annotated[bool, json_option("Print the rows as JSON, whole.")] = False,
) -> None:
    """Ask the recorded rows of a run, while it goes on or afterwards.

    Tables have their names. A row has its columns and its lineage (`_step`, `_fate`, `_events` and others, see
    `transferqueue docs record`). Nothing is written, and nothing but the record is read. Files and row groups that are
    damaged are named on stderr; the rest is asked.
    """
    from transferqueue.cli.screens.terminal import console, say, show, show_json
    from transferqueue.storage.row_files.reader import open_run

    record = open_run(run)
    answer = record.sql(sql or _counts(record.tables))
    check_names(answer.schema)
    for damage in record.damaged:
        say(f"left out: {damage}", err=True)
    if json:
        show_json(answer.to_pylist())
    else:
        show(answer_lines(answer), console())


def _counts(tables: list[str]) -> str:
    """Return the SQL that counts the rows of each table. Names are those of folders, which may have quotes."""
    if not tables:
        return "select 'no table has files yet' as record"
    return " union all ".join(map(_count, tables))


def _count(table: str) -> str:
    text, name = table.replace("'", "''"), table.replace('"', '""')
    counts = 'count(*) as "rows", count(distinct _step) as steps'
    return f"""select '{text}' as "table", {counts} from "{name}" """  # noqa: S608


def check_names(schema: Any) -> None:
    """Raise `UsageError` if two columns, or two fields of a struct, have one name: rows by name would lose one."""
    for names in (schema.names, *(names for kind in schema.types for names in _field_names(kind))):
        if len(set(names)) < len(names):
            raise UsageError(
                "the result has two columns or struct fields with one name: name them, select a._row as a, b._row as "
                "b, or {'row': _row, 'step': _step}"
            )


def _field_names(kind: Any) -> Iterator[list[str]]:
    """Yield the names of the fields of each struct in a type."""
    import pyarrow as pa

    fields = [kind.field(at) for at in range(kind.num_fields)]
    if pa.types.is_struct(kind):
        yield [field.name for field in fields]
    for field in fields:
        yield from _field_names(field.type)


def answer_lines(answer: Any) -> list[Text]:
    """Return the lines that show an Arrow table, its first `ROWS_SHOWN` rows."""
    from rich.text import Text

    from transferqueue.cli.screens.layout import GridColumn, grid_line, heading

    shown = answer.slice(0, ROWS_SHOWN)
    columns = [
        GridColumn(
            heading=name,
            cells=[Text(_cell(value)) for value in column.to_pylist()],
            left=not _is_number(column.type),
        )
        for name, column in zip(shown.column_names, shown.columns, strict=True)
    ]
    lines = [heading(columns), *(grid_line(columns, row) for row in range(shown.num_rows))]
    if answer.num_rows > ROWS_SHOWN:
        lines.append(Text(f"{answer.num_rows - ROWS_SHOWN:,} more rows; --json prints all", style="dim"))
    return lines


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return text if len(text) <= CELL_CHARS else f"{text[: CELL_CHARS - 3]}..."
