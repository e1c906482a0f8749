"""Columns in HTTP bodies: a list of plain values, or elements packed as bytes. Does no I/O.

- A column is a list with one value for each row (numbers, text, lists of numbers, plain values), or a `PackedColumn`.
- An answer has a list where JSON represents every value and its shape exactly: finite numbers and text. Other columns
  are packed, and so are all if the caller asks for it. Nothing is rounded, padded or left out.
- In JSON the bytes of a `PackedColumn` are base64; a body of MessagePack has them as they are.
- A received column is checked whole, against its own dtype and shape, before the queue sees it. Nothing in it is code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import Corruption, SchemaError
from transferqueue.limits import ROWS_PER_REQUEST_MAX
from transferqueue.schema import BLOB_DTYPES, Field
from transferqueue.storage.columns.column import Column
from transferqueue.storage.elements.dtypes import shown_dtype
from transferqueue.storage.elements.values import decode, encode

_LISTED: Final = frozenset({"bool", "str", "float16", "float32", "float64"})
"""Dtypes that JSON can represent, besides integers."""
_BLOBS: Final[dict[str, Callable[[bytes], Any]]] = {
    "str": lambda data: data.decode(),
    "bytes": bytes,
    "value": lambda data: decode(data, "the column"),
}

_ELEMENTS_MAX: Final = 1 << 40
"""Bound on the elements of one row, without its empty dimensions: far over any body."""

Sizes = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=8 * ROWS_PER_REQUEST_MAX)]


class PackedColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column as bytes: the elements of all rows one after the other, in C order, little-endian, without padding.

    Args:
        dtype: int64, float32, bfloat16, bool and the like, str (UTF-8), bytes, or value (each a MessagePack).
        shape: Of one row's value, null in dimensions in which rows differ.
        sizes: For each row, its size in every null dimension, in their order; of str, bytes and value, its bytes.
        data: The elements.
    """

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    data: bytes
    shape: Annotated[list[int | None], msgspec.Meta(max_length=8)] = []
    sizes: Sizes = []


Values = list[Any] | PackedColumn
"""A column of several rows."""


def unpack(columns: Mapping[str, Values]) -> dict[str, Any]:
    """Columns as the queue takes them; `SchemaError` for one whose parts do not fit each other."""
    return {
        name: _rows(name, column) if isinstance(column, PackedColumn) else column for name, column in columns.items()
    }


def unpack_tensors(tensors: Mapping[str, PackedColumn]) -> dict[str, NDArray[Any]]:
    """Tensors of the shapes they say, none of which may be null."""
    return {name: _tensor(name, tensor) for name, tensor in tensors.items()}


def pack(column: Column, *, packed: bool) -> Values:
    """A column of an answer. packed: as bytes, even if a list would do."""
    field = column.field
    return column.list() if not packed and _listable(field, column) else _packed(column)


def nbytes(values: Values) -> int:
    """About the bytes that a column adds to a body."""
    if isinstance(values, PackedColumn):
        return len(values.data) + 8 * len(values.sizes)
    return 8 * len(values)


# ---------------------------------------------------------------- from bytes


def _rows(name: str, packed: PackedColumn) -> Any:
    subject = f'field "{name}"'
    if packed.dtype in BLOB_DTYPES:
        return _blobs(packed, subject)
    field = Field(name, packed.dtype, tuple(packed.shape))
    if field.dense:
        return _dense(packed, field, subject)
    shapes = _shapes(packed, subject)
    values = _elements(packed, subject, sum(math.prod(shape) for shape in shapes))
    rows, at = [], 0
    for shape in shapes:
        rows.append(_shaped(values[at : at + math.prod(shape)], shape, subject))
        at += math.prod(shape)
    return rows


def _dense(packed: PackedColumn, field: Field, subject: str) -> NDArray[Any]:
    if packed.sizes:
        raise SchemaError(f"{subject}: sizes are given, but no dimension of {packed.shape} is null")
    of_row = field.step_elements * field.item_bytes
    if not of_row or len(packed.data) % of_row or not packed.data:
        raise SchemaError(f"{subject}: {len(packed.data)} bytes are no rows of {field.describe()}, {of_row} bytes each")
    count = len(packed.data) // of_row
    return _elements(packed, subject, count * field.step_elements).reshape(count, *_known(packed.shape))


def _blobs(packed: PackedColumn, subject: str) -> list[Any]:
    if packed.shape:
        raise SchemaError(f"{subject}: dtype {packed.dtype} has no shape, but {packed.shape} was given")
    if sum(packed.sizes) != len(packed.data) or not packed.sizes:
        raise SchemaError(f"{subject}: {len(packed.data)} bytes, but sizes add up to {sum(packed.sizes)}")
    edges = np.cumsum([0, *packed.sizes]).tolist()
    try:
        return [_BLOBS[packed.dtype](packed.data[start:end]) for start, end in pairwise(edges)]
    except (UnicodeDecodeError, Corruption) as error:
        raise SchemaError(f"{subject}: the bytes of a row are no {packed.dtype}: {error}") from error


def _tensor(name: str, packed: PackedColumn) -> NDArray[Any]:
    subject = f'tensor "{name}"'
    if packed.sizes or None in packed.shape or packed.dtype in BLOB_DTYPES:
        raise SchemaError(f"{subject}: {packed.dtype} {packed.shape} is no tensor; give its shape, and no sizes")
    Field(name, packed.dtype, tuple(packed.shape))
    shape = _known(packed.shape)
    return _shaped(_elements(packed, subject, math.prod(shape)), shape, subject)


def _shapes(packed: PackedColumn, subject: str) -> list[list[int]]:
    """The shape of each row, its null dimensions filled in."""
    free = packed.shape.count(None)
    if not packed.sizes or len(packed.sizes) % free:
        raise SchemaError(
            f"{subject}: {len(packed.sizes)} sizes for shape {packed.shape}; give {free} for each row, one for each "
            "null"
        )
    sizes = iter(packed.sizes)
    rows = len(packed.sizes) // free
    return [[next(sizes) if size is None else size for size in packed.shape] for _ in range(rows)]


def _elements(packed: PackedColumn, subject: str, count: int) -> NDArray[Any]:
    dtype = shown_dtype(packed.dtype)
    if count * dtype.itemsize != len(packed.data):
        raise SchemaError(
            f"{subject}: {len(packed.data)} bytes, but shape and sizes are of {count} elements of {packed.dtype}, "
            f"{count * dtype.itemsize} bytes"
        )
    if packed.dtype == "bool" and packed.data.translate(None, b"\0\1"):
        raise SchemaError(f"{subject}: a bool is a byte of 0 or 1, and there are others")
    return np.frombuffer(packed.data, dtype)


def _shaped(values: NDArray[Any], shape: Sequence[int], subject: str) -> NDArray[Any]:
    if math.prod(max(size, 1) for size in shape) > _ELEMENTS_MAX:
        raise SchemaError(f"{subject}: shape {list(shape)} is none that an array may have, even of nothing")
    return values.reshape(shape)


def _known(shape: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(size for size in shape if size is not None)


# ---------------------------------------------------------------- to bytes


def _exact(value: Any) -> bool:
    """Whether JSON represents a plain value exactly."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _exact(element) for name, element in value.items())
    if isinstance(value, list | tuple):
        return all(_exact(element) for element in value)
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _blob(dtype: str, row: Any) -> bytes:
    if dtype == "value":
        return encode(row, "the column")
    return row.encode() if isinstance(row, str) else bytes(row)


def _listable(field: Field, column: Column) -> bool:
    """Whether a JSON list represents a column exactly."""
    if field.dtype == "value":
        return all(_exact(value) for value in column)
    if field.dtype.startswith("float"):
        exact = field.dtype in _LISTED and _finite(column)
    else:
        exact = field.dtype in _LISTED or "int" in field.dtype
    return exact and not (
        field.varied and any(row.size == 0 for row in column)
    )  # [] does not show the other dimensions


def _finite(column: Column) -> bool:
    if column.field.dense:
        return bool(np.isfinite(column.numpy()).all())
    return all(np.isfinite(row).all() for row in column)


def _packed(column: Column) -> PackedColumn:
    field, shape = column.field, list(column.field.shape)
    if field.blob:
        blobs = [_blob(field.dtype, row) for row in column]
        return PackedColumn(dtype=field.dtype, data=b"".join(blobs), sizes=[len(blob) for blob in blobs])
    if field.dense:
        return PackedColumn(dtype=field.dtype, shape=shape, data=column.numpy().tobytes())
    if field.ragged:
        values, offsets = column.ragged()
        return PackedColumn(dtype=field.dtype, shape=shape, data=values.tobytes(), sizes=np.diff(offsets).tolist())
    rows = list(column)
    free = [at for at, size in enumerate(shape) if size is None]
    sizes = [row.shape[at] for row in rows for at in free]
    return PackedColumn(dtype=field.dtype, shape=shape, data=b"".join(row.tobytes() for row in rows), sizes=sizes)
