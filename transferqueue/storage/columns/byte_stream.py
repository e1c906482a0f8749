"""Serialises columns of the same rows as a stream of bytes, which a shard sends to another machine.

The stream is a block of these columns and rows (`schema.layout`), so the receiver gets the same bytes as a local reader
maps. Bytes are copied only where necessary:

- *All rows of one block, in its order*: the columns are sent as stored, with their padding; neighbours are one piece.
  The receiver checks their offsets, as a local reader does.
- *A run of one block*: the pieces are views of the block. Only the first and the last offset of each column are read,
  and checked; the receiver checks those between. Offsets that do not begin with 0 are copied.
- *Other rows* are gathered a piece at a time, so that a stalled reader makes a shard gather at most one piece ahead.
  Offsets are read and checked once for the counts of all columns, and kept for the values, up to `EDGES_KEPT`. If the
  receiver itself reads this memory, columns with a mean row of at least `ranges_from` bytes stay views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from transferqueue.errors import Corruption
from transferqueue.limits import ALIGNMENT
from transferqueue.schema import Field, Slice, align, layout
from transferqueue.storage.columns.gather import (
    RowEdges,
    edges_of_all,
    gather_dense,
    gather_values,
    row_edges,
    row_offsets,
    row_shapes,
    value_ranges,
)
from transferqueue.storage.columns.placement import RowPlacement
from transferqueue.storage.columns.ranges import Room
from transferqueue.storage.columns.slicing import SliceStream, slice_stream
from transferqueue.storage.elements.dtypes import I64, U8

EDGES_KEPT: Final = 1 << 18
"""The row edges of one stream that are kept (24 bytes each, with their offsets); later ones are read twice."""
_ZEROS: Final = np.zeros(ALIGNMENT, np.uint8)

Stream = tuple[list[int], Iterator[U8]]
"""The count of each column for `schema.layout`, and the bytes in order: pieces ``uint8``."""


def sliced_column_stream(
    fields: Sequence[Field],
    slices: Mapping[str, Slice],
    placement: RowPlacement,
    piece_bytes: int,
    ranges_from: int = 0,
    room: Room | None = None,
) -> Stream:
    """The block of these columns, some of them sliced (`slicing.slice_stream`), as `column_stream` gives uncut ones."""
    streams = [
        _listed(slice_stream(field, slices[field.name], placement, piece_bytes, ranges_from, room))
        if field.name in slices
        else column_stream([field], placement, piece_bytes, ranges_from, room)
        for field in fields
    ]
    return [count for counts, _ in streams for count in counts], chain.from_iterable(pieces for _, pieces in streams)


def _listed(stream: SliceStream) -> Stream:
    return [stream[0]], stream[1]


def column_stream(
    fields: Sequence[Field],
    placement: RowPlacement,
    piece_bytes: int,
    ranges_from: int = 0,
    room: Room | None = None,
) -> Stream:
    """The block of these columns of these rows (at least one) as a stream. Raises as `gather.load`, now or while the
    pieces are taken.

    Args:
        fields: of the columns.
        placement: of the rows.
        piece_bytes: of the largest piece, at least 64.
        ranges_from: columns with a mean row of at least this many bytes are not gathered: each piece is a view of a
            block. 0: all columns whose rows lie apart are gathered.
        room: gives memory for gathered pieces. Such a piece may be a quarter longer, or as long as one row. None: each
            gather allocates its own.
    """
    if placement.run is None:
        return _scattered(fields, placement, piece_bytes, ranges_from, room)
    block, first = placement.run
    if first == 0 and placement.rows == int(placement.blocks.rows[block]):
        return _whole(fields, placement, block, piece_bytes)
    return _run(fields, placement, block, first, piece_bytes)


def _whole(fields: Sequence[Field], placement: RowPlacement, block: int, piece_bytes: int) -> Stream:
    memory, shape = placement.blocks.live_memory()[block], placement.blocks.shapes[block]
    if [field.name for field in fields] == list(shape.fields):
        _, nbytes = layout(fields, shape.rows, shape.counts)
        if nbytes > len(memory):
            raise Corruption(f"a block with {', '.join(shape.fields)} is smaller than its layout")
        return list(shape.counts), _cut(memory[:nbytes], piece_bytes)
    counts: list[int] = []
    stretches: list[tuple[int, int]] = []
    for field in fields:
        spans = placement.blocks.spans(field)
        count, values = int(spans.counts[block]), int(spans.values[block])
        start = next((int(at[block]) for at in (spans.shapes, spans.offsets) if at[block] >= 0), values)
        end = align(values + (placement.rows if field.dense else count) * field.row_bytes)
        if stretches and stretches[-1][1] == start:
            start = stretches.pop()[0]
        stretches.append((start, end))
        counts.append(count)
    return counts, (piece for start, end in stretches for piece in _cut(memory[start:end], piece_bytes))


def _run(fields: Sequence[Field], placement: RowPlacement, block: int, first: int, piece_bytes: int) -> Stream:
    memory, rows = placement.blocks.live_memory()[block], placement.rows
    edges = [(first, first + rows) if field.dense else _run_edges(field, placement, block, first) for field in fields]

    def pieces() -> Iterator[U8]:
        for field, (low, high) in zip(fields, edges, strict=True):
            spans, step = placement.blocks.spans(field), field.row_bytes
            if field.varied:
                at, width = int(spans.shapes[block]), 8 * len(field.shape)
                yield from _padded(memory[at + first * width : at + (first + rows) * width], piece_bytes)
            if not field.dense:
                at = int(spans.offsets[block]) + 8 * first
                offsets = memory[at : at + 8 * (rows + 1)]
                yield from _padded(_bytes(offsets.view(np.int64) - low) if low else offsets, piece_bytes)
            at = int(spans.values[block])
            yield from _padded(memory[at + low * step : at + high * step], piece_bytes)

    return [0 if field.dense else high - low for field, (low, high) in zip(fields, edges, strict=True)], pieces()


def _run_edges(field: Field, placement: RowPlacement, block: int, first: int) -> tuple[int, int]:
    """The first and the last offset of a run. `Corruption` if they are outside the block."""
    spans = placement.blocks.spans(field)
    at = int(spans.offsets[block]) + 8 * first
    offsets = placement.blocks.live_memory()[block][at : at + 8 * (placement.rows + 1)].view(np.int64)
    low, high = int(offsets[0]), int(offsets[-1])
    if not 0 <= low <= high <= spans.counts[block]:
        raise Corruption(f'field "{field.name}": offsets of a block point outside it')
    return low, high


def _scattered(
    fields: Sequence[Field], placement: RowPlacement, piece_bytes: int, ranges_from: int, room: Room | None
) -> Stream:
    kept = _kept_rows(fields, placement)
    counts = [
        0 if field.dense else (kept.get(field.name) or _rows_of(field, placement)).offsets.item(-1) for field in fields
    ]

    def pieces() -> Iterator[U8]:
        for field in fields:
            if field.dense:
                yield from _scattered_dense(field, placement, piece_bytes, ranges_from, room)
            else:
                rows = kept.pop(field.name, None) or _rows_of(field, placement)
                yield from _scattered_varying(field, placement, rows, piece_bytes, ranges_from, room)

    return counts, pieces()


class _VaryingRows(NamedTuple):
    """Rows of a column that is not dense. `offsets`: of consecutive rows, int64 ``[rows + 1]``, from 0."""

    edges: RowEdges
    offsets: I64


def _kept_rows(fields: Sequence[Field], placement: RowPlacement) -> dict[str, _VaryingRows]:
    """The rows of the first columns that are not dense, by name, up to `EDGES_KEPT`."""
    varying = [field for field in fields if not field.dense][: EDGES_KEPT // len(placement)]
    if not varying:
        return {}
    edges = edges_of_all(varying, placement)
    offsets = np.zeros((len(varying), len(placement) + 1), np.int64)
    np.cumsum(edges.last - edges.first, axis=1, out=offsets[:, 1:])
    return {
        field.name: _VaryingRows(RowEdges(low, high), ends)
        for field, low, high, ends in zip(varying, *edges, offsets, strict=True)
    }


def _rows_of(field: Field, placement: RowPlacement) -> _VaryingRows:
    edges = row_edges(field, placement)
    return _VaryingRows(edges, row_offsets(edges.last - edges.first))


def _scattered_dense(
    field: Field, placement: RowPlacement, piece_bytes: int, ranges_from: int, room: Room | None
) -> Iterator[U8]:
    if 0 < ranges_from <= field.row_bytes:
        first = placement.slot_of_row.astype(np.int64)
        yield from _cut_all(value_ranges(field, placement, RowEdges(first, first + 1)), piece_bytes)
        yield from _padding(len(placement) * field.row_bytes)
        return
    yield from _gathered_dense(field, placement, piece_bytes, room)
    yield from _padding(len(placement) * field.row_bytes)


def _gathered_dense(field: Field, placement: RowPlacement, piece_bytes: int, room: Room | None) -> Iterator[U8]:
    at_once = max(1, piece_bytes // max(1, field.row_bytes))
    for start in range(0, len(placement), at_once):
        yield from _cut(gather_dense(field, placement.select(slice(start, start + at_once)), room), piece_bytes)


def _scattered_varying(
    field: Field,
    placement: RowPlacement,
    rows: _VaryingRows,
    piece_bytes: int,
    ranges_from: int,
    room: Room | None,
) -> Iterator[U8]:
    if field.varied:
        yield from _scattered_shapes(field, placement, piece_bytes)
    yield from _padded(_bytes(rows.offsets), piece_bytes)
    nbytes = int(rows.offsets[-1]) * field.row_bytes
    if 0 < ranges_from * len(placement) <= nbytes:
        yield from _cut_all(value_ranges(field, placement, rows.edges), piece_bytes)
    else:
        yield from _gathered_varying(field, placement, rows, piece_bytes, room)
    yield from _padding(nbytes)


def _gathered_varying(
    field: Field, placement: RowPlacement, rows: _VaryingRows, piece_bytes: int, room: Room | None
) -> Iterator[U8]:
    for start, stop in _groups(rows.offsets * field.row_bytes, piece_bytes):
        values = gather_values(field, placement, rows.edges, start, stop, room)
        yield from _cut(values, piece_bytes) if room is None else (values,)


def _scattered_shapes(field: Field, placement: RowPlacement, piece_bytes: int) -> Iterator[U8]:
    row_bytes = 8 * len(field.shape)
    at_once = max(1, piece_bytes // row_bytes)
    for start in range(0, len(placement), at_once):
        yield _bytes(row_shapes(field, placement.select(slice(start, start + at_once))))
    yield from _padding(len(placement) * row_bytes)


def _groups(ends: I64, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of rows ``(start, stop)`` whose values fit a piece. `ends`: cumulative bytes, from 0. A longer row is a run
    by itself. A rest of up to a quarter of a piece joins the last run, since each gather costs at least 0.1 ms."""
    start, rows = 0, len(ends) - 1
    while start < rows:
        stop = int(np.searchsorted(ends, ends[start] + piece_bytes, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        if ends[rows] - ends[start] <= piece_bytes + piece_bytes // 4:
            stop = rows
        yield start, stop
        start = stop


def _cut_all(buffers: Iterable[U8], piece_bytes: int) -> Iterator[U8]:
    for buffer in buffers:
        yield from _cut(buffer, piece_bytes)


def _padded(buffer: U8, piece_bytes: int) -> Iterator[U8]:
    yield from _cut(buffer, piece_bytes)
    yield from _padding(len(buffer))


def _cut(buffer: U8, piece_bytes: int) -> Iterator[U8]:
    for start in range(0, len(buffer), piece_bytes):
        yield buffer[start : start + piece_bytes]


def _padding(nbytes: int) -> Iterator[U8]:
    if gap := -nbytes % ALIGNMENT:
        yield _ZEROS[:gap]


def _bytes(buffer: np.ndarray[Any, Any]) -> U8:
    return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
