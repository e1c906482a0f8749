"""Blocks of values that are stored by their content: a block for each different value of a column (`Repeat`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from transferqueue.limits import ALIGNMENT, CONTENTS_MAX
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.inputs.block_writer import BlockWriter
from transferqueue.storage.inputs.prepare import Prepared
from transferqueue.storage.inputs.sources import ValueSource
from transferqueue.storage.memory.checksum import digest
from transferqueue.storage.memory.parallel_copy import parallel_copy


class ContentBlock(BlockWriter):
    """The block of one value. It is made at once: whether the table already has it depends on its bytes.

    Two blocks of the same content and layout count as equal. That two of a billion different blocks have the same
    content by chance has a probability of 1.5e-21 (the birthday bound for 128 bits); a producer could forge it.

    Attributes:
        content: xxh3-128 of the bytes.
        members: the rows of the request that have the value; None: all.
    """

    __slots__ = ("_bytes", "content", "members")

    def __init__(self, value: Prepared, *, checksums: bool) -> None:
        super().__init__([value])
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


def content_blocks(column: Prepared, *, checksums: bool) -> list[ContentBlock]:
    """A block for each different value of the column; none if it has more than `CONTENTS_MAX`."""
    if column.stored_rows == 1:
        return [ContentBlock(column, checksums=checksums)]
    blocks: dict[tuple[bytes, int], ContentBlock] = {}
    rows_of: dict[tuple[bytes, int], list[int]] = {}
    for row, value in enumerate(_values_of(column)):
        block = ContentBlock(value, checksums=checksums)
        key = block.content, block.nbytes
        blocks.setdefault(key, block)
        rows_of.setdefault(key, []).append(row)
        if len(blocks) > CONTENTS_MAX:
            return []
    if len(blocks) == 1:
        (single,) = blocks.values()
        single.rows, single.slots = column.rows, np.zeros(column.rows, np.int32)
        return [single]
    for key, block in blocks.items():
        block.members = np.array(rows_of[key], np.int32)
    return list(blocks.values())


class _WrittenValue(ValueSource):
    """One value of a column, as it lies in a block."""

    def __init__(self, values: U8) -> None:
        self.values = values

    def write(self, out: U8) -> None:
        """Fill `out`."""
        out[:] = self.values


def _values_of(column: Prepared) -> Iterator[Prepared]:
    """Each row as a column of its own."""
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
