"""Copies many ranges of one stretch of memory into one array.

Ranges that touch are joined first. Few or long ranges are copied one by one (0.3 µs each for a slice and its share of a
``concatenate``). Many short ranges are copied by Arrow's ``take``, as rows of a large binary array (0.04 µs each; Arrow
lists and index arithmetic in numpy are ten times slower). Given memory is filled by slices of a `memoryview`, 0.2 µs
each: fresh pages are the main cost of a larger copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from transferqueue.limits import KIB, MIB
from transferqueue.storage.elements.dtypes import I64, U8
from transferqueue.storage.memory.private_pages import array_at

Room = Callable[[int], U8]
"""Gives memory for this many gathered bytes, ``uint8``."""
FEW_RANGES: Final = 128
"""Up to this many ranges are copied one by one: a call into Arrow costs 40 µs, and its import 0.2 s."""
LONG_RANGE_BYTES: Final = 16 * KIB
"""Ranges of at least this mean length are copied one by one: the copy costs more than the call."""
PLACED_RANGES_MAX: Final = 512
"""Up to this many ranges of any length are copied by slices into given memory; more if their mean length is at least
`PLACED_RANGE_BYTES_MIN`. Of 256 ranges of 4 KiB, apart and not in a cache, this takes 105 µs, ``concatenate`` 143 and
Arrow 195."""
PLACED_RANGE_BYTES_MIN: Final = 512
SPARSE_BYTES_MAX: Final = 64 * MIB
"""Arrow reserves memory by the mean length of all entries, with the gaps: at most this much more than needed."""


def join(starts: I64, ends: I64) -> tuple[I64, I64]:
    """The ranges without empty ones; consecutive ranges that touch become one."""
    filled = ends > starts
    if not filled.all():
        starts, ends = starts[filled], ends[filled]
    apart = starts[1:] != ends[:-1]
    if apart.all():
        return starts, ends
    return starts[np.concatenate(([True], apart))], ends[np.concatenate((apart, [True]))]


def _copied(taken: U8, out: U8) -> U8:
    out[:] = taken  # a second copy, from the cache; both cost a third of a slice for each range
    return out


def _pieces(memory: U8, starts: I64, ends: I64) -> list[U8]:
    return [memory[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def places_best(count: int, total: int) -> bool:
    """Whether `count` ranges of `total` bytes are copied fastest into given memory; otherwise Arrow's own is better."""
    return total > 0 and (count <= PLACED_RANGES_MAX or total >= PLACED_RANGE_BYTES_MIN * count)


def _placed(memory: U8, lows: I64, highs: I64, out: U8) -> U8:
    view, into, at = memory.data, out.data, 0
    for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
        end = at + high - low
        into[at:end] = view[low:high]
        at = end
    return out


def copy_ranges(memory: U8, starts: I64, ends: I64, out: U8 | None = None) -> U8:
    """The bytes ``memory[starts[i]:ends[i]]`` of all ranges in order, ``uint8``, in new memory or in `out`.

    Ranges may repeat and come in any order.
    """
    lows, highs = join(starts, ends)
    total = int((highs - lows).sum())
    if total == 0:
        return np.empty(0, np.uint8)
    if out is not None and total < LONG_RANGE_BYTES * len(lows) and places_best(len(lows), total):
        return _placed(memory, lows, highs, out)
    if len(lows) > FEW_RANGES and total < LONG_RANGE_BYTES * len(lows):
        taken = _take_apart(memory, lows, highs, total)
        if taken is None and len(lows) < len(starts):  # joined ranges overlap where rows repeat; the rows do not
            taken = _take_apart(memory, *_filled(starts, ends), total)
        if taken is not None:
            return taken if out is None else _copied(taken, out)
    return np.concatenate(_pieces(memory, lows, highs), out=out)


def take_rows(memory: U8, edges: I64, rows: np.ndarray[Any, Any]) -> U8:
    """The bytes ``memory[edges[r]:edges[r + 1]]`` of each ``r`` in `rows`, in order, in new memory. Uses Arrow.

    The caller must have checked that the edges ascend and lie inside the memory, and that rows are inside the edges.
    """
    import pyarrow as pa

    data = pa.foreign_buffer(memory.__array_interface__["data"][0], len(memory), memory)
    entries = pa.Array.from_buffers(pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), data], 0)
    taken = entries.take(pa.array(rows)).buffers()[2]
    if taken is None or taken.size == 0:
        return np.empty(0, np.uint8)
    return array_at(taken.address, taken.size, owner=taken)


def _filled(starts: I64, ends: I64) -> tuple[I64, I64]:
    filled = ends > starts
    return starts[filled], ends[filled]


def _take_apart(memory: U8, starts: I64, ends: I64, total: int) -> U8 | None:
    """Copy by Arrow: the ranges and the gaps between them, ascending, are the entries of one array, and ``take``
    selects the ranges.

    None if ranges overlap without being equal, or if the gaps would make Arrow reserve too much memory.
    """
    order = np.argsort(starts, kind="stable")
    lows, highs = starts[order], ends[order]
    repeated = lows[1:] == lows[:-1]
    if (highs[1:] != highs[:-1])[repeated].any() or (lows[1:] < highs[:-1])[~repeated].any():
        return None
    if repeated.any():
        distinct = np.concatenate(([True], ~repeated))
        entry_of = np.cumsum(distinct) - 1
        lows, highs = lows[distinct], highs[distinct]
    else:
        entry_of = np.arange(len(lows))
    if (int(highs[-1]) - int(lows[0])) // (2 * len(lows)) * len(starts) > total + SPARSE_BYTES_MAX:
        return None
    edges = np.empty(2 * len(lows), np.int64)
    edges[0::2], edges[1::2] = lows, highs
    rows = np.empty(len(starts), np.int64)
    rows[order] = 2 * entry_of
    return take_rows(memory, edges, rows)
