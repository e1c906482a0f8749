"""Converts the rows of a gathered column to Python values, arrays of one row, and Arrow arrays."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final

import numpy as np

from transferqueue.errors import Corruption
from transferqueue.schema import TORCH_ONLY_DTYPES, Field
from transferqueue.storage.columns.gather import LoadedColumn, offsets_of, shapes_of
from transferqueue.storage.elements.dtypes import STORED_DTYPES, ml_dtype, shown_dtype
from transferqueue.storage.elements.numbers import widen_to_float32
from transferqueue.storage.elements.torch_interop import as_torch
from transferqueue.storage.elements.values import decode

Array = np.ndarray[Any, Any]


def row_value(field: Field, loaded: LoadedColumn, at: int) -> Any:
    """One row: a Python value for scalars, text, bytes and values; otherwise an array that views the row."""
    if field.blob:
        return _blob(field, loaded.values.data, *offsets_of(loaded)[at : at + 2].tolist())
    if field.shape == ():
        return _scalars(field, loaded.values[at : at + 1])[0]
    return _shown(field, _row(field, loaded, at))


SHOWN_ITEMS: Final = 4
"""Items of a row that a repr shows."""
SHOWN_BYTES: Final = 48
"""Bytes of a text or value that a repr shows."""


def shown_row(field: Field, loaded: LoadedColumn, at: int) -> str:
    """One row for a repr, shortened. Reads only what it shows."""
    if field.blob:
        start, end = offsets_of(loaded)[at : at + 2].tolist()
        if end - start > SHOWN_BYTES and field.dtype == "value":
            return f"<value of {end - start} bytes>"
        cut = bytes(loaded.values.data[start : min(end, start + SHOWN_BYTES)])
        if field.dtype == "value":
            return repr(decode(cut, f'field "{field.name}"'))
        text = repr(cut if field.dtype == "bytes" else cut.decode("utf-8", "ignore"))
        return text if end - start <= SHOWN_BYTES else f"{text}..."
    if field.shape == ():
        return repr(row_value(field, loaded, at))
    row = np.asarray(_shown(field, _row(field, loaded, at)))
    items = [str(item) for item in row.reshape(-1)[:SHOWN_ITEMS].tolist()]
    sizes = f" of shape {list(row.shape)}" if row.ndim > 1 else ""
    return f"[{', '.join(items + ['...'] * (row.size > SHOWN_ITEMS))}]{sizes}"


def to_python(field: Field, loaded: LoadedColumn) -> list[Any]:
    """All rows as plain Python values."""
    if field.blob:
        return _blobs(field, loaded)
    values = widen_to_float32(loaded.values, field.dtype) if field.dtype in TORCH_ONLY_DTYPES else loaded.values
    if field.dense:
        rows: list[Any] = values.reshape(loaded.rows, *_fixed(field)).tolist()
        return rows
    whole = loaded._replace(values=values)
    return [_row(field, whole, at).tolist() for at in range(loaded.rows)]


def arrow_array(field: Field, loaded: LoadedColumn) -> Any:
    """All rows as an Arrow array; see `Column.arrow`."""
    import pyarrow as pa

    values = loaded.values
    if field.blob:
        kind = pa.large_string() if field.dtype == "str" else pa.large_binary()
        return pa.Array.from_buffers(kind, loaded.rows, [None, pa.py_buffer(offsets_of(loaded)), pa.py_buffer(values)])
    leaves = _leaves(field, values, pa)
    if field.varied:
        shapes = _fixed_lists(pa.array(shapes_of(loaded).reshape(-1)), len(field.shape), loaded.rows, pa)
        return pa.StructArray.from_arrays([shapes, _large_list(offsets_of(loaded), leaves, pa)], ["shape", "values"])
    sizes, outer = _fixed(field), loaded.rows if field.dense else int(offsets_of(loaded)[-1])
    for depth in range(len(sizes) - 1, -1, -1):
        leaves = _fixed_lists(leaves, sizes[depth], outer * math.prod(sizes[:depth]), pa)
    return leaves if field.dense else _large_list(offsets_of(loaded), leaves, pa)


def arrow_type(field: Field) -> Any:
    """The Arrow type of a column of this field, as `arrow_array` makes it."""
    values = np.empty(0, STORED_DTYPES[field.dtype])
    shapes = np.empty((0, len(field.shape)), np.int64) if field.varied else None
    return arrow_array(field, LoadedColumn(0, values, None if field.dense else np.zeros(1, np.int64), shapes)).type


_FIXED_MAX: Final = (1 << 31) - 1
"""Arrow counts the elements of a fixed-size list in an int32; larger lists get offsets of 64 bits."""


def _fixed_lists(values: Any, size: int, count: int, pa: Any) -> Any:
    """`count` lists of `size` values each. Made from type and count, which also works for lists of no values."""
    if size > _FIXED_MAX:
        return _large_list(np.arange(count + 1) * size, values, pa)
    return pa.Array.from_buffers(pa.list_(values.type, size), count, [None], children=[values])


def _large_list(offsets: Any, values: Any, pa: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _leaves(field: Field, values: Array, pa: Any) -> Any:
    if values.dtype.kind == "c":
        return _fixed_lists(pa.array(values.view(f"<f{values.itemsize // 2}")), 2, len(values), pa)
    return pa.array(values)


def _fixed(field: Field) -> list[int]:
    return [size for size in field.shape if size is not None]


def _row(field: Field, loaded: LoadedColumn, at: int) -> Array:
    """A view of one row in its shape, of the stored dtype."""
    if field.dense:
        step = field.step_elements
        return loaded.values[at * step : (at + 1) * step].reshape(_fixed(field))
    start, end = offsets_of(loaded)[at : at + 2].tolist()
    if field.ragged:
        step = field.step_elements
        return loaded.values[start * step : end * step].reshape(end - start, *_fixed(field))
    return loaded.values[start:end].reshape(shapes_of(loaded)[at])


def _shown(field: Field, row: Array) -> Any:
    if field.dtype in TORCH_ONLY_DTYPES and ml_dtype(field.dtype) is None:
        return as_torch(row, field.dtype)
    return row.view(shown_dtype(field.dtype))


def _scalars(field: Field, values: Array) -> list[Any]:
    scalars: list[Any] = (
        widen_to_float32(values, field.dtype) if field.dtype in TORCH_ONLY_DTYPES else values
    ).tolist()
    return scalars


def _blobs(field: Field, loaded: LoadedColumn) -> list[Any]:
    memory = loaded.values.data
    edges = offsets_of(loaded).tolist()
    return [_blob(field, memory, start, end) for start, end in pairwise(edges)]


def _blob(field: Field, memory: memoryview, start: int, end: int) -> Any:
    if field.dtype == "bytes":
        return bytes(memory[start:end])
    if field.dtype == "value":
        return decode(memory[start:end], f'field "{field.name}"')
    try:
        return str(memory[start:end], "utf-8")
    except UnicodeDecodeError as error:
        raise Corruption(f'field "{field.name}": stored text is not UTF-8 ({error})') from error
