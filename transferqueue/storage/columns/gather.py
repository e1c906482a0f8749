"""Gathers the rows of one column into contiguous memory.

Rows that are consecutive slots of one block are not copied: the result is a view of the block. Other rows are copied
once, in their order:

- dense rows of one block by numpy's ``take``;
- many short rows of one block by Arrow's ``take``, as large binary values;
- all others by copying ranges of memory (see `ranges`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from transferqueue.errors import Corruption, InternalError
from transferqueue.schema import Field
from transferqueue.storage.columns.placement import ColumnOffsets, RowPlacement
from transferqueue.storage.columns.ranges import (
    FEW_RANGES,
    LONG_RANGE_BYTES,
    Room,
    copy_ranges,
    join,
    places_best,
    take_rows,
)
from transferqueue.storage.elements.dtypes import I64, STORED_DTYPES, U8

TAKEN_SHARE: Final = 4
"""Arrow takes from a whole block, with its offsets as they are, if at least one in this many of its rows is wanted."""


class LoadedColumn(NamedTuple):
    """Gathered rows of a column.

    Args:
        values: of all rows in order, one-dimensional, of the stored dtype.
        offsets: int64 ``[rows + 1]``, from 0; None for a dense field.
        shapes: int64 ``[rows, dimensions]``; None unless the field is varied.
    """

    rows: int
    values: np.ndarray[Any, Any]
    offsets: I64 | None
    shapes: I64 | None


def offsets_of(loaded: LoadedColumn) -> I64:
    """The offsets of a column that is not dense."""
    if loaded.offsets is None:
        raise InternalError("a column of equal rows has no offsets")
    return loaded.offsets


def shapes_of(loaded: LoadedColumn) -> I64:
    """The shapes of a varied column."""
    if loaded.shapes is None:
        raise InternalError("this column's rows have no shapes")
    return loaded.shapes


def load(field: Field, placement: RowPlacement) -> LoadedColumn:
    """The rows of a column: views of their block if they are a run of it, otherwise copies.

    `Corruption` if offsets point outside their block, `BatchEnded` if the memory was released.
    """
    if not len(placement):
        return _nothing(field)
    spans = placement.blocks.spans(field)
    if placement.run is not None:
        return _view(field, placement, spans, *placement.run)
    return _gather_dense(field, placement, spans) if field.dense else _gather_varying(field, placement, spans)


def dense_run(field: Field, placement: RowPlacement, block: int, first: int) -> np.ndarray[Any, Any]:
    """A view ``[rows, *shape]``, of the stored dtype, of dense rows that are a run of one block. Errors as in `load`.

    Made in one step, because a batch may have hundreds of columns.
    """
    memory, start = placement.blocks.values(field, block)
    return np.ndarray(
        (placement.rows, *field.fixed), STORED_DTYPES[field.dtype], memory, start + first * field.row_bytes
    )


def _nothing(field: Field) -> LoadedColumn:
    offsets = None if field.dense else np.zeros(1, np.int64)
    shapes = np.zeros((0, len(field.shape)), np.int64) if field.varied else None
    return LoadedColumn(0, np.empty(0, STORED_DTYPES[field.dtype]), offsets, shapes)


def _view(field: Field, placement: RowPlacement, spans: ColumnOffsets, block: int, first: int) -> LoadedColumn:
    memory, rows = placement.blocks.live_memory()[block], len(placement)
    step, start = field.row_bytes, int(spans.values[block])
    if field.dense:
        values = memory[start + first * step : start + (first + rows) * step].view(STORED_DTYPES[field.dtype])
        return LoadedColumn(rows, values, None, None)
    offsets, shapes = _offsets_of_run(field, placement, spans, block, first), None
    low, high = offsets.item(0), offsets.item(-1)
    if field.varied:
        width = len(field.shape)
        shapes = _int64(memory, int(spans.shapes[block]) + 8 * first * width, rows * width).reshape(rows, width)
    values = memory[start + low * step : start + high * step].view(STORED_DTYPES[field.dtype])
    return _checked(field, LoadedColumn(rows, values, offsets if low == 0 else offsets - low, shapes))


def _offsets_of_run(field: Field, placement: RowPlacement, spans: ColumnOffsets, block: int, first: int) -> I64:
    """A view of the offsets of rows that are a run of one block, checked against the block: int64 ``[rows + 1]``."""
    start = spans.offsets.item(block) + 8 * first
    offsets = _int64(placement.blocks.live_memory()[block], start, len(placement) + 1)
    if offsets.item(0) < 0 or offsets.item(-1) > spans.counts.item(block) or (offsets[1:] < offsets[:-1]).any():
        _refuse_offsets(field)
    return offsets


def _int64(memory: U8, start: int, count: int) -> I64:
    return memory[start : start + 8 * count].view(np.int64)


def _refuse_offsets(field: Field) -> None:
    raise Corruption(f'field "{field.name}": offsets of a block point outside it')


def _checked(field: Field, loaded: LoadedColumn) -> LoadedColumn:
    """`loaded`, if its shapes match its offsets: another process wrote both."""
    if loaded.shapes is not None and loaded.offsets is not None:
        lengths = np.diff(loaded.offsets)
        if (loaded.shapes < 0).any() or (loaded.shapes.prod(axis=1) != lengths).any():
            raise Corruption(f'field "{field.name}": shapes of a block do not match its offsets')
    return loaded


def _gather_dense(field: Field, placement: RowPlacement, spans: ColumnOffsets) -> LoadedColumn:
    row = field.row_bytes
    blocks, block = placement.block_of_row, int(placement.block_of_row[0])
    if row == 0:
        return LoadedColumn(len(blocks), np.empty(0, STORED_DTYPES[field.dtype]), None, None)
    if (blocks == block).all():
        start = int(spans.values[block])
        rows = int(placement.blocks.rows[block])
        source = placement.blocks.live_memory()[block][start : start + rows * row].view(STORED_DTYPES[field.dtype])
        taken = source.reshape(rows, field.step_elements).take(placement.slot_of_row, axis=0)
        return LoadedColumn(len(blocks), taken.reshape(-1), None, None)
    low, stretch = placement.blocks.stretch()
    starts = (placement.blocks.addresses - low + spans.values)[blocks] + placement.slot_of_row * np.int64(row)
    return LoadedColumn(
        len(blocks), copy_ranges(stretch, starts, starts + row).view(STORED_DTYPES[field.dtype]), None, None
    )


def _gather_varying(field: Field, placement: RowPlacement, spans: ColumnOffsets) -> LoadedColumn:
    edges = _edges(field, placement, spans)
    offsets = row_offsets(edges.last - edges.first)
    values = gather_values(field, placement, edges, 0, len(placement))
    shapes = _gather_shapes(field, placement, spans) if field.varied else None
    return _checked(field, LoadedColumn(len(placement), values.view(STORED_DTYPES[field.dtype]), offsets, shapes))


class RowEdges(NamedTuple):
    """The first and last offset of each row in its block, in offset steps, checked against the block: int64
    ``[rows]``."""

    first: I64
    last: I64


def row_edges(field: Field, placement: RowPlacement) -> RowEdges:
    """The edges of the rows (at least one) of a column that is not dense. Reads no values. Errors as in `load`."""
    placement.blocks.live_memory()
    return _edges(field, placement, placement.blocks.spans(field))


def gather_values(
    field: Field, placement: RowPlacement, edges: RowEdges, start: int, stop: int, room: Room | None = None
) -> U8:
    """The values of rows ``start`` to ``stop`` of a column that is not dense, in order: ``uint8``, in new memory, or in
    that of `room` if that is faster. `edges` are of all rows. `Corruption`, `BatchEnded` as in `load`."""
    spans, step = placement.blocks.spans(field), field.row_bytes
    first, last = edges.first[start:stop], edges.last[start:stop]
    count = int((last - first).sum())
    out = room(count * step) if room is not None and places_best(stop - start, count * step) else None
    taken = _taken(field, placement, spans, start, stop, count) if out is None else None
    if taken is not None:
        return taken
    low, stretch = placement.blocks.stretch()
    block = placement.block_of_row[start:stop]
    starts = (placement.blocks.addresses - low + spans.values)[block] + first * step
    return copy_ranges(stretch, starts, starts + (last - first) * step, out)


def gather_dense(field: Field, placement: RowPlacement, room: Room | None = None) -> U8:
    """The values of all rows (at least one) of a dense column. See `gather_values`."""
    row, rows = field.row_bytes, len(placement)
    if room is None or placement.run is not None or not places_best(rows, rows * row):
        return load(field, placement).values.view(np.uint8)
    low, stretch = placement.blocks.stretch()
    base = placement.blocks.addresses - low + placement.blocks.spans(field).values
    starts = base[placement.block_of_row] + placement.slot_of_row * np.int64(row)
    return copy_ranges(stretch, starts, starts + row, room(rows * row))


def _table(rows: Sequence[I64]) -> I64:
    """Arrays of one length as int64 ``[arrays, length]``; `np.stack` takes three times as long for a few."""
    return np.concatenate(rows).reshape(len(rows), -1)


def value_ranges(field: Field, placement: RowPlacement, edges: RowEdges) -> list[U8]:
    """The values of rows, in order, as views of their blocks; rows that touch are one view. `edges` are in steps of
    `Field.row_bytes` (of dense rows: their slots). `BatchEnded` as in `load`."""
    blocks, step = placement.blocks, field.row_bytes
    blocks.live_memory()
    low, stretch = blocks.stretch()
    base = (blocks.addresses - low + blocks.spans(field).values)[placement.block_of_row]
    lows, highs = join(base + edges.first * step, base + edges.last * step)
    return [stretch[low:high] for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]


def row_shapes(field: Field, placement: RowPlacement) -> I64:
    """The shapes of the rows of a varied column: int64 ``[rows, dimensions]``. Errors as in `load`."""
    placement.blocks.live_memory()
    return _gather_shapes(field, placement, placement.blocks.spans(field))


def _edges(field: Field, placement: RowPlacement, spans: ColumnOffsets) -> RowEdges:
    if placement.run is not None:
        offsets = _offsets_of_run(field, placement, spans, *placement.run)
        return RowEdges(offsets[:-1], offsets[1:])
    first, last = edges_of_all([field], placement)
    return RowEdges(first[0], last[0])


def edges_of_all(fields: Sequence[Field], placement: RowPlacement) -> RowEdges:
    """`row_edges` of several columns (at least one) of rows that are no run, in a few steps for all: each int64
    ``[fields, rows]``."""
    placement.blocks.live_memory()
    spans = [placement.blocks.spans(field) for field in fields]
    low, stretch = placement.blocks.stretch()
    numbers = _numbers(stretch)
    starts = (
        _table([offsets_of_column.offsets for offsets_of_column in spans]) + (placement.blocks.addresses - low)
    ) // 8
    counts = _table([offsets_of_column.counts for offsets_of_column in spans])
    if len(placement.blocks.shapes) > 1:
        starts, counts = starts[:, placement.block_of_row], counts[:, placement.block_of_row]
    at = starts + placement.slot_of_row
    first = numbers[at]
    at += 1
    last = numbers[at]
    wrong = (first < 0) | (last < first) | (last > counts)
    if wrong.any():
        _refuse_offsets(fields[int(wrong.any(axis=1).argmax())])
    return RowEdges(first, last)


def _gather_shapes(field: Field, placement: RowPlacement, spans: ColumnOffsets) -> I64:
    low, stretch = placement.blocks.stretch()
    width = len(field.shape)
    starts = (placement.blocks.addresses - low + spans.shapes) // 8
    places = starts[placement.block_of_row] + placement.slot_of_row * np.int64(width)
    return _numbers(stretch)[places[:, None] + np.arange(width)]


def _numbers(stretch: U8) -> I64:
    return stretch[: len(stretch) // 8 * 8].view(np.int64)


def row_offsets(lengths: I64) -> I64:
    """Where each row begins, and where the last one ends: one entry more than `lengths`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _taken(field: Field, placement: RowPlacement, spans: ColumnOffsets, start: int, stop: int, count: int) -> U8 | None:
    """Rows ``start`` to ``stop``, copied by Arrow, if they are many short rows and a good part of one block; else
    None."""
    step, wanted, block_of_row = field.row_bytes, stop - start, placement.block_of_row[start:stop]
    block = int(block_of_row[0])
    rows = int(placement.blocks.rows[block])
    if wanted <= FEW_RANGES or wanted * TAKEN_SHARE < rows or count * step >= LONG_RANGE_BYTES * wanted:
        return None
    if (block_of_row != block).any():
        return None
    memory, values = placement.blocks.live_memory()[block], int(spans.values[block])
    edges = _int64(
        memory, int(spans.offsets[block]), rows + 1
    ).copy()  # a copy: Arrow must use the offsets that were checked
    if edges[0] != 0 or edges[-1] > spans.counts[block] or (edges[1:] < edges[:-1]).any():
        _refuse_offsets(field)
    source = memory[values : values + int(spans.counts[block]) * step]
    return take_rows(source, edges if step == 1 else edges * step, placement.slot_of_row[start:stop])
