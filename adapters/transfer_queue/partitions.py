"""The tables of partitions, and samples in them by key. What clients write and read here, no controller has to hear of.

A table that was opened is remembered: a put of known fields is one question for the keys and one commit, and none is asked for a
table that this very call made. Another process may drop a table, and make it again with other fields; its name is the same. So
what fails since something is gone is tried once more on the table that is there now, and a field that a remembered table lacks is
asked for before it counts as unknown.

A table keeps the types of its fields, a partition without samples does not: a stack may name its fields by a put of placeholders that
it clears at once. So columns that do not fit an empty table are given a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue.columns import columns_of, tensordict_of
from transferqueue.adapters.transfer_queue.tags import partition_of, stored_tags, table_of
from transferqueue.errors import AlreadyExists, NotFound, SchemaError
from transferqueue.schema import Field

T = TypeVar("T")
Rows = npt.NDArray[np.int64]
Tags = Sequence[Mapping[str, Any]]
Columns = dict[str, Any]
Renew = Callable[[str, dict[str, str]], object]

_KEPT: Final = tq.Task("kept", needs=("never.",))
"""A task that gets nothing, so that a sample is never done: tasks that are added later still see it."""
_TRIES: Final = 8
"""A key that two clients put for the first time at once is new to one of them; the other updates it."""


def indexes_of(rows: Sequence[int] | Rows) -> Rows:
    """Global indexes as an array. `NotFound` for a number that no sample can have."""
    try:
        return np.asarray(rows, np.int64)
    except OverflowError as error:
        raise NotFound(
            f"a global index is out of the range of 64 bits: {error}; indexes are those that a put gave"
        ) from error


class Partitions:
    """The partitions of a deployment. Every method may be called from any thread.

    rows_max: samples of a partition that is made here. renew: drops the table of a partition if it has no samples and still the
    fields named, by their types.
    """

    def __init__(self, queue: tq.Queue, rows_max: int, renew: Renew | None = None) -> None:
        self._queue, self._rows_max, self._renew = queue, rows_max, renew
        self._tables: dict[str, tq.Table] = {}

    def names(self) -> list[str]:
        """Names of the partitions."""
        return [name for table in self._queue.tables() if (name := partition_of(table)) is not None]

    def find(self, partition_id: str) -> tq.Table | None:
        """A partition's table as it is now; None for one that is not there."""
        try:
            table = self._tables[partition_id] = self._queue.table(table_of(partition_id))
        except NotFound:
            self._tables.pop(partition_id, None)
            return None
        return table

    def make(self, partition_id: str, fields: Sequence[Field] = ()) -> tuple[tq.Table, bool]:
        """A partition's table, made with `fields` if it is missing, and whether it was."""
        name, limits = table_of(partition_id), tq.Limits(rows=self._rows_max)
        for _ in range(_TRIES):
            try:
                table = self._queue.create_table(
                    name,
                    tasks=[_KEPT],
                    fields=list(fields),
                    retention=tq.Manual(),
                    limits=limits,
                    extra_fields=True,
                )
            except AlreadyExists:
                existing = self.find(partition_id)
                if existing is not None:
                    return existing, False
            else:
                self._tables[partition_id] = table
                return table, True
        raise AlreadyExists(f"partition {partition_id!r} is made and cleared by others all the time; try again")

    def put(self, partition_id: str, data: TensorDict) -> Rows:
        """New samples without keys; their indexes."""
        return self._on(partition_id, data, lambda table, made: _put(table, made or _columns(table, data), None, None))

    def update(self, partition_id: str, rows: Sequence[int], data: TensorDict | None, tags: Tags | None) -> None:
        """Write columns and merge tags of samples by index."""
        self._on(partition_id, data, lambda table, made: _update(table, rows, made or _columns(table, data), tags))

    def put_keyed(
        self, partition_id: str, keys: Sequence[str], data: TensorDict | None, tags: Tags | None
    ) -> tuple[tq.Table, Rows] | None:
        """Write columns and merge tags of samples by key, made if they are new; where they are, or None if all were."""
        return self._on(partition_id, data, lambda table, made: _put_keyed(table, made, keys, data, tags))

    def keyed(self, partition_id: str, keys: Sequence[str]) -> tuple[tq.Table, Rows]:
        """Indexes of samples by key, made without data if they are new."""
        return self._on(partition_id, None, lambda table, _: (table, _create(table, keys)))

    def get(self, partition_id: str, keys: Sequence[str], names: Sequence[str] | None) -> TensorDict:
        """Columns of samples by key: all that each has, or those of `names` that the partition knows.

        `NotFound` for a partition or keys that are not there.
        """
        return self._read(partition_id, names, lambda table: columns_at(table, rows_of(table, keys), names))

    def get_rows(self, partition_id: str, rows: Sequence[int], names: Sequence[str]) -> TensorDict:
        """Columns of samples by index, as `get`."""
        return self._read(partition_id, names, lambda table: columns_at(table, indexes_of(rows), names))

    def _read(self, partition_id: str, names: Sequence[str] | None, work: Callable[[tq.Table], T]) -> T:
        """What `work` finds in the table, which is asked for its fields if `names` has others."""
        remembered = self._tables.get(partition_id)
        if remembered is not None and all(name in remembered.fields for name in names or ()):
            try:
                return work(remembered)
            except NotFound:  # cleared, and perhaps made again
                pass
        table = self.find(partition_id)
        if table is None:
            raise NotFound(f"partition {partition_id!r} not found; a put makes it")
        return work(table)

    def _on(self, partition_id: str, data: TensorDict | None, work: Callable[[tq.Table, Columns | None], T]) -> T:
        """What `work` does with the table; it is given the columns of `data` if this call made the table for them."""
        try:
            return self._tried(partition_id, data, work)
        except SchemaError:
            table = self.find(partition_id)
            if self._renew is None or table is None:
                raise
            self._renew(partition_id, described(table))
            self._tables.pop(partition_id, None)
        return self._tried(partition_id, data, work)

    def _tried(self, partition_id: str, data: TensorDict | None, work: Callable[[tq.Table, Columns | None], T]) -> T:
        remembered = self._tables.get(partition_id)
        if remembered is not None:
            try:
                return work(remembered, None)
            except NotFound:  # as above
                pass
        new, columns = ([], {}) if data is None else columns_of(data, {})
        table, made = self.make(partition_id, new)
        return work(table, columns if made else None)


def described(table: tq.Table) -> dict[str, str]:
    """The fields of a table by their types."""
    return {name: field.describe() for name, field in table.fields.items()}


def rows_of(table: tq.Table, keys: Sequence[str]) -> Rows:
    """Indexes of samples by key. `NotFound` names keys that are not there."""
    rows = table.find(keys) if keys else np.empty(0, np.int64)
    if (rows < 0).any():
        missing = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        raise NotFound(f"keys {missing[:5]} not found in table {table.name}; put them first")
    return rows


def columns_at(table: tq.Table, rows: Rows, names: Sequence[str] | None) -> TensorDict:
    """Columns of samples by index: all that each has, or those of `names` that the table knows."""
    chosen = None if names is None else [name for name in names if name in table.fields]
    with table.read(rows, fields=chosen) as read:
        return tensordict_of(read, read.fields if chosen is None else chosen)


def _put_keyed(
    table: tq.Table, made: Columns | None, keys: Sequence[str], data: TensorDict | None, tags: Tags | None
) -> tuple[tq.Table, Rows] | None:
    columns = _columns(table, data) if made is None else made
    rows = table.find(keys) if made is None else np.full(len(keys), -1)
    if (rows < 0).all():
        try:
            _put(table, columns, keys, tags)
            return None
        except AlreadyExists:  # another client was quicker with one of the keys
            rows = table.find(keys)
    if (rows < 0).any():
        rows = _create(table, keys)
    _update(table, rows.tolist(), columns, tags)
    return table, rows


def _put(table: tq.Table, columns: Columns, keys: Sequence[str] | None, tags: Tags | None) -> Rows:
    facts: dict[str, Any] = {"tags": [stored_tags(each) for each in tags]} if tags else {}
    if keys is not None:
        facts["key"] = list(keys)
    return table.put(timeout_s=None, **facts, **columns)


def _create(table: tq.Table, keys: Sequence[str]) -> Rows:
    """Rows of all keys; those that do not exist are made, in one put."""
    for _ in range(_TRIES):
        rows = table.find(keys)
        new = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        if not new:
            return rows
        try:
            table.put(key=new, timeout_s=None)
        except AlreadyExists:
            continue
    raise AlreadyExists(f"keys of table {table.name} are put and deleted by others all the time; try again")


def _update(table: tq.Table, rows: Sequence[int], columns: Columns, tags: Tags | None) -> None:
    facts: dict[str, Any] = {"tags": _merged(table, rows, tags)} if tags and any(tags) else {}
    if facts or columns:
        table.update(indexes_of(rows), overwrite=True, **facts, **columns)


def _merged(table: tq.Table, rows: Sequence[int], tags: Tags) -> list[dict[str, Any]]:
    with table.read(indexes_of(rows), fields=()) as read:
        return [{**old, **stored_tags(new)} for old, new in zip(read.tags, tags, strict=True)]


def _columns(table: tq.Table, data: TensorDict | None) -> Columns:
    if data is None:
        return {}
    new, columns = columns_of(data, table.fields)
    declared = [
        field for field in new if field.shape.count(None) > 1
    ]  # what a put would take for narrower than it may be
    if declared:
        table.add_fields(declared)
    return columns
