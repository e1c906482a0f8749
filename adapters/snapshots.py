"""A table of a snapshot as one Arrow table: for polars, duckdb, pandas, or whatever else reads Arrow. No server is asked.

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
from transferqueue.server.durability.snapshot_files import TableManifest, read_about, read_rows, read_values
from transferqueue.storage.snapshot import SnapshotReader

INLINE, PLACED = "field/", "at/"
"""How the rows' file names a field that lies in it, and where another field's value is in that field's file."""


def read_table(path: str | os.PathLike[str], table: str, *, fields: Sequence[str] | None = None) -> pa.Table:
    """The rows of `table` in the snapshot at `path`, or in the newest under it: facts, fields, and how they stand for each task.

    fields: those that come (None: all); a value that was not set is null. The columns' types are those of `Column.arrow`, facts
    and tasks are named as in docs/SNAPSHOTS.md; a field with the name of a fact is ``field/NAME``. Every file is compared with
    its checksum first. What rows share is repeated, what is in files is mapped.

    `NotFound` for a snapshot, table or field that is not there, `Corruption` for a file that is not as it was written, or that no
    server can have written.
    """
    snapshot = SnapshotReader.open(Path(path), lambda _: None)
    about = _about(snapshot, table)
    rows = read_rows(snapshot, about)
    known = [name.removeprefix(INLINE).removeprefix(PLACED) for name in rows.column_names if _is_field(name)]
    missing = [name for name in fields or () if name not in known]
    if missing:
        raise NotFound(
            f"fields {missing} are not in table {table!r} of snapshot {snapshot.path}; it has {listing(known)}"
        )
    wanted = set(known if fields is None else fields)
    return pa.table(dict(_columns(snapshot, about, rows, wanted)))


def _columns(
    snapshot: SnapshotReader, about: TableManifest, rows: pa.Table, wanted: set[str]
) -> Iterator[tuple[str, Any]]:
    """Names and values, in the order of the rows' file."""
    for column in rows.column_names:
        name = column.removeprefix(INLINE).removeprefix(PLACED)
        if not _is_field(column):
            yield column, rows[column]
        elif name in wanted:
            values = rows[column] if column.startswith(INLINE) else _placed(snapshot, about, name, rows[column])
            yield f"{INLINE}{name}" if name in rows.column_names else name, values


def _placed(snapshot: SnapshotReader, about: TableManifest, name: str, at: Any) -> Any:
    """The values of a field that has a file of its own, row by row."""
    return read_values(snapshot, about, name).take(at)


def _is_field(column: str) -> bool:
    return column.startswith((INLINE, PLACED))


def _about(snapshot: SnapshotReader, table: str) -> TableManifest:
    tables = {one.name: one for one in read_about(snapshot).tables}
    if table not in tables:
        raise NotFound(f"table {table!r} is not in snapshot {snapshot.path}; it has {listing(tables)}")
    return tables[table]
