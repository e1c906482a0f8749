"""Columns as they lie in Arrow files, back as columns: the inverse of `Column.arrow`.

Unlike what a caller gives to `prepare`, the field is known, and bits stand for what Arrow has no type for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transferqueue.errors import Corruption
from transferqueue.schema import Field
from transferqueue.storage.dtypes import I64, U8, stored
from transferqueue.storage.prepare import Prepared
from transferqueue.storage.sources import Arrays


def thaw(field: Field, array: Any) -> Prepared:
    """The rows of an Arrow array that `Column.arrow` gave for `field`, ready to be written. Keeps the array's buffers.

    `Corruption` if the array is none of this field.
    """
    try:
        return _thaw(field, array)
    except (AttributeError, ValueError, TypeError, IndexError) as error:
        raise Corruption(f'field "{field.name}" is {field.describe()}, but its file has {array.type}') from error


def _thaw(field: Field, array: Any) -> Prepared:
    rows = len(array)
    if field.blob:
        offsets = _offsets(array.buffers()[1], array)
        data = array.buffers()[2]
        values = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
        return _made(field, rows, values[offsets[0] : offsets[-1]], offsets - offsets[0], None)
    shapes: I64 | None = None
    if field.varied:
        shapes = _leaves(array.field("shape"), "int64").reshape(rows, len(field.shape))
        array = array.field("values")
    if field.dense:
        return _made(field, rows, _leaves(array, field.dtype), None, None)
    offsets = _offsets(array.buffers()[1], array)
    return _made(field, rows, _leaves(array.flatten(), field.dtype), offsets - offsets[0], shapes)


def _offsets(buffer: Any, array: Any) -> I64:
    return np.frombuffer(buffer, np.int64, len(array) + 1, array.offset * 8)


def _leaves(array: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The numbers inside any depth of fixed-size lists."""
    while hasattr(array.type, "list_size"):
        array = array.flatten()
    values: np.ndarray[Any, Any] = np.ascontiguousarray(array.to_numpy(zero_copy_only=False))
    return values.view(stored(dtype))


def _made(field: Field, rows: int, values: Any, offsets: I64 | None, shapes: I64 | None) -> Prepared:
    source: U8 = values.view(stored(field.dtype))
    prepared = Prepared(field, rows, Arrays([source], field.dtype), offsets, shapes)
    if prepared.nbytes != source.nbytes:
        raise ValueError("the values are not as many as the rows say")
    return prepared
