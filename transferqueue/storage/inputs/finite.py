"""Checks written values for NaN and infinity (`Field.finite`): in place, before the commit, in pieces that stay in the
cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.schema import TORCH_ONLY_DTYPES
from transferqueue.storage.elements.dtypes import STORED_DTYPES, U8
from transferqueue.storage.elements.numbers import widen_to_float32

_PIECE_BYTES: Final = 1 << 18
_EXPONENTS: Final = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
"""These bits are all set only in a NaN or an infinity."""

Numbers = NDArray[Any]


def first_infinite(values: U8, dtype: str) -> tuple[int, Any] | None:
    """The index and the value of the first element that is not finite; None if all are. `values` are the bytes of a
    column."""
    stored = values.view(STORED_DTYPES[dtype])
    for first, piece in _pieces(stored):
        if not _all_finite(piece, dtype):
            numbers = _numbers(piece, dtype)
            at = int(np.flatnonzero(~np.isfinite(numbers))[0])
            return first + at, numbers[at]
    return None


def _pieces(stored: Numbers) -> Iterator[tuple[int, Numbers]]:
    size = _PIECE_BYTES // stored.itemsize
    for first in range(0, len(stored), size):
        yield first, stored[first : first + size]


def _all_finite(stored: Numbers, dtype: str) -> bool:
    if dtype in _EXPONENTS:
        exponent = _EXPONENTS[dtype]
        return not ((stored.view(np.uint16) & exponent) == exponent).any()
    if dtype in TORCH_ONLY_DTYPES:
        return bool(np.isfinite(widen_to_float32(stored, dtype)).all())
    numbers = stored.view(f"<f{stored.itemsize // 2}") if stored.dtype.kind == "c" else stored
    with np.errstate(all="ignore"):  # the sum of squares shows a value that is not finite, in half the time
        return bool(np.isfinite(np.dot(numbers, numbers)) or np.isfinite(numbers).all())


def _numbers(stored: Numbers, dtype: str) -> Numbers:
    return widen_to_float32(stored, dtype) if dtype in TORCH_ONLY_DTYPES else stored
