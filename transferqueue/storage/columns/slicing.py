"""Parts of rows: a range or a share of each row's steps, and ranges of its inner dimensions, gathered from their
blocks.

A *slice* of a field (`schema.Slice`) makes a column of another field (`schema.sliced_field`): the same name and dtype,
a smaller shape. Of the first dimension only the wanted steps are read: the edges of each row move. Inner dimensions lie
side by side in each step. Of short rows whole steps are read, a piece at a time, and copied once more: a slice of inner
dimensions saves transferred bytes, not time. Of long rows, such as tensors of weights, only the wanted bytes are read,
once, a piece at a time; runs of a piece are views. A receiver that itself reads this memory gets long runs as views: of
whole steps, or within each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from transferqueue.limits import ALIGNMENT, KIB
from transferqueue.schema import Field, Share, Slice, share_range, sliced_field
from transferqueue.storage.columns.gather import LoadedColumn, RowEdges, load, row_edges, row_offsets
from transferqueue.storage.columns.placement import RowPlacement
from transferqueue.storage.columns.ranges import Room, copy_ranges, join, places_best
from transferqueue.storage.elements.dtypes import I64, STORED_DTYPES, U8

LONG_ROW_BYTES: Final = 64 * KIB
"""Rows with a mean of at least this many wanted bytes are sliced one by one, which costs some microseconds each."""

SliceStream = tuple[int, Iterator[U8]]
"""The count of the sliced column for `schema.layout`, and the bytes of its block in order."""


def slice_ranges(first: tuple[int, int] | Share | None, edges: RowEdges) -> tuple[I64, I64]:
    """The wanted steps of each row: starts and ends int64 ``[rows, ranges]``, within its edges. A zigzag share has two
    ranges a row."""
    lengths = edges.last - edges.first
    if first is None:
        low, high = np.zeros_like(lengths)[:, None], lengths[:, None]
    elif isinstance(first, Share):
        low, high = _share(first, lengths)
    else:
        start, stop = first
        low, high = np.minimum(lengths, start)[:, None], np.minimum(lengths, stop)[:, None]
    return edges.first[:, None] + low, edges.first[:, None] + high


def _share(share: Share, lengths: I64) -> tuple[I64, I64]:
    chunks = 2 * share.of if share.zigzag else share.of
    wanted = np.array([share.index, chunks - 1 - share.index] if share.zigzag else [share.index], np.int64)
    size = (lengths // chunks)[:, None]
    high = (wanted + 1) * size
    return wanted * size, np.where(wanted == chunks - 1, lengths[:, None], high)


def inner_slices(field: Field, slice_: Slice) -> list[slice]:
    """The ranges of all dimensions but the first, for an index of numpy."""
    inner = enumerate(slice_.inner or (), start=1)
    return [
        slice(None)
        if bounds is None
        else slice(*(share_range(bounds, field.shape[axis] or 0) if isinstance(bounds, Share) else bounds))
        for axis, bounds in inner
    ]


def dense_slices(field: Field, slice_: Slice) -> list[slice] | None:
    """The ranges of all dimensions of a dense row, for an index of numpy; None for a zigzag share, which is two
    ranges."""
    first = slice_.first
    if isinstance(first, Share):
        if first.zigzag:
            return None
        edges = RowEdges(np.zeros(1, np.int64), np.array([_steps_of_row(field)], np.int64))
        low, high = slice_ranges(first, edges)
        return [slice(int(low[0, 0]), int(high[0, 0])), *inner_slices(field, slice_)]
    return [slice(None) if first is None else slice(*first), *inner_slices(field, slice_)]


def load_slice(field: Field, slice_: Slice, placement: RowPlacement) -> LoadedColumn:
    """The sliced rows of a column, gathered into new memory. `Corruption`, `BatchEnded` as in `gather.load`."""
    if not len(placement):
        return load(sliced_field(field, slice_), placement)
    starts, ends = _wanted(field, slice_, placement)
    offsets = row_offsets((ends - starts).sum(axis=1))
    values = _gathered(field, slice_, placement, starts, ends).view(STORED_DTYPES[field.dtype])
    return LoadedColumn(len(placement), values, None if field.dense else offsets, None)


def slice_stream(
    field: Field,
    slice_: Slice,
    placement: RowPlacement,
    piece_bytes: int,
    ranges_from: int = 0,
    room: Room | None = None,
) -> SliceStream:
    """A block with the sliced column of these rows (at least one); see `byte_stream.column_stream`.

    At most `piece_bytes` are gathered at a time, of short rows at most `piece_bytes` of wanted steps and at least one
    row. Pieces are at most that long. `ranges_from` and `room` are as in `column_stream`; inner ranges are gathered
    unless their runs are that long, of short rows in new memory.
    """
    starts, ends = _wanted(field, slice_, placement)
    offsets = row_offsets((ends - starts).sum(axis=1))
    step = sliced_field(field, slice_)
    step_bytes = step.row_bytes if field.ragged else step.row_bytes // max(1, _steps_of_row(step))

    def pieces() -> Iterator[U8]:
        if field.ragged:
            yield from _padded(offsets.view(np.uint8), piece_bytes)
        read = offsets * _step_bytes(field)
        views = _long_views(field, slice_, placement, starts, ends, ranges_from) if ranges_from else None
        if views is not None:
            for view in views:
                for at in range(0, len(view), piece_bytes):
                    yield view[at : at + piece_bytes]
            yield from _padding(int(offsets[-1]) * step_bytes)
            return
        if int(offsets[-1]) * step_bytes >= LONG_ROW_BYTES * starts.size > 0:
            yield from _sliced_rows(field, slice_, placement, starts, ends, piece_bytes, room)
            yield from _padding(int(offsets[-1]) * step_bytes)
            return
        for start, stop in _groups(read, piece_bytes):
            out = None
            nbytes = int(read[stop] - read[start])
            if room is not None and slice_.inner is None and places_best((stop - start) * starts.shape[1], nbytes):
                out = room(nbytes)
            values = _gathered(field, slice_, placement, starts[start:stop], ends[start:stop], slice(start, stop), out)
            for at in range(0, len(values), piece_bytes):
                yield values[at : at + piece_bytes]
        yield from _padding(int(offsets[-1]) * step_bytes)

    return (int(offsets[-1]) if field.ragged else 0), pieces()


def slice_span(field: Field, slice_: Slice, placement: RowPlacement) -> tuple[int, int]:
    """The bytes of the only block of these rows that enclose the sliced column, counted from the start of the block."""
    starts, ends = _wanted(field, slice_, placement)
    filled = ends > starts
    if not filled.any():
        return 0, 0
    first, step = int(placement.blocks.spans(field).values[0]), _step_bytes(field)
    return first + int(starts[filled].min()) * step, first + int(ends[filled].max()) * step


def _steps_of_row(field: Field) -> int:
    """Steps of one dense row."""
    size = field.shape[0]
    return 0 if size is None else size


def _step_bytes(field: Field) -> int:
    """Bytes of one step of a row before it is sliced."""
    return field.row_bytes if field.ragged else field.row_bytes // max(1, _steps_of_row(field))


def _wanted(field: Field, slice_: Slice, placement: RowPlacement) -> tuple[I64, I64]:
    """The wanted steps of each row, counted from the start of its column in its block: int64 ``[rows, ranges]``."""
    if field.ragged:
        edges = row_edges(field, placement)
    else:
        placement.blocks.live_memory()
        steps = _steps_of_row(field)
        first = placement.slot_of_row.astype(np.int64) * steps
        edges = RowEdges(first, first + steps)
    return slice_ranges(slice_.first, edges)


def _gathered(
    field: Field,
    slice_: Slice,
    placement: RowPlacement,
    starts: I64,
    ends: I64,
    rows: slice = slice(None),
    out: U8 | None = None,
) -> U8:
    spans, step = placement.blocks.spans(field), _step_bytes(field)
    low, stretch = placement.blocks.stretch()
    base = (placement.blocks.addresses - low + spans.values)[placement.block_of_row[rows]][:, None]
    taken = copy_ranges(stretch, (base + starts * step).reshape(-1), (base + ends * step).reshape(-1), out)
    inner = field.shape[1:]
    if slice_.inner is None or not len(taken):
        return taken
    whole = taken.view(STORED_DTYPES[field.dtype]).reshape(-1, *inner)
    return np.ascontiguousarray(whole[(slice(None), *inner_slices(field, slice_))]).reshape(-1).view(np.uint8)


def _sliced_rows(
    field: Field, slice_: Slice, placement: RowPlacement, starts: I64, ends: I64, piece_bytes: int, room: Room | None
) -> Iterator[U8]:
    """The wanted bytes of each row, in order: views of their block, or gathered pieces."""
    spans, memory = placement.blocks.spans(field), placement.blocks.live_memory()
    kind, step, inner = STORED_DTYPES[field.dtype], _step_bytes(field), [size or 0 for size in field.shape[1:]]
    wanted = (slice(None), *inner_slices(field, slice_))
    for block, firsts, lasts in zip(placement.block_of_row.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for first, last in zip(firsts, lasts, strict=True):
            start = int(spans.values[block]) + first * step
            steps: np.ndarray[Any, Any] = np.ndarray((last - first, *inner), kind, memory[block], start)
            for box in _boxes(steps[wanted], piece_bytes):
                if box.flags.c_contiguous:
                    view = box.reshape(-1).view(np.uint8)
                    yield from (view[at : at + piece_bytes] for at in range(0, len(view), piece_bytes))
                    continue
                piece = np.empty(box.nbytes, np.uint8) if room is None else room(box.nbytes)
                np.copyto(piece.view(kind).reshape(box.shape), box)
                yield piece


def _boxes(values: np.ndarray[Any, Any], most: int) -> Iterator[np.ndarray[Any, Any]]:
    """Views that have all elements in order, each contiguous, or of at most `most` bytes."""
    if values.nbytes <= most or values.flags.c_contiguous:
        yield values
        return
    item_bytes = values.nbytes // len(values)
    if item_bytes > most:
        for value in values:
            yield from _boxes(value, most)
        return
    for at in range(0, len(values), most // item_bytes):
        yield values[at : at + most // item_bytes]


def _long_views(
    field: Field, slice_: Slice, placement: RowPlacement, starts: I64, ends: I64, least: int
) -> list[U8] | None:
    """The wanted bytes of all rows, in order, as views of their blocks; views that touch are one. None if their mean
    length is below `least`."""
    step, inside, run = _step_bytes(field), np.zeros(1, np.int64), 0
    if slice_.inner is not None:
        inside, run = _runs_of_step(field, slice_)
        if run < least:
            return None
    elif least * starts.size > int((ends - starts).sum()) * step:
        return None
    spans = placement.blocks.spans(field)
    low, stretch = placement.blocks.stretch()
    base = (placement.blocks.addresses - low + spans.values)[placement.block_of_row][:, None]
    firsts, lasts = (base + starts * step).reshape(-1), (base + ends * step).reshape(-1)
    if run:
        addresses = [np.arange(first, last, step) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
        firsts = (np.concatenate(addresses)[:, None] + inside).reshape(-1)
        lasts = firsts + run
    firsts, lasts = join(firsts, lasts)
    return [stretch[first:last] for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _runs_of_step(field: Field, slice_: Slice) -> tuple[I64, int]:
    """The starts of the runs of wanted bytes in one step, counted from its start, and their length; 0: the step has
    none."""
    sizes = [size or 0 for size in field.shape[1:]]
    whole = [range(size)[part] for size, part in zip(sizes, inner_slices(field, slice_), strict=False)]
    bounds = [(part.start, part.stop) for part in whole] + [(0, size) for size in sizes[len(whole) :]]
    last = max(
        (at for at, (size, bound) in enumerate(zip(sizes, bounds, strict=True)) if bound != (0, size)), default=0
    )
    stride = _step_bytes(field)
    begins = np.zeros(1, np.int64)
    for at, (size, (start, stop)) in enumerate(zip(sizes, bounds, strict=True)):
        stride //= max(1, size)
        if at == last:
            return begins + start * stride, (stop - start) * stride
        begins = (begins[:, None] + np.arange(start, stop) * stride).reshape(-1)
    return begins, 0


def _groups(ends: I64, piece_bytes: int) -> Iterator[tuple[int, int]]:
    start, rows = 0, len(ends) - 1
    while start < rows:
        stop = int(np.searchsorted(ends, ends[start] + piece_bytes, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        yield start, stop
        start = stop


def _padded(buffer: U8, piece_bytes: int) -> Iterator[U8]:
    for at in range(0, len(buffer), piece_bytes):
        yield buffer[at : at + piece_bytes]
    yield from _padding(len(buffer))


def _padding(nbytes: int) -> Iterator[Any]:
    if gap := -nbytes % ALIGNMENT:
        yield np.zeros(gap, np.uint8)
