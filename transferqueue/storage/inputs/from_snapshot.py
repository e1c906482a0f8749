"""Reads columns from the Arrow files of a snapshot: the inverse of `Column.arrow`.

Unlike in `prepare`, the field is known, and dtypes that Arrow lacks are stored as bits. The files are foreign input.
The caller has let Arrow validate them fully (offsets, lengths, UTF-8) and has checked that each array has the type of
its field. `columns_from_arrow` checks what Arrow does not know: nulls, shapes and plain values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from transferqueue.errors import Corruption
from transferqueue.schema import Field
from transferqueue.storage.elements.dtypes import I64, STORED_DTYPES, U8
from transferqueue.storage.elements.values import check
from transferqueue.storage.inputs.prepare import Prepared
from transferqueue.storage.inputs.sources import Arrays


def columns_from_arrow(field: Field, array: Any) -> Prepared:
    """The rows of an Arrow array that `Column.arrow` made for `field`, ready to be written. Keeps the array's buffers.

    `array` is validated fully, of `arrow_type(field)`. `Corruption` if it cannot be a column of this field.
    """
    try:
        return _prepared(field, array)
    except (AttributeError, ValueError, TypeError, LookupError) as error:
        raise _wrong(field, f"its file has {array.type}: {error}") from error


def _wrong(field: Field, what: str) -> Corruption:
    return Corruption(f'field "{field.name}" is {field.describe()}, but {what}')


def _prepared(field: Field, array: Any) -> Prepared:
    rows = len(array)
    _refuse_nulls(field, array)
    if field.blob:
        offsets = _offsets(array.buffers()[1], array)
        data = array.buffers()[2]
        values = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
        values = values[offsets[0] : offsets[-1]]
        if field.dtype == "value":
            _check_plain(field, values, offsets - offsets[0])
        return _made(field, rows, values, offsets - offsets[0], None)
    shapes: I64 | None = None
    if field.varied:
        shapes = _leaves(array.field("shape"), "int64").reshape(rows, len(field.shape))
        array = array.field("values")
        _refuse_nulls(field, array)
    if field.dense:
        return _made(field, rows, _leaves(array, field.dtype), None, None)
    offsets = _offsets(array.buffers()[1], array)
    if shapes is not None:
        _check_shapes(field, shapes, np.diff(offsets))
    return _made(field, rows, _leaves(array.flatten(), field.dtype), offsets - offsets[0], shapes)


def _refuse_nulls(field: Field, array: Any) -> None:
    if array.null_count:
        raise _wrong(field, f"{array.null_count} rows or elements of its file are null")


def _check_shapes(field: Field, shapes: I64, sizes: I64) -> None:
    """Refuse rows whose shape does not match their number of elements or the field."""
    fixed = [at for at, size in enumerate(field.shape) if size is not None]
    wrong = (shapes < 0).any(axis=1) | (shapes[:, fixed] != field.fixed).any(axis=1)
    # In float64 a product beyond 2**53 is inexact, but no row is that large.
    wrong |= shapes.astype(np.float64).prod(axis=1) != sizes
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise _wrong(field, f"a row of {sizes[row]} elements has the shape {shapes[row].tolist()}")


def _check_plain(field: Field, values: U8, offsets: I64) -> None:
    memory, edges = values.data, offsets.tolist()
    for start, end in pairwise(edges):
        check(memory[start:end], f'field "{field.name}"')


def _offsets(buffer: Any, array: Any) -> I64:
    return np.frombuffer(buffer, np.int64, len(array) + 1, array.offset * 8)


def _leaves(array: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The numbers inside fixed-size lists of any depth."""
    while hasattr(array.type, "value_type"):
        if array.null_count:
            raise ValueError(f"{array.null_count} elements are null")
        array = array.flatten()
    if array.null_count:
        raise ValueError(f"{array.null_count} elements are null")
    values: np.ndarray[Any, Any] = np.ascontiguousarray(array.to_numpy(zero_copy_only=False))
    return values.view(STORED_DTYPES[dtype])


def _made(field: Field, rows: int, values: Any, offsets: I64 | None, shapes: I64 | None) -> Prepared:
    source: U8 = values.view(STORED_DTYPES[field.dtype])
    prepared = Prepared(field, rows, Arrays([source], field.dtype), offsets, shapes)
    if prepared.nbytes != source.nbytes:
        raise ValueError("the number of values does not match the rows")
    return prepared
