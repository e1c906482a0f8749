"""Parses numpy arrays: one array over all rows, or a list with an array for each row."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.schema import TORCH_ONLY_DTYPES
from transferqueue.storage.elements.dtypes import I64, dtype_of_numpy, stored_dtype
from transferqueue.storage.inputs.parsed import DenseInput, Parsed, RaggedInput
from transferqueue.storage.inputs.sources import Arrays

Array = np.ndarray[Any, Any]


def parse_array(array: Array, subject: str) -> Parsed | list[Any]:
    """Parse one array over all rows. Numpy's own text and byte strings are returned as a list, which the caller parses."""
    _refuse_masked(array, subject)
    if array.dtype.kind in "UST":
        return array.tolist()  # type: ignore[no-any-return]
    dtype = dtype_of_numpy(array.dtype, subject)
    return DenseInput(dtype, array.shape[0], array.shape[1:], Arrays([_bits(array, dtype)], dtype))


def parse_arrays(rows: Sequence[Array], subject: str) -> Parsed:
    """Parse an array for each row, all of one dtype and number of dimensions."""
    if not set(map(type, rows)) <= {np.ndarray}:
        for row in rows:
            _refuse_masked(row, subject)
    dtypes = set(map(attrgetter("dtype"), rows))
    names = {dtype_of_numpy(dtype, subject) for dtype in dtypes}
    if len(names) > 1:
        raise SchemaError(f"{subject}: rows of dtypes {', '.join(sorted(names))}; convert them to one dtype")
    dtype = names.pop()
    if dtype in TORCH_ONLY_DTYPES:
        rows = [_bits(row, dtype) for row in rows]
    ranks = set(map(attrgetter("ndim"), rows))
    ndim = ranks.pop() if len(ranks) == 1 else only_rank(ranks, subject)
    if ndim == 0:
        return DenseInput(dtype, len(rows), (), Arrays([row.reshape(1) for row in rows], dtype))
    return RaggedInput(dtype, _shapes(rows, ndim), Arrays(rows, dtype))


def only_rank(ranks: set[int], subject: str) -> int:
    """The number of dimensions of all rows; `SchemaError` if they differ."""
    if len(ranks) > 1:
        raise SchemaError(f"{subject}: rows of {', '.join(map(str, sorted(ranks)))} dimensions; all must have the same")
    return ranks.pop()


def _shapes(rows: Sequence[Array], ndim: int) -> I64:
    if ndim == 1:
        return np.fromiter(map(len, rows), np.int64, len(rows)).reshape(-1, 1)
    return np.array([row.shape for row in rows], np.int64)


def _bits(array: Array, dtype: str) -> Array:
    return array.view(stored_dtype(dtype)) if dtype in TORCH_ONLY_DTYPES else array


def _refuse_masked(array: Array, subject: str) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise SchemaError(
            f"{subject}: a masked array has no values where it is masked; give .filled(...) and a mask column"
        )
