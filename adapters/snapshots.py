"""A table of a snapshot as one Arrow table, for polars, duckdb, pandas and others. Reads files only; needs no server.

::

    rows = read_table("snapshots/run-7", "rollouts")
    polars.from_arrow(rows).group_by("policy_version").agg(polars.col("rewards").mean())
    duckdb.sql("select fate, count(*), avg(tokens) from rows group by fate")
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from transferqueue.errors import NotFound, listing
from transferqueue.server.durability.snapshot_directory import SnapshotReader
from transferqueue.server.durability.snapshot_files import TableManifest, read_manifest, read_rows, read_values

INLINE, PLACED = "field/", "at/"
"""Prefixes in the file of rows: of a field stored in it, and of the position of a value in the field's own file."""


def read_table(path: str | os.PathLike[str], table: str, *, fields: Sequence[str] | None = None) -> pa.Table:
    """Read a table of a snapshot as one Arrow table: facts, fields, and the state of each row for each task.

    Reads files only; needs no server. Column types are those of `Column.arrow`; `transferqueue docs snapshots` names
    facts and task columns. A field that has the name of a fact becomes ``field/NAME``. Every file is compared with its
    checksum first. Values that rows share are repeated; file contents are memory-mapped.

    Args:
        path: of a snapshot, or of a directory that holds several, of which the newest is read.
        table: name of the table.
        fields: the fields to read; default None: all. Values that were not set are null.

    Raises:
        NotFound: a missing snapshot, table or field.
        Corruption: a file that was changed, or that no server has written.
    """
    snapshot = SnapshotReader.open(Path(path), lambda _: None)
    about = _about(snapshot, table)
    rows = read_rows(snapshot, about)
    names = [name.removeprefix(INLINE).removeprefix(PLACED) for name in rows.column_names if _is_field(name)]
    missing = [name for name in fields or () if name not in names]
    if missing:
        raise NotFound(
            f"fields {missing} are not in table {table!r} of snapshot {snapshot.path}; it has {listing(names)}"
        )
    wanted = set(names if fields is None else fields)
    return pa.table(dict(_columns(snapshot, about, rows, wanted)))


def _columns(
    snapshot: SnapshotReader, about: TableManifest, rows: pa.Table, wanted: set[str]
) -> Iterator[tuple[str, Any]]:
    """Yield names and values, in the order of the file of rows."""
    for column in rows.column_names:
        name = column.removeprefix(INLINE).removeprefix(PLACED)
        if not _is_field(column):
            yield column, rows[column]
        elif name in wanted:
            values = rows[column] if column.startswith(INLINE) else _placed(snapshot, about, name, rows[column])
            yield f"{INLINE}{name}" if name in rows.column_names else name, values


def _placed(snapshot: SnapshotReader, about: TableManifest, name: str, at: Any) -> Any:
    """Read the values of a field that has its own file, row by row."""
    return read_values(snapshot, about, name).take(at)


def _is_field(column: str) -> bool:
    return column.startswith((INLINE, PLACED))


def _about(snapshot: SnapshotReader, table: str) -> TableManifest:
    tables = {body.name: body for body in read_manifest(snapshot).tables}
    if table not in tables:
        raise NotFound(f"table {table!r} is not in snapshot {snapshot.path}; it has {listing(tables)}")
    return tables[table]
