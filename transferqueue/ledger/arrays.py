"""Decodes the arrays that messages carry as bytes into checked numpy arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.ma  # np.unique imports it at its first call, which would delay a request by 30 ms
import numpy.typing as npt

from transferqueue.errors import ProtocolError, UsageError
from transferqueue.limits import PAGE_ROWS, check_rows

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]
Index = IntArray | slice
"""Positions in the flat columns of `RowPages`: a slice where rows are contiguous (after a put), else an array."""

_TRUE: BoolArray = np.ones(PAGE_ROWS, np.bool_)
NO_ROWS: IntArray = np.empty(0, np.int64)
NO_ROWS.flags.writeable = False


def decode(what: str, data: bytes, dtype: str, count: int) -> AnyArray:
    """Return `count` little-endian values of `dtype`; `UsageError` if `data` has another number of bytes."""
    expected = count * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise UsageError(f"{what} has {len(data)} bytes; {count} rows of {dtype} take {expected}")
    return np.frombuffer(data, dtype)


def decode_ids(what: str, data: bytes) -> IntArray:
    """Return int64 values, as many as `data` holds: at most `ROWS_PER_REQUEST_MAX`. `ProtocolError` if its length is no
    multiple of 8."""
    check_rows(len(data) // 8)
    return decode_int64s(what, data)


def decode_int64s(what: str, data: bytes) -> IntArray:
    """The same, of any number."""
    if len(data) % 8:
        raise ProtocolError(f"{what} has {len(data)} bytes, which is not a whole number of int64 values")
    return np.frombuffer(data, "<i8")


def decode_rows(data: bytes) -> IntArray:
    """Return the row ids of a request: at least one, each once."""
    rows = decode_ids("the list of rows", data)
    if not rows.size:
        raise UsageError("the list of rows is empty; name at least one row")
    if rows.size > 1 and not (rows[1:] > rows[:-1]).all():
        ordered = np.sort(rows)
        if (ordered[1:] == ordered[:-1]).any():
            ids, times = np.unique(rows, return_counts=True)
            twice = int(ids[times > 1][0])
            raise UsageError(f"row {twice} is named {int(times.max())} times; name each row once in a request")
    return rows


def repeated(names: Iterable[str]) -> list[str]:
    """Names that occur more than once, in order."""
    return [name for name, times in Counter(names).items() if times > 1]


def all_true(count: int) -> BoolArray:
    """An array of `count` times True."""
    return _TRUE[:count].copy() if count <= PAGE_ROWS else np.ones(count, np.bool_)


def is_run(numbers: IntArray) -> bool:
    """Whether each number is one more than the one before."""
    size = numbers.size
    if size < 2:
        return size == 1
    first = numbers.item(0)
    return bool(numbers.item(-1) - first == size - 1 and numbers.tobytes() == np.arange(first, first + size).tobytes())


def run_of(at: IntArray) -> Index:
    """Return the positions as a slice if they are contiguous: numpy then returns views, not copies."""
    return slice(at.item(0), at.item(0) + at.size) if is_run(at) else at


def are_equal(values: AnyArray) -> bool:
    """Whether all values have the same bytes. Of few values a comparison of bytes takes a tenth of the time of
    numpy's."""
    data = values.tobytes()
    return data == data[: values.itemsize] * values.size


def some(rows: IntArray, limit: int = 5) -> str:
    """Ids for a message: ``3, 4, 5 and 9 more``."""
    shown = ", ".join(str(int(row)) for row in rows[:limit])
    return shown if rows.size <= limit else f"{shown} and {rows.size - limit} more"


def numbered(rows: IntArray, noun: str = "row") -> str:
    """Ids with their noun: ``row 3``, or ``rows 3, 4``."""
    return f"{agreed(rows, noun, f'{noun}s')} {some(rows)}"


def agreed(rows: IntArray, one: str, many: str) -> str:
    """The word that agrees with the number of these rows: ``is`` or ``are``."""
    return one if rows.size == 1 else many


def tally_in_order(values: IntArray) -> list[tuple[int, int]]:
    """Return (value, count) pairs in the order in which values first appear."""
    if not values.size:
        return []
    if are_equal(values):
        return [(int(values[0]), values.size)]
    if ascends(values):
        starts, times = runs_of(values)
        return list(zip(values[starts].tolist(), times.tolist(), strict=True))
    distinct, at, times = np.unique(values, return_index=True, return_counts=True)
    order = np.argsort(at)
    return list(zip(distinct[order].tolist(), times[order].tolist(), strict=True))


def ascends(values: IntArray) -> bool:
    """Whether no value is less than the one before it, as in the groups of most puts."""
    return bool((values[1:] >= values[:-1]).all())


def runs_of(values: AnyArray) -> tuple[IntArray, IntArray]:
    """Where each run of equal values begins, and how long it is. There is at least one value."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return starts, np.diff(starts, append=values.size)


def by_value(values: AnyArray) -> Iterator[tuple[int, IntArray]]:
    """Each distinct value, ascending, with the positions that have it, ascending."""
    if not values.size:
        return
    order = np.argsort(values, kind="stable")
    starts, counts = runs_of(values[order])
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        positions = order[start : start + count]
        yield values.item(positions.item(0)), positions


def tally(values: IntArray) -> list[tuple[int, int]]:
    """Return (value, count) pairs, ascending by value. Fast if all values are equal, as after one put."""
    if not values.size:
        return []
    if are_equal(values):
        return [(int(values[0]), values.size)]
    distinct, times = np.unique(values, return_counts=True)
    return list(zip(distinct.tolist(), times.tolist(), strict=True))
