"""Writes blocks: columns of one put, laid out by `schema.layout`. A block is written once and then only read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from transferqueue.errors import InternalError, SchemaError, UsageError
from transferqueue.limits import ALIGNMENT, CONTENTS_MAX, INTERNED_BYTES_MIN
from transferqueue.schema import Span, layout
from transferqueue.storage.elements.dtypes import I32, U8
from transferqueue.storage.inputs.prepare import Prepared
from transferqueue.storage.inputs.sources import ValueSource
from transferqueue.storage.memory.checksum import UNCHECKED, checksum, digest
from transferqueue.storage.memory.parallel_copy import PARALLEL_BYTES, Job, parallel_copy
from transferqueue.text import counted


class BlockWriter:
    """The columns of one block, and its layout. Writes the block.

    rows: of the request. stored_rows: of the block. fields, counts: as `WrittenBlock` gives them. slots: for each row
    of the request its slot in the block, int32 ``[rows]``; None if they are the same. nbytes: the size of the block.
    sum: its checksum, after `take_checksum`.
    """

    content: bytes = b""
    members: I32 | None = None
    """Of an `InternedBlock`."""
    __slots__ = ("columns", "counts", "fields", "nbytes", "rows", "slots", "spans", "stored_rows", "sum")

    def __init__(self, columns: Sequence[Prepared]) -> None:
        first = columns[0]
        self.columns, self.rows, self.stored_rows, self.slots = columns, first.rows, first.stored_rows, first.slots
        self.fields, self.counts = [first.field], [first.count]
        for column in columns[1:]:
            _check_rows(first, column)
            if not _same(first.slots, column.slots):
                raise UsageError(
                    f'field "{column.field.name}" shares values unlike the others of its block; see `block_writers`'
                )
            self.fields.append(column.field)
            self.counts.append(column.count)
        self.spans, self.nbytes = layout(self.fields, self.stored_rows, self.counts)
        self.sum = UNCHECKED

    def write(self, out: memoryview | U8) -> None:
        """Write all columns, each in one pass, into `out`: `nbytes` bytes on a 64-byte boundary. Padding becomes zeros.

        Raises:
            SchemaError: a column that must be finite has NaN or infinity. The bytes are written, and must not be
                committed.
        """
        block = np.frombuffer(out, np.uint8) if isinstance(out, memoryview) else out
        if len(block) != self.nbytes:
            raise InternalError(f"a block of {self.nbytes} bytes is written into {len(block)}; give it exactly its own")
        if len(self.columns) == 1 and self.spans[0].offsets < 0 and 0 < self.nbytes < PARALLEL_BYTES:
            _write_values(block, self.columns[0])
        else:
            self._write_columns(block)
        for column, span in zip(self.columns, self.spans, strict=True):
            if column.finite and column.nbytes:
                column.check_finite(block[span.values : span.values + span.values_bytes])

    def _write_columns(self, block: U8) -> None:
        at, jobs = 0, list[Job]()
        for column, span in zip(self.columns, self.spans, strict=True):
            jobs += column.jobs(block, span)
            at = _zero_padding(block, span, column, at)
        block[at:] = 0
        if self.nbytes < PARALLEL_BYTES:  # these need no queue of jobs
            for job in jobs:
                job()
        else:
            parallel_copy(jobs, self.nbytes)

    def take_checksum(self, block: memoryview | U8) -> None:
        """Compute the checksum of the written block once, while it is in the cache. Further copies have the same
        checksum."""
        if self.sum == UNCHECKED:
            self.sum = checksum(block)


class InternedBlock(BlockWriter):
    """The block of one interned column, which is made at once: whether the table has it already depends on its bytes.

    content: xxh3-128 of the bytes. Two blocks of the same content and layout are taken for equal: of a billion
    different ones, no two have the same with a probability of 1 - 1.5e-21 (the birthday bound for 128 bits), if nobody
    makes them for that purpose. members: the rows of the request that have its one value, if the column lies in several
    blocks (`interned_blocks`).
    """

    __slots__ = ("_bytes", "content", "members")

    def __init__(self, column: Prepared, *, checksums: bool) -> None:
        super().__init__([column])
        memory = np.empty(self.nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._bytes = memory[start : start + self.nbytes]
        super().write(self._bytes)
        self.content = digest(self._bytes)
        self.members = None
        if checksums:
            self.take_checksum(self._bytes)

    def write(self, out: memoryview | U8) -> None:
        """Copy the block into `out`."""
        whole = np.frombuffer(out, np.uint8) if isinstance(out, memoryview) else out
        whole[:] = self._bytes


class _WrittenValue(ValueSource):
    """One value of a column, as it lies in a block."""

    def __init__(self, values: U8) -> None:
        self.values = values

    def write(self, out: U8) -> None:
        """Fill `out`."""
        out[:] = self.values


def may_intern(column: Prepared, *, are_new: bool) -> bool:
    """Whether the values of an interned column may be shared with those of other commits. are_new: its rows are; others
    share single values alone."""
    return column.interned and (are_new or column.stored_rows == 1 or _lies_apart(column))


def interned_blocks(column: Prepared, *, checksums: bool) -> list[InternedBlock]:
    """The blocks of an interned column: one for each different value if it has few, large ones, so that commits which
    mix them otherwise find them again; else one with all of them."""
    if not _lies_apart(column):
        return [InternedBlock(column, checksums=checksums)]
    blocks: dict[tuple[bytes, int], InternedBlock] = {}
    stored_rows_of: dict[tuple[bytes, int], list[int]] = {}
    for stored_row, value in enumerate(_values_of(column)):
        block = InternedBlock(value, checksums=checksums)
        key = block.content, block.nbytes
        blocks.setdefault(key, block)
        stored_rows_of.setdefault(key, []).append(stored_row)
    if len(blocks) == 1:
        (single,) = blocks.values()
        single.rows, single.slots = column.rows, np.zeros(column.rows, np.int32)
        return [single]
    slots = np.arange(column.rows, dtype=np.int32) if column.slots is None else column.slots
    for key, block in blocks.items():
        block.members = np.flatnonzero(np.isin(slots, stored_rows_of[key])).astype(np.int32)
    return [block for block in blocks.values() if block.members is not None and block.members.size]


def _lies_apart(column: Prepared) -> bool:
    """Whether each value of the column is worth a block of its own."""
    return 1 < column.stored_rows <= CONTENTS_MAX and column.nbytes >= column.stored_rows * INTERNED_BYTES_MIN


def _values_of(column: Prepared) -> Iterator[Prepared]:
    """Each stored row as a column of its own."""
    values = np.empty(column.nbytes, np.uint8)
    parallel_copy(column.source.jobs(values), column.nbytes)
    column.check_finite(values)
    field, shapes = column.field, column.shapes
    offsets = np.arange(column.stored_rows + 1) if column.offsets is None else column.offsets
    step = column.nbytes // int(offsets[-1])
    for row, (low, high) in enumerate(pairwise(offsets.tolist())):
        own = None if column.offsets is None else np.array([0, high - low], np.int64)
        yield Prepared(
            field,
            1,
            _WrittenValue(values[low * step : high * step]),
            own,
            None if shapes is None else shapes[row : row + 1],
        )


def block_writers(columns: Sequence[Prepared]) -> list[BlockWriter]:
    """The writers of the blocks of these columns. Columns whose rows share values in the same way lie in one block."""
    if len(columns) == 1:
        return [BlockWriter(columns)]
    columns_by_slots: dict[bytes | None, list[Prepared]] = {}
    for column in columns:
        _check_rows(columns[0], column)
        columns_by_slots.setdefault(None if column.slots is None else column.slots.tobytes(), []).append(column)
    return [BlockWriter(together) for together in columns_by_slots.values()]


def _check_rows(first: Prepared, column: Prepared) -> None:
    if column.rows != first.rows:
        raise SchemaError(
            f'field "{column.field.name}" has {counted(column.rows, "row")}, but field "{first.field.name}" has '
            f"{first.rows}; all columns of "
            "one call have the same rows"
        )


def _same(one: I32 | None, other: I32 | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _write_values(block: U8, column: Prepared) -> None:
    """Write a block that has only the values of one small column: no offsets, no shapes, and no jobs."""
    if column.nbytes:
        column.source.write(block[: column.nbytes])
    block[column.nbytes :] = 0


def _zero_padding(block: U8, span: Span, column: Prepared, at: int) -> int:
    """Zero the gaps between the buffers of one column, so that a block's bytes depend on its content alone."""
    rows, field = column.stored_rows, column.field
    for start, nbytes in (
        (span.shapes, 8 * rows * len(field.shape)),
        (span.offsets, 8 * (rows + 1)),
        (span.values, span.values_bytes),
    ):
        if start >= 0:
            if start > at:
                block[at:start] = 0
            at = start + nbytes
    return at
