"""A batch of ended rows as an Arrow table: the lineage of each row, then its columns.

Names of lineage begin with ``_``. A column of the table that has such a name is written under ``field.NAME``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import numpy as np

from transferqueue.errors import Corruption
from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray, by_value
from transferqueue.ledger.rows import DONE, TableEvent
from transferqueue.ledger.rules.recording import EndedBatch
from transferqueue.schema import Field
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.export import arrow_type
from transferqueue.storage.columns.joined import along_chains, join
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.elements.dtypes import U8
from transferqueue.wire.messages import BlockLocation

Memory = Callable[[BlockLocation], U8]
"""Returns the bytes of a block. They do not change while the batch is written."""
ROW_GROUP_BYTES: Final = 32 << 20
"""About the size of a row group in memory."""
FILE_BYTES: Final = 256 << 20
"""About the size in memory of the rows of a file, of which there are more in a larger batch."""
_FACT_NAMES: Final = {"policy_version": "_version", "policy_version_max": "_version_max"}


class BatchColumns:
    """The columns of one batch. `wall`: seconds since 1970 at the batch's `now`."""

    def __init__(self, batch: EndedBatch, memory: Memory, wall: float) -> None:
        self._batch, self._memory, self._wall = batch, memory, wall
        self._steps: IntArray = np.concatenate([ended.steps for ended in batch.ended])
        self._lineage = self._of_all()
        self._events = RowEvents(batch.rows, batch.events, batch.workers, wall - batch.now)
        self._sizes = self._sizes_of_rows()

    def files(self) -> list[IntArray]:
        """The positions of the rows of each file, in the order of their steps."""
        order = np.argsort(self._steps, kind="stable")
        return np.split(order, _cuts(self._sizes[order], FILE_BYTES))

    def chunks(self, chosen: IntArray) -> Iterator[Any]:
        """Tables of the rows at these positions, of bounded size. Rows without a step, which come first, have their
        own: a reader of one step cannot skip a row group with nulls."""
        first = int(np.count_nonzero(self._steps[chosen] < 0))
        for rows in np.split(chosen, [first]):
            for piece in np.split(rows, _cuts(self._sizes[rows], ROW_GROUP_BYTES)):
                if piece.size:
                    yield self._table(piece)

    def schema(self) -> Any:
        """The schema of all tables of this batch."""
        return self._table(np.empty(0, np.int64)).schema

    def _table(self, at: IntArray) -> Any:
        import pyarrow as pa

        index = pa.array(at)
        columns = {name: column.take(index) for name, column in self._lineage.items()}
        columns["_events"] = self._events.of(at)
        fields = [pa.field(name, column.type) for name, column in columns.items()]
        for field in self._batch.fields.values():
            name = f"field.{field.name}" if field.name in columns else field.name
            columns[name] = self._column(field, at)
            about = {"transferqueue.dtype": field.dtype, "transferqueue.shape": json.dumps(field.shape)}
            fields.append(pa.field(name, columns[name].type, metadata=about))
        return pa.Table.from_arrays([*columns.values()], schema=pa.schema(fields))

    # ------------------------------------------------------------ columns of the table

    def _sizes_of_rows(self) -> AnyArray:
        """About the bytes of each row."""
        batch, sizes = self._batch, 256.0 + self._events.sizes
        for name, (blocks, _) in batch.places.items():
            nodes = batch.nodes.get(name)
            if nodes is None:
                sizes += self._sizes_in(blocks)
            else:
                whole = along_chains(self._sizes_in(nodes.blocks), nodes.parents)
                sizes += np.where(nodes.of_row >= 0, whole[nodes.of_row], 0.0)
        return sizes

    def _sizes_in(self, blocks: IntArray) -> AnyArray:
        """About the bytes of a value in each of these blocks."""
        numbers, index = np.unique(blocks, return_inverse=True)
        places = [self._batch.blocks.get(number) for number in numbers.tolist()]
        each = np.array([0.0 if at is None else at.nbytes / (at.rows * len(at.fields)) for at in places])
        sizes: AnyArray = each[index.reshape(-1)]
        return sizes

    def _column(self, field: Field, at: IntArray) -> Any:
        has = self._batch.has[field.name][at]
        if field.name in self._batch.inline:
            values = Column.of_inline(field, np.ascontiguousarray(self._batch.inline[field.name][at[has]])).arrow()
        elif has.any():
            values = self._values(field, at[has])
        else:
            return _nulls(arrow_type(field), at.size)
        return values if has.all() else _spread(values, has)

    def _values(self, field: Field, at: IntArray) -> Any:
        """Values in blocks. `Corruption` with the number of the first block that another process wrote wrong."""
        try:
            return _checked(field, Column(field, self._whole(field, at)).arrow())
        except Corruption:
            blocks, slots = self._stored(field.name, at)
            for block, rows in by_value(blocks):
                try:
                    _checked(field, Column(field, self._placement(blocks[rows], slots[rows])).arrow())
                except Corruption as error:
                    raise Corruption(str(error), block=block) from error
            raise

    def _stored(self, name: str, at: IntArray) -> tuple[IntArray, AnyArray]:
        """Block and slot of all values that these rows are made of."""
        if name in self._batch.nodes:
            return self._batch.nodes[name].of_rows(at)[:2]
        blocks, slots = self._batch.places[name]
        return blocks[at], slots[at]

    def _whole(self, field: Field, at: IntArray) -> RowPlacement:
        """The places of these rows; in new memory if some continue others."""
        placement = self._placement(*self._stored(field.name, at))
        if field.name not in self._batch.nodes:
            return placement
        nodes = self._batch.nodes[field.name].of_rows(at)
        return join(field, placement, nodes.parents, nodes.of_row)

    def _placement(self, blocks: IntArray, slots: AnyArray) -> RowPlacement:
        batch = self._batch
        numbers, index = np.unique(blocks, return_inverse=True)
        places = [batch.blocks[number] for number in numbers.tolist()]
        mapped = MappedBlocks(places, [self._memory(place) for place in places], batch.fields)
        return RowPlacement(mapped, index.reshape(-1).astype(np.int32), slots.astype(np.int32))

    # ------------------------------------------------------------ lineage

    def _of_all(self) -> dict[str, Any]:
        import pyarrow as pa

        batch = self._batch
        counts = [ended.rows.size for ended in batch.ended]
        each: IntArray = np.repeat(np.arange(len(counts)), counts)
        keys = dict(chain.from_iterable(ended.keys.items() for ended in batch.ended))
        rows = batch.rows.tolist()
        ended_at = np.array([ended.at for ended in batch.ended])[each] + (self._wall - batch.now)
        facts = {_FACT_NAMES.get(name, f"_{name}"): pa.array(values) for name, values in batch.facts.items()}
        return {
            "_life": _texts([batch.life], np.zeros(batch.rows.size, np.int64)),
            "_row": pa.array(batch.rows),
            "_key": pa.array([keys.get(row) for row in rows], pa.string()),
            "_tags": pa.array([json.dumps(t) if (t := batch.tags.get(row)) else None for row in rows], pa.string()),
            "_fate": _texts([_fate(ended.fate) for ended in batch.ended], each),
            "_reason": _texts([ended.reason or None for ended in batch.ended], each),
            "_step": pa.array(self._steps, mask=self._steps < 0),
            "_ended_at": _times(ended_at),
            "_put_at": _times(self._wall - batch.put_age_s),
            **facts,
            "_attempts": _attempts(batch),
        }


def _fate(fate: int) -> str:
    return "done" if fate == DONE else "dropped"


def _attempts(batch: EndedBatch) -> Any:
    """Leases that failed, by task. A list, since the library `datasets` has no maps."""
    import pyarrow as pa

    if not batch.attempts:
        kind = pa.struct([("task", pa.string()), ("failures", pa.int32())])
        return pa.nulls(batch.rows.size, pa.list_(kind))
    names, rows = list(batch.attempts), batch.rows.size
    values = np.stack([batch.attempts[name] for name in names], axis=1).reshape(-1).astype(np.int32)
    kept = values > 0
    offsets = np.concatenate([[0], np.cumsum(kept.reshape(rows, -1).sum(axis=1))]).astype(np.int32)
    tasks = pa.array(names).take(pa.array(np.tile(np.arange(len(names)), rows)[kept]))
    failures = pa.StructArray.from_arrays([tasks, pa.array(values[kept])], ["task", "failures"])
    return pa.ListArray.from_arrays(pa.array(offsets), failures)


class RowEvents:
    """The events of each row of a batch, the oldest first: when, what, the task, the worker, and details.

    Args:
        rows: of the batch.
        events: of the table.
        workers: names of its sessions.
        shift: from the times of events to seconds since 1970.
    """

    def __init__(self, rows: IntArray, events: list[TableEvent], workers: dict[int, str], shift: float) -> None:
        import pyarrow as pa

        ids = np.concatenate([event.rows for event in events]) if events else np.empty(0, np.int64)
        number = np.repeat(np.arange(len(events)), [event.rows.size for event in events])
        order = np.argsort(rows, kind="stable")
        at = np.searchsorted(rows[order], ids)
        mine = rows[order][np.minimum(at, rows.size - 1)] == ids if rows.size else np.zeros(ids.size, np.bool_)
        position, number = order[at[mine]], number[mine]
        lengths = np.array([len(event.detail) for event in events], np.float64)
        self.sizes = np.bincount(position, weights=lengths[number], minlength=rows.size)
        """Bytes of the details of each row, about."""
        self._number = number[np.lexsort((number, position))]
        """Number of the event, of all events of the first row, then of the second, and so on."""
        self._edges = np.concatenate([[0], np.cumsum(np.bincount(position, minlength=rows.size))])
        self._told = {
            "at": _times(np.array([event.at for event in events]) + shift),
            "what": pa.array([event.what for event in events], pa.string()),
            "task": pa.array([event.task or None for event in events], pa.string()),
            "worker": pa.array([_worker(event.session, workers) for event in events], pa.string()),
            "detail": pa.array([event.detail or None for event in events], pa.string()),
        }

    def of(self, at: IntArray) -> Any:
        """The events of the rows at these positions."""
        import pyarrow as pa

        counts = self._edges[at + 1] - self._edges[at]
        ends = np.concatenate([[0], np.cumsum(counts)])
        chosen = np.arange(ends[-1]) + np.repeat(self._edges[at] - ends[:-1], counts)
        index = pa.array(self._number[chosen])
        values = pa.StructArray.from_arrays([column.take(index) for column in self._told.values()], [*self._told])
        return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values)


def _worker(session: int, workers: dict[int, str]) -> str | None:
    return (workers.get(session) or f"session {session}") if session else None


def _times(seconds: AnyArray) -> Any:
    import pyarrow as pa

    return pa.array((seconds * 1e6).astype(np.int64), pa.timestamp("us", "UTC"))


def _texts(texts: list[str | None], index: IntArray) -> Any:
    import pyarrow as pa

    return pa.array(texts, pa.string()).take(pa.array(index))


def _spread(values: Any, has: BoolArray) -> Any:
    """The values at the rows that have one, and nulls at the others."""
    import pyarrow as pa

    return values.take(pa.array(np.cumsum(has) - 1, mask=~has))


def _checked(field: Field, values: Any) -> Any:
    """The values, if text among them is text: each reader of the file takes it for that."""
    import pyarrow as pa

    if field.dtype == "str":
        try:
            values.validate(full=True)
        except pa.ArrowInvalid as error:
            raise Corruption(f'field "{field.name}": stored text is not UTF-8 ({error})') from error
    return values


def _nulls(kind: Any, count: int) -> Any:
    import pyarrow as pa

    return pa.nulls(count, kind)


def _cuts(sizes: AnyArray, nbytes: int) -> AnyArray:
    """Where rows of these sizes are cut into pieces of about so many bytes."""
    piece = (np.cumsum(sizes) // nbytes).astype(np.int64)
    cuts: AnyArray = np.flatnonzero(np.diff(piece)) + 1
    return cuts
