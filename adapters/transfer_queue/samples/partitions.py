"""The tables of partitions, and samples in them by key. Clients use them without the controller.

Opened tables are cached: a put of known fields asks once for the keys and commits once, and does not ask at all for a
table that the same call created. Another process may drop a table and create it again with other fields under the same
name. A call that fails because something is gone is therefore repeated once on the current table, and a field that a
cached table lacks is looked up before it counts as unknown.

A table keeps the types of its fields; a partition without samples does not, since a program may put placeholders and
clear them at once. Columns that do not fit an empty table therefore get a new table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples.columns import columns_of, tensordict_of
from transferqueue.adapters.transfer_queue.samples.merging import MergeFunction, merge, retried
from transferqueue.adapters.transfer_queue.samples.tags import partition_of, stored_tags, table_of
from transferqueue.client.operations import commit
from transferqueue.client.operations.row_metadata import GivenFacts
from transferqueue.client.session.operation_runner import run_sync
from transferqueue.errors import AlreadyExists, NotFound, SchemaError
from transferqueue.schema import Field

T = TypeVar("T")
Rows = npt.NDArray[np.int64]
Tags = Sequence[Mapping[str, Any]]
Columns = dict[str, Any]
Renew = Callable[[str, dict[str, str]], object]

_KEPT: Final = tq.Task("kept", needs=("never.",))
"""A task that never gets rows, so that a sample is never done: tasks that are added later still see it."""
_TRIES: Final = 8
"""If two clients put a new key at once, one of them creates it and the other updates it."""


def indexes_of(rows: Sequence[int] | Rows) -> Rows:
    """Return global indexes as an array. `NotFound` for a number that no sample can have."""
    try:
        return np.asarray(rows, np.int64)
    except OverflowError as error:
        raise NotFound(
            f"a global index is out of the range of 64 bits: {error}; indexes are those that a put gave"
        ) from error


class Partitions:
    """The partitions of a deployment. Every method may be called from any thread.

    `rows_max` bounds the samples of a partition that is created here. `renew` drops the table of a partition if it has
    no samples and still has the given fields, by their types.
    """

    def __init__(self, queue: tq.Queue, rows_max: int, renew: Renew | None = None) -> None:
        self._queue, self._rows_max, self._renew = queue, rows_max, renew
        self._tables: dict[str, tq.Table] = {}

    def names(self) -> list[str]:
        """Names of the partitions."""
        return [name for table in self._queue.tables() if (name := partition_of(table)) is not None]

    def find(self, partition_id: str) -> tq.Table | None:
        """Return a partition's current table; None if it does not exist."""
        try:
            table = self._tables[partition_id] = self._queue.table(table_of(partition_id))
        except NotFound:
            self._tables.pop(partition_id, None)
            return None
        return table

    def make(self, partition_id: str, fields: Sequence[Field] = ()) -> tuple[tq.Table, bool]:
        """Return a partition's table, created with `fields` if it is missing, and whether it was created."""
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
        """Put new samples without keys; return their indexes."""
        return self._on(partition_id, data, lambda table, made: _put(table, made or _columns(table, data), None, None))

    def update(self, partition_id: str, rows: Sequence[int], data: TensorDict | None, tags: Tags | None) -> None:
        """Write columns and merge tags of samples by index."""
        self._on(partition_id, data, lambda table, made: _update(table, rows, made or _columns(table, data), tags))

    def put_keyed(
        self, partition_id: str, keys: Sequence[str], data: TensorDict | None, tags: Tags | None
    ) -> tuple[tq.Table, Rows] | None:
        """Write columns and merge tags of samples by key; creates new ones. Return table and indexes, or None if all
        samples were new."""

        def work(table: tq.Table, made: Columns | None) -> tuple[tq.Table, Rows] | None:
            return _put_keyed(table, made or _columns(table, data), keys, tags, is_new=made is not None)

        return self._on(partition_id, data, work)

    def keyed(self, partition_id: str, keys: Sequence[str]) -> tuple[tq.Table, Rows]:
        """Return indexes of samples by key; creates missing ones without data."""
        return self._on(partition_id, None, lambda table, _: (table, _create(table, keys)))

    def merge(
        self, partition_id: str, keys: Sequence[str], data: TensorDict, merge_fn: MergeFunction
    ) -> tuple[tq.Table, Rows]:
        """Set fields of samples by key to ``merge_fn(old, new)``, in one commit. Return table and indexes.

        `NotFound` for a partition, key or field that does not exist.
        """
        names = [str(name) for name in data.keys()]  # noqa: SIM118

        def attempt(table: tq.Table) -> tuple[tq.Table, Rows]:
            rows = rows_of(table, keys)
            merge(table, rows, data, merge_fn)
            return table, rows

        return retried(
            f"the update of keys {list(keys[:3])} in partition {partition_id!r}",
            lambda: self._read(partition_id, names, attempt),
        )

    def get(self, partition_id: str, keys: Sequence[str], names: Sequence[str] | None) -> TensorDict:
        """Read columns of samples by key: all that each has, or those of `names` that the partition has.

        `NotFound` for a partition or keys that do not exist.
        """
        return self._read(partition_id, names, lambda table: columns_at(table, rows_of(table, keys), names))

    def get_rows(self, partition_id: str, rows: Sequence[int], names: Sequence[str]) -> TensorDict:
        """Read columns of samples by index, as `get`."""
        return self._read(partition_id, names, lambda table: columns_at(table, indexes_of(rows), names))

    def _read(self, partition_id: str, names: Sequence[str] | None, work: Callable[[tq.Table], T]) -> T:
        """Return the result of `work` on the table, after refreshing its fields if `names` has unknown ones."""
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
        """Return the result of `work` on the table; it gets the columns of `data` if this call created the table for
        them."""
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
    """Return the fields of a table by their types."""
    return {name: field.describe() for name, field in table.fields.items()}


def rows_of(table: tq.Table, keys: Sequence[str]) -> Rows:
    """Return indexes of samples by key. `NotFound` names keys that do not exist."""
    rows = table.find(keys) if keys else np.empty(0, np.int64)
    if (rows < 0).any():
        missing = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        raise NotFound(f"keys {missing[:5]} not found in table {table.name}; put them first")
    return rows


def columns_at(table: tq.Table, rows: Rows, names: Sequence[str] | None) -> TensorDict:
    """Read columns of samples by index: all that each has, or those of `names` that the table has.

    A sample may be named several times, as a sampler with replacement chooses it.
    """
    chosen = None if names is None else [name for name in names if name in table.fields]
    once = list(dict.fromkeys(rows.tolist()))
    with table.read(rows if len(once) == len(rows) else indexes_of(once), fields=chosen) as read:
        shown = read.fields if chosen is None else chosen
        if len(once) == len(rows):
            return tensordict_of(read, shown)
        place = {row: at for at, row in enumerate(once)}
        again = [place[row] for row in rows.tolist()]
        return tensordict_of({name: read[name][again] for name in shown}, shown, len(rows))


def _put_keyed(
    table: tq.Table, columns: Columns, keys: Sequence[str], tags: Tags | None, *, is_new: bool
) -> tuple[tq.Table, Rows] | None:
    rows = np.full(len(keys), -1) if is_new else table.find(keys)
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
    facts: dict[str, Any] = {"tags": [stored_tags(sample_tags) for sample_tags in tags]} if tags else {}
    if keys is not None:
        facts["key"] = list(keys)
    return put_at_once(table, columns, **facts)


def put_at_once(table: tq.Table, columns: Columns, **facts: Any) -> Rows:
    """Put samples, or raise `Full`: the drop-in's calls do not wait for room."""
    client, terms = table._client, table._terms
    return run_sync(client.connection, commit.put_at_once(client, terms, GivenFacts(**facts), columns))


def _create(table: tq.Table, keys: Sequence[str]) -> Rows:
    """Return the rows of all keys; missing ones are created in one put."""
    for _ in range(_TRIES):
        rows = table.find(keys)
        new = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        if not new:
            return rows
        try:
            put_at_once(table, {}, key=new)
        except AlreadyExists:
            continue
    raise AlreadyExists(f"keys of table {table.name} are put and deleted by others all the time; try again")


def _update(table: tq.Table, rows: Sequence[int], columns: Columns, tags: Tags | None) -> None:
    indexes = indexes_of(rows)
    if tags and any(tags):
        retried(f"the update of tags in table {table.name}", lambda: _update_with_tags(table, indexes, columns, tags))
    elif columns:
        table.update(indexes, overwrite=True, **columns)


def _update_with_tags(table: tq.Table, rows: Rows, columns: Columns, tags: Tags) -> None:
    """Write columns and merge tags, unless others wrote the tags after they were read here."""
    with table.read(rows, fields=()) as read:
        merged = [{**old, **stored_tags(new)} for old, new in zip(read.tags, tags, strict=True)]
        table.update(rows, overwrite=True, if_unchanged=read, tags=merged, **columns)


def _columns(table: tq.Table, data: TensorDict | None) -> Columns:
    if data is None:
        return {}
    new, columns = columns_of(data, table.fields)
    # values that a put would infer as too narrow a type, or would refuse by name
    declared = [field for field in new if field.shape.count(None) > 1 or field.finite is False]
    if declared:
        table.add_fields(declared)
    return columns
