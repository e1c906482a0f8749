"""Writes blocks: columns of one put, laid out by `schema.layout`. A block is written once and then only read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transferqueue.errors import InternalError, SchemaError, UsageError
from transferqueue.errors.text import counted
from transferqueue.schema import Span, layout
from transferqueue.storage.elements.dtypes import I32, U8
from transferqueue.storage.inputs.prepare import Prepared
from transferqueue.storage.memory.checksum import UNCHECKED, checksum
from transferqueue.storage.memory.parallel_copy import PARALLEL_BYTES, Job, parallel_copy


class BlockWriter:
    """The columns of one block, and its layout. Writes the block.

    Args:
        rows: of the request.
        stored_rows: of the block.
        fields: as in `WrittenBlock`.
        counts: as in `WrittenBlock`.
        slots: for each row of the request its slot in the block, int32 ``[rows]``; None if they are the same.
        nbytes: the size of the block.
        sum: its checksum, after `take_checksum`.
    """

    content: bytes = b""
    members: I32 | None = None
    """Of a `ContentBlock`."""
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
            raise InternalError(f"a block of {self.nbytes} bytes needs a buffer of its size, not of {len(block)}")
        at = 0
        jobs: list[Job] = []
        for column, span in zip(self.columns, self.spans, strict=True):
            column.write_lengths(block, span)
            at = _zero_padding(block, span, column, at)
            values = block[span.values : span.values + span.values_bytes]
            if column.nbytes and self.nbytes < PARALLEL_BYTES:
                column.source.write(values)
            elif column.nbytes:
                jobs += column.source.jobs(values)
        block[at:] = 0
        if jobs:
            parallel_copy(jobs, self.nbytes)
        for column, span in zip(self.columns, self.spans, strict=True):
            if column.finite and column.nbytes:
                column.check_finite(block[span.values : span.values + span.values_bytes])

    def take_checksum(self, block: memoryview | U8) -> None:
        """Compute the checksum of the written block once, while it is in the cache. Further copies have the same
        checksum."""
        if self.sum == UNCHECKED:
            self.sum = checksum(block)


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
            f"{first.rows}; all columns of one call have the same rows"
        )


def _same(one: I32 | None, other: I32 | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


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
