"""The places of a batch's rows: its blocks in memory, and the block and slot of each row.

All blocks of a batch are addressed as one range of memory, from the lowest address to the highest. Only bytes inside
blocks are ever touched. So a few numpy operations locate thousands of rows in hundreds of blocks, without a loop over
blocks. Offsets that other processes wrote are checked against their block before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

from transferqueue.errors import BatchEnded, Corruption
from transferqueue.limits import ALIGNMENT, BLOCK_ROWS_MAX
from transferqueue.schema import Field, layout
from transferqueue.storage.elements.dtypes import I32, I64, U8
from transferqueue.storage.memory.private_pages import array_at, memory_address

VECTORISED_BLOCKS: Final = 4
"""With more blocks than this, the layouts of all blocks are computed at once."""


class BlockLayout(Protocol):
    """The layout of a block, as a reply gives it."""

    @property
    def block(self) -> int:
        """Id of the block."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""

    @property
    def rows(self) -> int:
        """Rows of the block."""

    @property
    def fields(self) -> Sequence[str]:
        """Names of its columns, in order."""

    @property
    def counts(self) -> Sequence[int]:
        """One count for each column; see `schema.layout`."""


class Releasable(Protocol):
    """An object that holds memory of blocks and can release it."""

    def forget(self) -> None:
        """Release the memory."""


class ColumnOffsets(NamedTuple):
    """The offset of each buffer of one column in each block, in bytes from the block's start; -1: the block has no such
    buffer.

    Each is int64 ``[blocks]``. `counts` is the last offset of the column, see `schema.layout`.
    """

    values: I64
    offsets: I64
    shapes: I64
    counts: I64


class MappedBlocks:
    """Blocks in this process's memory. This object keeps the memory alive until `end`.

    Args:
        shapes: the layout of each block.
        memory: ``uint8 [nbytes]`` of each block, in the same order.
        fields: all fields of the blocks, by name.
    """

    def __init__(self, shapes: Sequence[BlockLayout], memory: Sequence[U8], fields: Mapping[str, Field]) -> None:
        self.shapes, self.fields = shapes, fields
        self.memory = memory
        self._addresses = list(map(memory_address, memory))
        if any(address % ALIGNMENT for address in self._addresses):
            self.memory = [_aligned(block) for block in memory]
            self._addresses = list(map(memory_address, self.memory))
        self._sizes = list(map(len, self.memory))
        self.ended = ""
        self.columns: WeakSet[Releasable] = WeakSet()
        """The columns that have loaded rows of these blocks."""
        self._spans: dict[str, ColumnOffsets] = {}
        self._stretch: tuple[int, U8] | None = None
        self._merged = False
        """Whether the blocks have different fields, so that a block may lack a field."""

    @cached_property
    def addresses(self) -> I64:
        """The address of each block in this process, int64 ``[blocks]``."""
        return np.array(self._addresses, np.int64)

    @cached_property
    def rows(self) -> I64:
        """The number of rows of each block, int64 ``[blocks]``."""
        return np.fromiter((shape.rows for shape in self.shapes), np.int64, len(self.shapes))

    @cached_property
    def sizes(self) -> I64:
        """The size of each block in bytes, int64 ``[blocks]``."""
        return np.array(self._sizes, np.int64)

    def end(self, message: str) -> None:
        """Release the memory. Later accesses raise `BatchEnded` with this message."""
        self.ended = message
        self.memory = []
        for column in list(self.columns):
            column.forget()

    def live_memory(self) -> Sequence[U8]:
        """The memory of each block. `BatchEnded` after `end`."""
        memory = self.memory
        if self.ended:
            raise BatchEnded(self.ended)
        return memory

    def spans(self, field: Field) -> ColumnOffsets:
        """The offsets of a column in each block. `Corruption` if a block is too small for its layout, or lacks the
        column."""
        offsets = self._spans.get(field.name)
        if offsets is None:
            self._lay_out()
            offsets = self._spans.get(field.name)
        if offsets is None or (self._merged and (offsets.values < 0).any()):
            raise Corruption(f'a block lacks field "{field.name}"')
        return offsets

    def values(self, field: Field, block: int) -> tuple[U8, int]:
        """The memory of one block, and the offset in it of the values of a column. Errors as in `spans` and
        `live_memory`."""
        memory, offsets = self.live_memory(), self._spans.get(field.name)
        if offsets is None or self._merged:
            offsets = self.spans(field)
        return memory[block], offsets.values.item(block)

    def stretch(self) -> tuple[int, U8]:
        """The lowest address of all blocks, and the memory from there to the end of the highest block. Touch only bytes
        inside blocks."""
        if self._stretch is None:
            low, high = int(self.addresses.min()), int((self.addresses + self.sizes).max())
            self._stretch = low, array_at(low, high - low)
        return self._stretch

    def _lay_out(self) -> None:
        if len(self.shapes) == 1 and (self._lay_out_dense(self.shapes[0]) or self._lay_out_one(self.shapes[0])):
            return
        blocks_by_fields: dict[tuple[str, ...], list[int]] = {}
        for at, shape in enumerate(self.shapes):
            blocks_by_fields.setdefault(tuple(shape.fields), []).append(at)
        for names, members in blocks_by_fields.items():
            self._lay_out_alike(names, members)

    def _lay_out_dense(self, shape: BlockLayout) -> bool:
        """Lay out one block of dense columns from a cache: training batches have the same layout step after step. False
        if the block has other columns."""
        names, rows = shape.fields, shape.rows
        if any(shape.counts) or len(shape.counts) != len(names) or not 1 <= rows <= BLOCK_ROWS_MAX:
            return False
        spans, size = _layout_of_dense(tuple([self.fields[name] for name in names]), rows)
        if size > self._sizes[0]:
            raise Corruption(f"a block with {', '.join(names)} is smaller than its layout")
        self._spans = spans
        return True

    def _lay_out_one(self, shape: BlockLayout) -> bool:
        """Lay out one block by plain numbers, which cannot overflow. False if its numbers are not those of a block."""
        names, counts = shape.fields, shape.counts
        if len(counts) != len(names) or min(counts, default=0) < 0 or not 1 <= shape.rows <= BLOCK_ROWS_MAX:
            return False
        spans, size = layout([self.fields[name] for name in names], shape.rows, counts)
        if size > self._sizes[0]:
            raise Corruption(f"a block with {', '.join(names)} is smaller than its layout")
        numbers = [(span.values, span.offsets, span.shapes, count) for span, count in zip(spans, counts, strict=True)]
        places = np.array(numbers, np.int64).reshape(len(names), 4, 1)
        self._spans.update(zip(names, map(ColumnOffsets._make, places), strict=True))
        return True

    def _lay_out_alike(self, names: Sequence[str], members: Sequence[int]) -> None:
        fields = [self.fields[name] for name in names]
        rows = self.rows[members]
        counts = np.array([self.shapes[at].counts for at in members], np.int64).reshape(len(members), len(names))
        if (counts < 0).any() or (rows < 1).any() or (rows > BLOCK_ROWS_MAX).any():
            raise Corruption(
                f"a block claims {rows.min()} to {rows.max()} rows and counts down to {counts.min(initial=0)}"
            )
        self._check_steps(names, fields, int(rows.max()), counts)
        spans, sizes = layouts(fields, rows, counts)
        if (sizes > self.sizes[members]).any():
            raise Corruption(f"a block with {', '.join(names)} is smaller than its layout")
        if len(members) == len(self.shapes):  # the common case: nothing to merge
            self._spans.update(zip(names, spans, strict=True))
            return
        self._merged = True
        for field, span in zip(fields, spans, strict=True):
            merged = self._spans.setdefault(field.name, _nowhere(len(self.shapes)))
            for into, values in zip(merged, span, strict=True):
                into[members] = values

    def _check_steps(self, names: Sequence[str], fields: Sequence[Field], rows_max: int, counts: I64) -> None:
        size_max = int(self.sizes.max())
        for field, count in zip(fields, counts.max(axis=0).tolist(), strict=True):
            steps = rows_max if field.dense else count
            if steps * field.step_elements * field.item_bytes > size_max:  # it could overflow in `layouts`
                raise Corruption(f"a block with {', '.join(names)} is smaller than its layout")


@lru_cache(maxsize=32)
def _layout_of_dense(fields: tuple[Field, ...], rows: int) -> tuple[dict[str, ColumnOffsets], int]:
    """`layouts` of one block of dense columns, by name, and its size. Cached: callers must not change the arrays."""
    spans, size = layout(fields, rows, [0] * len(fields))
    if size > np.iinfo(np.int64).max:
        raise Corruption(
            f"a block of {rows} rows with {', '.join(field.name for field in fields)} is larger than any memory"
        )
    none = np.zeros(1, np.int64)
    offsets = [
        ColumnOffsets._make([*np.array([[span.values], [span.offsets], [span.shapes]], np.int64), none])
        for span in spans
    ]
    return {field.name: column_offsets for field, column_offsets in zip(fields, offsets, strict=True)}, size


def layouts(fields: Sequence[Field], rows: I64, counts: I64) -> tuple[list[ColumnOffsets], I64]:
    """`schema.layout` of many blocks at once: the offsets of each field, and the size of each block in bytes, int64
    ``[blocks]``. `rows` is int64 ``[blocks]``, `counts` int64 ``[blocks, fields]``."""
    if len(rows) <= VECTORISED_BLOCKS:
        return _layouts_each(fields, rows, counts)
    at, nowhere = np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64)
    columns: list[ColumnOffsets] = []
    for field, count in zip(fields, counts.T, strict=True):
        shapes = offsets = nowhere
        if field.varied:
            shapes, at = at, _align(at + 8 * rows * len(field.shape))
        if not field.dense:
            offsets, at = at, _align(at + 8 * (rows + 1))
        columns.append(ColumnOffsets(at, offsets, shapes, count))
        at = _align(at + (rows if field.dense else count) * (field.step_elements * field.item_bytes))
    return columns, at


def _layouts_each(fields: Sequence[Field], rows: I64, counts: I64) -> tuple[list[ColumnOffsets], I64]:
    block_layouts = [layout(fields, int(n), count.tolist()) for n, count in zip(rows, counts, strict=True)]
    places = np.array(
        [[(span.values, span.offsets, span.shapes) for span in spans] for spans, _ in block_layouts], np.int64
    ).reshape(len(block_layouts), len(fields), 3)
    columns = [
        ColumnOffsets(places[:, at, 0], places[:, at, 1], places[:, at, 2], counts[:, at]) for at in range(len(fields))
    ]
    return columns, np.array([size for _, size in block_layouts], np.int64)


def _align(size: I64) -> I64:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _nowhere(blocks: int) -> ColumnOffsets:
    return ColumnOffsets._make(np.full(blocks, -1, np.int64) for _ in ColumnOffsets._fields)


def _aligned(memory: U8) -> U8:
    """The block on a 64-byte boundary. A block of an arena is aligned already; another is copied if it is not."""
    return memory if memory_address(memory) % ALIGNMENT == 0 else aligned_copy(memory)


def aligned_copy(memory: U8) -> U8:
    """A copy of a block, on a 64-byte boundary."""
    copy = np.empty(len(memory) + ALIGNMENT, np.uint8)
    start = -memory_address(copy) % ALIGNMENT
    copy[start : start + len(memory)] = memory
    return copy[start : start + len(memory)]


class RowPlacement:
    """The block and slot of each row, for columns that share blocks. `Corruption` for a row outside its block.

    `block_of_row` and `slot_of_row` are int32 ``[rows]``. `run` is (block, first slot) if the rows are consecutive
    slots of one block, else None.
    """

    __slots__ = ("_block_of_row", "_slot_of_row", "blocks", "rows", "run")

    def __init__(self, blocks: MappedBlocks, block_of_row: I32, slot_of_row: I32) -> None:
        self.blocks, self.rows = blocks, len(slot_of_row)
        self._block_of_row: I32 | None = block_of_row
        self._slot_of_row: I32 | None = slot_of_row
        if len(block_of_row) != len(slot_of_row):
            raise Corruption(f"{len(block_of_row)} rows have a block, but {len(slot_of_row)} a slot")
        self.run = self._check(block_of_row, slot_of_row)

    @classmethod
    def of_run(cls, blocks: MappedBlocks, block: int, first: int, rows: int) -> RowPlacement:
        """The placement of `rows` consecutive slots (at least one) of one block, from slot `first` on."""
        placement = cls.__new__(cls)
        placement.blocks, placement.rows, placement.run = blocks, rows, (block, first)
        placement._block_of_row = placement._slot_of_row = None
        _check_block(block, block, len(blocks.shapes))
        if first < 0 or first + rows > blocks.shapes[block].rows:
            raise Corruption(_BEYOND)
        return placement

    def __len__(self) -> int:
        return self.rows

    @property
    def block_of_row(self) -> I32:
        """The index into `blocks` of each row, int32 ``[rows]``."""
        if self._block_of_row is None:
            self._block_of_row = np.full(self.rows, 0 if self.run is None else self.run[0], np.int32)
        return self._block_of_row

    @property
    def slot_of_row(self) -> I32:
        """The slot of each row in its block, int32 ``[rows]``."""
        if self._slot_of_row is None:
            first = 0 if self.run is None else self.run[1]
            self._slot_of_row = np.arange(first, first + self.rows, dtype=np.int32)
        return self._slot_of_row

    def select(self, rows: Any) -> RowPlacement:
        """The placement of some of the rows, by slice or index array."""
        return RowPlacement(self.blocks, self.block_of_row[rows], self.slot_of_row[rows])

    def _check(self, block: I32, slot: I32) -> tuple[int, int] | None:
        if not len(slot):
            return None
        first, last = int(block.min()), int(block.max())
        _check_block(first, last, len(self.blocks.shapes))
        if slot.min() < 0 or (slot >= self.blocks.rows[block]).any():
            raise Corruption(_BEYOND)
        start, end = int(slot[0]), int(slot[-1])
        if first != last or end - start != len(slot) - 1 or (np.diff(slot) != 1).any():
            return None
        return first, start


_BEYOND: Final = "a row is beyond the rows of its block"


def _check_block(first: int, last: int, blocks: int) -> None:
    if first < 0 or last >= blocks:
        raise Corruption(f"a row is in block {first if first < 0 else last} of {blocks}")
