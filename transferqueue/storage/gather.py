"""Bringing the rows of one column together.

Rows that are one run of one block are not brought anywhere: the result is a view of the block. Otherwise each column is gathered
once, in the order of the rows:

- dense, one block: numpy's ``take``;
- else, of one block and many rows: Arrow's ``take`` of its rows as large binary values (7-11 GB/s; as Arrow lists
  0.7-0.9, by index arithmetic in numpy 0.6-0.9);
- else rows that touch in memory are joined into runs, and the runs are copied one by one, or by Arrow where they are many
  and lie close enough together.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from transferqueue.errors import Corruption, InternalError
from transferqueue.limits import KIB, MIB
from transferqueue.schema import Field
from transferqueue.storage.dtypes import stored
from transferqueue.storage.pages import U8, expose
from transferqueue.storage.parsed import I64
from transferqueue.storage.placement import Placement, Spans

FEW_RUNS: Final = 128
"""Up to this many pieces are copied one by one: a slice costs 0.3 µs, a call into Arrow 40 µs and its import 0.2 s."""
LONG_RUN_BYTES: Final = 16 * KIB
"""Pieces of this mean length are copied one by one: the copy outweighs the call."""
SPARSE_BYTES_MAX: Final = 64 * MIB
"""Arrow reserves room by the mean length of all entries, gaps included: no more than this beyond the need."""


class Loaded(NamedTuple):
    """A column's rows together: values one after the other in stored form, offsets from 0, shapes. None as the layout has it."""

    rows: int
    values: np.ndarray[Any, Any]
    offsets: I64 | None
    shapes: I64 | None


def offsets_of(loaded: Loaded) -> I64:
    """Offsets of a column that has them."""
    if loaded.offsets is None:
        raise InternalError("a column of equal rows was asked for its offsets")
    return loaded.offsets


def shapes_of(loaded: Loaded) -> I64:
    """Shapes of a column that has them."""
    if loaded.shapes is None:
        raise InternalError("a column whose rows have no shapes was asked for them")
    return loaded.shapes


def load(field: Field, placement: Placement) -> Loaded:
    """The rows of a column: views of their block if they are one run of it, otherwise copies of their own.

    Raises `Corruption` if offsets point outside their block, `BatchEnded` if the memory was returned.
    """
    placement.blocks.living()
    if not len(placement):
        return _nothing(field)
    spans = placement.blocks.spans(field)
    if placement.run is not None:
        return _view(field, placement, spans, *placement.run)
    return _gather_dense(field, placement, spans) if field.dense else _gather_varying(field, placement, spans)


def _nothing(field: Field) -> Loaded:
    offsets = None if field.dense else np.zeros(1, np.int64)
    shapes = np.zeros((0, len(field.shape)), np.int64) if field.varied else None
    return Loaded(0, np.empty(0, stored(field.dtype)), offsets, shapes)


def _view(field: Field, placement: Placement, spans: Spans, block: int, first: int) -> Loaded:
    memory, rows = placement.blocks.living()[block], len(placement)
    step = field.step_elements * field.item_bytes
    low, high, offsets, shapes = first, first + rows, None, None
    if not field.dense:
        offsets = _int64(memory, int(spans.offsets[block]) + 8 * first, rows + 1)
        low, high = int(offsets[0]), int(offsets[-1])
        if low < 0 or high > spans.counts[block] or (offsets[1:] < offsets[:-1]).any():
            _refuse_offsets(field)
        offsets = offsets if low == 0 else offsets - low
    if field.varied:
        width = len(field.shape)
        shapes = _int64(memory, int(spans.shapes[block]) + 8 * first * width, rows * width).reshape(rows, width)
    start = int(spans.values[block])
    values = memory[start + low * step : start + high * step].view(stored(field.dtype))
    return _checked(field, Loaded(rows, values, offsets, shapes))


def _int64(memory: U8, start: int, count: int) -> I64:
    return memory[start : start + 8 * count].view(np.int64)


def _refuse_offsets(field: Field) -> None:
    raise Corruption(f'field "{field.name}": offsets of a block point outside it')


def _checked(field: Field, loaded: Loaded) -> Loaded:
    """Shapes must agree with offsets: they were written by another process."""
    if loaded.shapes is not None and loaded.offsets is not None:
        lengths = np.diff(loaded.offsets)
        if (loaded.shapes < 0).any() or (loaded.shapes.prod(axis=1) != lengths).any():
            raise Corruption(f'field "{field.name}": shapes of a block do not match its offsets')
    return loaded


def _gather_dense(field: Field, placement: Placement, spans: Spans) -> Loaded:
    row = field.step_elements * field.item_bytes
    blocks, block = placement.block_of_row, int(placement.block_of_row[0])
    if row == 0:
        return Loaded(len(blocks), np.empty(0, stored(field.dtype)), None, None)
    if (blocks == block).all():
        start = int(spans.values[block])
        rows = int(placement.blocks.rows[block])
        source = placement.blocks.living()[block][start : start + rows * row].view(stored(field.dtype))
        taken = source.reshape(rows, field.step_elements).take(placement.slot_of_row, axis=0)
        return Loaded(len(blocks), taken.reshape(-1), None, None)
    low, stretch = placement.blocks.stretch()
    starts = (placement.blocks.addresses - low + spans.values)[blocks] + placement.slot_of_row * np.int64(row)
    return Loaded(len(blocks), copy_ranges(stretch, starts, starts + row).view(stored(field.dtype)), None, None)


def _gather_varying(field: Field, placement: Placement, spans: Spans) -> Loaded:
    low, stretch = placement.blocks.stretch()
    blocks, slots = placement.block_of_row, placement.slot_of_row
    bases = placement.blocks.addresses - low
    numbers = stretch[: len(stretch) // 8 * 8].view(np.int64)
    at = ((bases + spans.offsets) // 8)[blocks] + slots
    first, last = numbers[at], numbers[at + 1]
    if (first < 0).any() or (last < first).any() or (last > spans.counts[blocks]).any():
        _refuse_offsets(field)
    lengths, offsets = last - first, np.zeros(len(slots) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    step = field.step_elements * field.item_bytes
    starts = (bases + spans.values)[blocks] + first * step
    values = copy_ranges(stretch, starts, starts + lengths * step).view(stored(field.dtype))
    shapes = None
    if field.varied:
        width = len(field.shape)
        places = ((bases + spans.shapes) // 8)[blocks] + slots * np.int64(width)
        shapes = numbers[places[:, None] + np.arange(width)]
    return _checked(field, Loaded(len(slots), values, offsets, shapes))


def copy_ranges(memory: U8, starts: I64, ends: I64) -> U8:
    """The bytes ``memory[starts[i]:ends[i]]`` one after the other, in new memory. Ranges may repeat and come in any order."""
    runs, run_ends = _joined(starts, ends)
    total = int((run_ends - runs).sum())
    if total == 0:
        return np.empty(0, np.uint8)
    if len(runs) > FEW_RUNS and total < LONG_RUN_BYTES * len(runs):
        filled = ends > starts
        taken = _take(memory, runs, run_ends, total)
        if taken is None:  # joined runs overlap where rows repeat; the rows themselves do not
            taken = _take(memory, starts[filled], ends[filled], total)
        if taken is not None:
            return taken
    pieces = [memory[start:end] for start, end in zip(runs.tolist(), run_ends.tolist(), strict=True)]
    return np.concatenate(pieces)


def _joined(starts: I64, ends: I64) -> tuple[I64, I64]:
    """Ranges that touch, in order, as one; empty ones left out."""
    filled = ends > starts
    if not filled.all():
        starts, ends = starts[filled], ends[filled]
    apart = starts[1:] != ends[:-1]
    if apart.all():
        return starts, ends
    return starts[np.concatenate(([True], apart))], ends[np.concatenate((apart, [True]))]


def _take(memory: U8, starts: I64, ends: I64, total: int) -> U8 | None:
    """By Arrow: ranges and the gaps between them, ascending, are the entries of one large binary array; ranges are taken.

    None where that is no valid array (ranges overlap) or the gaps would make Arrow reserve too much.
    """
    lows, first, order = np.unique(starts, return_index=True, return_inverse=True)
    highs = ends[first]
    mean = (int(highs[-1]) - int(lows[0])) / (2 * len(lows))
    if (highs[order] != ends).any() or (lows[1:] < highs[:-1]).any() or mean * len(starts) > total + SPARSE_BYTES_MAX:
        return None
    import pyarrow as pa

    edges = np.empty(2 * len(lows), np.int64)
    edges[0::2], edges[1::2] = lows, highs
    data = pa.foreign_buffer(memory.__array_interface__["data"][0], len(memory), memory)
    entries = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), data], 0)
    taken = entries.take(pa.array(2 * order.reshape(-1))).buffers()[2]
    return expose(taken.address, total, owner=taken)
