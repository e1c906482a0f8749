"""Serialises a column as a stream of bytes, which a shard sends to another machine.

The stream is a block of that column alone (`schema.layout`), so the receiver gets what a local reader maps. If the rows are a run of one
block, the pieces are views of the block. Otherwise rows are gathered a piece at a time, so that a stalled reader makes a shard gather at
most one piece ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from transferqueue.limits import ALIGNMENT
from transferqueue.schema import Field
from transferqueue.storage.columns.gather import lengths, load, row_shapes
from transferqueue.storage.columns.placement import RowPlacement
from transferqueue.storage.elements.dtypes import I64, U8

_ZEROS: Final = np.zeros(ALIGNMENT, np.uint8)


def count_of(field: Field, placement: RowPlacement) -> int:
    """The column's count for `schema.layout`: its last offset; 0 for a dense field. Errors as of `gather.load`."""
    if field.dense:
        return 0
    if placement.run is None:
        return int(lengths(field, placement).sum())
    loaded = load(field, placement)
    return 0 if loaded.offsets is None else int(loaded.offsets[-1])


def stream_pieces(field: Field, placement: RowPlacement, piece_bytes: int) -> Iterator[U8]:
    """The bytes of a block with this column of these rows, in order, in pieces ``uint8`` of at most `piece_bytes` (at least 64). Errors as of `gather.load`."""
    if placement.run is not None or not len(placement):
        loaded = load(field, placement)
        for buffer in (loaded.shapes, loaded.offsets, loaded.values):
            if buffer is not None:
                yield from _cut(_bytes(buffer), piece_bytes)
                yield from _padding(buffer.nbytes)
    elif field.dense:
        yield from _scattered_dense(field, placement, piece_bytes)
    else:
        yield from _scattered_varying(field, placement, piece_bytes)


def _scattered_dense(field: Field, placement: RowPlacement, piece_bytes: int) -> Iterator[U8]:
    row_bytes = field.step_elements * field.item_bytes
    at_once = max(1, piece_bytes // max(1, row_bytes))
    for start in range(0, len(placement), at_once):
        yield from _values(field, placement, start, start + at_once, piece_bytes)
    yield from _padding(len(placement) * row_bytes)


def _scattered_varying(field: Field, placement: RowPlacement, piece_bytes: int) -> Iterator[U8]:
    offsets = np.zeros(len(placement) + 1, np.int64)
    np.cumsum(lengths(field, placement), out=offsets[1:])
    if field.varied:
        yield from _scattered_shapes(field, placement, piece_bytes)
    yield from _cut(_bytes(offsets), piece_bytes)
    yield from _padding(offsets.nbytes)
    ends = offsets * (field.step_elements * field.item_bytes)
    for start, stop in _groups(ends, piece_bytes):
        yield from _values(field, placement, start, stop, piece_bytes)
    yield from _padding(int(ends[-1]))


def _scattered_shapes(field: Field, placement: RowPlacement, piece_bytes: int) -> Iterator[U8]:
    row_bytes = 8 * len(field.shape)
    at_once = max(1, piece_bytes // row_bytes)
    for start in range(0, len(placement), at_once):
        yield _bytes(row_shapes(field, placement.select(slice(start, start + at_once))))
    yield from _padding(len(placement) * row_bytes)


def _groups(ends: I64, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of rows ``(start, stop)`` whose values fit a piece. A row that is longer is a run by itself. ends: cumulative bytes, from 0."""
    start, rows = 0, len(ends) - 1
    while start < rows:
        stop = int(np.searchsorted(ends, ends[start] + piece_bytes, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        yield start, stop
        start = stop


def _values(field: Field, placement: RowPlacement, start: int, stop: int, piece_bytes: int) -> Iterator[U8]:
    yield from _cut(_bytes(load(field, placement.select(slice(start, stop))).values), piece_bytes)


def _cut(buffer: U8, piece_bytes: int) -> Iterator[U8]:
    for start in range(0, len(buffer), piece_bytes):
        yield buffer[start : start + piece_bytes]


def _padding(nbytes: int) -> Iterator[U8]:
    if gap := -nbytes % ALIGNMENT:
        yield _ZEROS[:gap]


def _bytes(buffer: np.ndarray[Any, Any]) -> U8:
    return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
