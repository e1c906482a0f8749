"""The tables of partitions, and samples in them by key. Clients use them without the controller.

Opened tables are cached: a put of known fields asks once for the keys and commits once, and does not ask at all for a
table that the same call created. Another process may drop a table and create it again with other fields under the same
name. A call that fails because something is gone is therefore repeated once on the current table, and a field that a
cached table lacks is looked up before it counts as unknown.

A table keeps the types of its fields; a partition without samples does not, since a program may put placeholders and
clear them at once. Columns that do not fit an empty table therefore get a new table.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue import steps
from transferqueue.adapters.transfer_queue.samples import table_steps
from transferqueue.adapters.transfer_queue.samples.columns import columns_of, tensordict_of
from transferqueue.adapters.transfer_queue.samples.merging import MergeFunction, merge, retried
from transferqueue.adapters.transfer_queue.samples.tags import given_tags, partition_of, stored_tags, table_of
from transferqueue.adapters.transfer_queue.steps import Steps
from transferqueue.errors import AlreadyExists, NotFound, SchemaError
from transferqueue.schema import Field

T = TypeVar("T")
P = ParamSpec("P")
Rows = npt.NDArray[np.int64]
Tags = Sequence[Mapping[str, Any]]
Columns = dict[str, Any]

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


class PartitionSteps:
    """The partitions of a deployment. Every method may be called from any thread or event loop, and is run as `steps`.

    `rows_max` bounds the samples of a partition that is created here. `renews`: ask the controller to drop the table of
    a partition that has no samples and does not fit a put. `room_s`: how long a put waits for memory.
    """

    def __init__(self, queue: tq.Queue, rows_max: int, *, renews: bool = False, room_s: float = 0.0) -> None:
        self._queue, self._rows_max, self._renews, self._room_s = queue, rows_max, renews, room_s
        self._tables: dict[str, tq.Table] = {}

    async def names(self) -> list[str]:
        """Names of the partitions."""
        tables = await table_steps.names(self._queue)
        return [name for table in tables if (name := partition_of(table)) is not None]

    async def find(self, partition_id: str) -> tq.Table | None:
        """Return a partition's current table; None if it does not exist."""
        try:
            table = self._tables[partition_id] = await table_steps.opened(self._queue, table_of(partition_id))
        except NotFound:
            self._tables.pop(partition_id, None)
            return None
        return table

    async def make(self, partition_id: str, fields: Sequence[Field] = ()) -> tuple[tq.Table, bool]:
        """Return a partition's table, created with `fields` if it is missing, and whether it was created."""
        name, limits = table_of(partition_id), tq.Limits(rows=self._rows_max)
        for _ in range(_TRIES):
            try:
                table = await table_steps.created(self._queue, name, list(fields), [_KEPT], limits, tq.Manual())
            except AlreadyExists:
                existing = await self.find(partition_id)
                if existing is not None:
                    return existing, False
            else:
                self._tables[partition_id] = table
                return table, True
        raise AlreadyExists(f"partition {partition_id!r} is made and cleared by others all the time; try again")

    async def put(self, partition_id: str, data: TensorDict) -> Rows:
        """Put new samples without keys; return their indexes."""

        async def work(table: tq.Table, made: Columns | None) -> Rows:
            return await _put(table, made or await _columns(table, data), None, None, self._room_s)

        return await self._on(partition_id, data, work)

    async def update(self, partition_id: str, rows: Sequence[int], data: TensorDict | None, tags: Tags | None) -> None:
        """Write columns and merge tags of samples by index."""

        async def work(table: tq.Table, made: Columns | None) -> None:
            await _update(table, rows, made or await _columns(table, data), tags)

        await self._on(partition_id, data, work)

    async def put_keyed(
        self, partition_id: str, keys: Sequence[str], data: TensorDict | None, tags: Tags | None
    ) -> tuple[tq.Table, Rows] | None:
        """Write columns and merge tags of samples by key; creates new ones. Return table and indexes, or None if all
        samples were new."""

        async def work(table: tq.Table, made: Columns | None) -> tuple[tq.Table, Rows] | None:
            columns = made or await _columns(table, data)
            return await _put_keyed(table, columns, keys, tags, is_new=made is not None, room_s=self._room_s)

        return await self._on(partition_id, data, work)

    async def keyed(self, partition_id: str, keys: Sequence[str]) -> Rows:
        """Return indexes of samples by key; creates missing ones without data."""

        async def work(table: tq.Table, made: Columns | None) -> Rows:
            return await _create(table, keys)

        return await self._on(partition_id, None, work)

    async def merge(
        self, partition_id: str, keys: Sequence[str], data: TensorDict, merge_fn: MergeFunction
    ) -> tuple[tq.Table, Rows]:
        """Set fields of samples by key to ``merge_fn(old, new)``, in one commit. Return table and indexes.

        `NotFound` for a partition, key or field that does not exist.
        """
        names = [str(name) for name in data.keys()]  # noqa: SIM118

        async def attempt(table: tq.Table) -> tuple[tq.Table, Rows]:
            rows = await rows_of(table, keys)
            await merge(table, rows, data, merge_fn)
            return table, rows

        return await retried(
            f"the update of keys {list(keys[:3])} in partition {partition_id!r}",
            lambda: self._read(partition_id, names, attempt),
        )

    async def get(self, partition_id: str, keys: Sequence[str], names: Sequence[str] | None) -> TensorDict:
        """Read columns of samples by key: all that each has, or those of `names` that the partition has.

        `NotFound` for a partition or keys that do not exist.
        """

        async def work(table: tq.Table) -> TensorDict:
            return await columns_at(table, await rows_of(table, keys), names)

        return await self._read(partition_id, names, work)

    async def get_rows(self, partition_id: str, rows: Sequence[int], names: Sequence[str]) -> TensorDict:
        """Read columns of samples by index, as `get`."""
        return await self._read(partition_id, names, lambda table: columns_at(table, indexes_of(rows), names))

    async def _read(self, partition_id: str, names: Sequence[str] | None, work: Callable[[tq.Table], Steps[T]]) -> T:
        """Return the result of `work` on the table, after refreshing its fields if `names` has unknown ones."""
        remembered = self._tables.get(partition_id)
        if remembered is not None and all(name in remembered.fields for name in names or ()):
            try:
                return await work(remembered)
            except NotFound:  # cleared, and perhaps made again
                pass
        table = await self.find(partition_id)
        if table is None:
            raise NotFound(f"partition {partition_id!r} not found; a put makes it")
        return await work(table)

    async def _on(self, partition_id: str, data: TensorDict | None, work: Work[T]) -> T:
        """Return the result of `work` on the table; it gets the columns of `data` if this call created the table for
        them."""
        try:
            return await self._tried(partition_id, data, work)
        except SchemaError:
            table = await self.find(partition_id)
            if not self._renews or table is None:
                raise
            await steps.Question("renew", partition_id, described(table))
            self._tables.pop(partition_id, None)
        return await self._tried(partition_id, data, work)

    async def _tried(self, partition_id: str, data: TensorDict | None, work: Work[T]) -> T:
        remembered = self._tables.get(partition_id)
        if remembered is not None:
            try:
                return await work(remembered, None)
            except NotFound:  # as above
                pass
        new, columns = ([], {}) if data is None else columns_of(data, {})
        table, made = await self.make(partition_id, new)
        return await work(table, columns if made else None)


Work = Callable[[tq.Table, Columns | None], Steps[T]]
"""What a call does on a table; it gets the columns if this call created the table for them."""


def _blocking(
    method: Callable[Concatenate[PartitionSteps, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Partitions, P], T]:
    def call(self: Partitions, /, *arguments: P.args, **named: P.kwargs) -> T:
        return steps.run(method(self.steps, *arguments, **named))

    return steps.named(call, method)


class Partitions:
    """`PartitionSteps` for threads."""

    def __init__(self, queue: tq.Queue, rows_max: int) -> None:
        self.steps = PartitionSteps(queue, rows_max)

    names = _blocking(PartitionSteps.names)
    find = _blocking(PartitionSteps.find)
    make = _blocking(PartitionSteps.make)
    put = _blocking(PartitionSteps.put)
    update = _blocking(PartitionSteps.update)
    put_keyed = _blocking(PartitionSteps.put_keyed)
    keyed = _blocking(PartitionSteps.keyed)
    get = _blocking(PartitionSteps.get)
    get_rows = _blocking(PartitionSteps.get_rows)


def described(table: tq.Table) -> dict[str, str]:
    """Return the fields of a table by their types."""
    return {name: field.describe() for name, field in table.fields.items()}


async def rows_of(table: tq.Table, keys: Sequence[str]) -> Rows:
    """Return indexes of samples by key. `NotFound` names keys that do not exist."""
    rows = await table_steps.find(table, keys) if keys else np.empty(0, np.int64)
    if (rows < 0).any():
        missing = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        raise NotFound(f"keys {missing[:5]} not found in table {table.name}; put them first")
    return rows


async def columns_at(table: tq.Table, rows: Rows, names: Sequence[str] | None) -> TensorDict:
    """Read columns of samples by index: all that each has, or those of `names` that the table has.

    A sample may be named several times, as a sampler with replacement chooses it.
    """
    chosen = None if names is None else [name for name in names if name in table.fields]
    once = list(dict.fromkeys(rows.tolist()))
    with await table_steps.read(table, rows if len(once) == len(rows) else indexes_of(once), chosen) as read:
        shown = read.fields if chosen is None else chosen
        if len(once) == len(rows):
            return tensordict_of(read, shown)
        place = {row: at for at, row in enumerate(once)}
        again = [place[row] for row in rows.tolist()]
        return tensordict_of({name: read[name][again] for name in shown}, shown, len(rows))


async def _put_keyed(
    table: tq.Table, columns: Columns, keys: Sequence[str], tags: Tags | None, *, is_new: bool, room_s: float = 0.0
) -> tuple[tq.Table, Rows] | None:
    rows = np.full(len(keys), -1) if is_new else await table_steps.find(table, keys)
    if (rows < 0).all():
        try:
            await _put(table, columns, keys, tags, room_s)
            return None
        except AlreadyExists:  # another client was quicker with one of the keys
            rows = await table_steps.find(table, keys)
    if (rows < 0).any():
        rows = await _create(table, keys)
    await _update(table, rows.tolist(), columns, tags)
    return table, rows


async def _put(table: tq.Table, columns: Columns, keys: Sequence[str] | None, tags: Tags | None, room_s: float) -> Rows:
    facts: dict[str, Any] = {"tags": [stored_tags(sample_tags) for sample_tags in tags]} if tags else {}
    if keys is not None:
        facts["key"] = list(keys)
    return await table_steps.put(table, columns, room_s=room_s, **facts)


def put_at_once(table: tq.Table, columns: Columns, **facts: Any) -> Rows:
    """Put samples, or raise `Full`: the drop-in's calls do not wait for room."""
    return steps.run(table_steps.put(table, columns, **facts))


def put_stored(table: tq.Table, columns: Columns, keys: Sequence[str], tags: Tags) -> None:
    """Write columns and merge stored tags of samples by key; creates new ones."""
    given = [given_tags(sample_tags) for sample_tags in tags]
    steps.run(_put_keyed(table, columns, keys, given, is_new=False))


async def _create(table: tq.Table, keys: Sequence[str]) -> Rows:
    """Return the rows of all keys; missing ones are created in one put."""
    for _ in range(_TRIES):
        rows = await table_steps.find(table, keys)
        new = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        if not new:
            return rows
        try:
            await table_steps.put(table, {}, key=new)
        except AlreadyExists:
            continue
    raise AlreadyExists(f"keys of table {table.name} are put and deleted by others all the time; try again")


async def _update(table: tq.Table, rows: Sequence[int], columns: Columns, tags: Tags | None) -> None:
    indexes = indexes_of(rows)
    if tags and any(tags):
        await retried(
            f"the update of tags in table {table.name}", lambda: _update_with_tags(table, indexes, columns, tags)
        )
    elif columns:
        await table_steps.update(table, indexes, columns)


async def _update_with_tags(table: tq.Table, rows: Rows, columns: Columns, tags: Tags) -> None:
    """Write columns and merge tags, unless others wrote the tags after they were read here."""
    with await table_steps.read(table, rows, ()) as read:
        merged = [{**old, **stored_tags(new)} for old, new in zip(read.tags, tags, strict=True)]
        await table_steps.update(table, rows, columns, if_unchanged=read, tags=merged)


async def _columns(table: tq.Table, data: TensorDict | None) -> Columns:
    if data is None:
        return {}
    new, columns = columns_of(data, table.fields)
    # values that a put would infer as too narrow a type, or would refuse by name
    declared = [field for field in new if field.shape.count(None) > 1 or field.finite is False]
    if declared:
        await table_steps.add_fields(table, declared)
    return columns
