"""Kinds of values that MessagePack lacks, each an extension type: its number, its parts, and how it is made again.

Parts are a list of values, which may be of such kinds themselves. The memory of arrays, tensors and images is a
`Buffer`, which is written beside the rest. To add a kind, give it a new number in `_KINDS`, which no earlier kind had.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import operator
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import PosixPath
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

from transferqueue.errors import SchemaError, UsageError
from transferqueue.lazy import install_line
from transferqueue.schema import BLOB_DTYPES, ITEM_BYTES, TORCH_ONLY_DTYPES
from transferqueue.storage.elements.dtypes import (
    STORED_DTYPES,
    as_array,
    dtype_of_torch,
    imported_module,
    imported_torch,
    shown_dtype,
)
from transferqueue.storage.elements.registered_values import registered_class, registered_name
from transferqueue.storage.elements.torch_interop import as_torch, refuse_unstorable, require_torch

Array = np.ndarray[Any, Any]
Memory = bytes | memoryview


class Buffer(NamedTuple):
    """Bytes that are written as they are, without a copy. Read back as a `memoryview` of the stored row."""

    memory: Memory


class ValueKind(NamedTuple):
    """An extension type. `parts` gets the value and the subject of errors; `value` gets what `parts` returned."""

    code: int
    parts: Callable[[Any, str], Sequence[Any]]
    value: Callable[[Any], Any]


# ---------------------------------------------------------------- dates


def _zone(zone: dt.tzinfo | None, subject: str) -> list[Any] | None:
    if zone is None:
        return None
    if type(zone) is ZoneInfo and zone.key:
        return [zone.key]
    if type(zone) is dt.timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        return [offset] if name == dt.timezone(offset).tzname(None) else [offset, name]
    raise SchemaError(
        f"{subject}: a date has the time zone {type(zone).__module__}.{type(zone).__qualname__}; give one of zoneinfo, "
        "or datetime.timezone"
    )


def _zone_of(parts: list[Any] | None) -> dt.tzinfo | None:
    if parts is None:
        return None
    return ZoneInfo(parts[0]) if isinstance(parts[0], str) else dt.timezone(*parts)


def _moment(value: dt.datetime, subject: str) -> list[Any]:
    day = [value.year, value.month, value.day]
    return day + _time(value.timetz(), subject)


def _moment_of(parts: list[Any]) -> dt.datetime:
    *numbers, fold, zone = parts
    return dt.datetime(*numbers).replace(fold=fold, tzinfo=_zone_of(zone))  # noqa: DTZ001  (it gets its zone)


def _time(value: dt.time, subject: str) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _zone(value.tzinfo, subject)]


def _time_of(parts: list[Any]) -> dt.time:
    *numbers, fold, zone = parts
    return dt.time(*numbers).replace(fold=fold, tzinfo=_zone_of(zone))


# ---------------------------------------------------------------- numpy

_NUMPY_KINDS: Final = frozenset("biufcSUMm")


def _dtype_name(dtype: np.dtype[Any], subject: str) -> str:
    if dtype.kind in _NUMPY_KINDS:
        return dtype.str
    if dtype.name in TORCH_ONLY_DTYPES:
        return dtype.name
    raise SchemaError(
        f"{subject}: a value holds numpy dtype {dtype.name}, which is not stored; give one column or one dict entry "
        "for each member"
    )


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no dtype")
    if name in TORCH_ONLY_DTYPES:
        return shown_dtype(name)
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"dtype {name!r} is none of those that are stored")
    return dtype


def _memory(array: Array) -> Buffer:
    flat = np.ascontiguousarray(array).reshape(-1)
    return Buffer(flat.view(np.uint8).data if flat.nbytes else b"")


def _array(value: Array, subject: str) -> list[Any]:
    return [_dtype_name(value.dtype, subject), list(value.shape), _memory(value)]


def _array_over(dtype: np.dtype[Any], shape: Any, memory: Memory) -> Array:
    """An array over the memory; a copy if that is read-only or starts at an odd address."""
    if math.prod(shape) * dtype.itemsize != len(memory) or any(size < 0 for size in shape):
        raise ValueError(f"{len(memory)} bytes are no array of {dtype} {list(shape)}")
    array: Array = np.ndarray(shape, dtype, memory)
    return array if array.flags.aligned and array.flags.writeable else array.copy()


def _array_of(parts: list[Any]) -> Array:
    name, shape, memory = parts
    return _array_over(_numpy_dtype(name), shape, memory)


def _objects(value: Array, _: str) -> list[Any]:
    return [list(value.shape), value.reshape(-1).tolist()]


def _objects_of(parts: list[Any]) -> Array:
    shape, items = parts
    array = np.empty(len(items), object)
    for at, item in enumerate(items):
        array[at] = item
    return array.reshape(shape)


def _scalar(value: np.generic, subject: str) -> list[Any]:
    return [_dtype_name(value.dtype, subject), value.tobytes()]


def _scalar_of(parts: list[Any]) -> Any:
    name, memory = parts
    return _array_over(_numpy_dtype(name), (), memory)[()]


# ---------------------------------------------------------------- torch


def _tensor(value: Any, subject: str) -> list[Any]:
    refuse_unstorable(value, subject)
    dtype = dtype_of_torch(value.dtype, subject)
    try:
        return [dtype, list(value.shape), _memory(as_array(value.cpu(), dtype))]
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"{subject}: a tensor without memory of its own ({error}); give an ordinary one") from error


def _tensor_of(parts: list[Any]) -> Any:
    dtype, shape, memory = parts
    if dtype not in ITEM_BYTES or dtype in BLOB_DTYPES:
        raise ValueError(f"{dtype!r} is no dtype of tensors")
    return as_torch(_array_over(STORED_DTYPES[dtype], shape, memory), dtype)


def _nested(value: Any, _: str) -> list[Any]:
    return [str(value.layout).removeprefix("torch."), list(value.detach().unbind())]


def _nested_of(parts: list[Any]) -> Any:
    torch, (layout, tensors) = require_torch("torch"), parts
    return torch.nested.as_nested_tensor(tensors, layout={"jagged": torch.jagged, "strided": torch.strided}[layout])


def _torch_dtype_of(parts: list[Any]) -> Any:
    torch, (name,) = require_torch("torch"), parts
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype of torch")
    return dtype


# ---------------------------------------------------------------- images

_PIXEL_BYTES: Final = {
    **dict.fromkeys(("L", "P"), 1),
    **dict.fromkeys(("LA", "PA", "La", "I;16", "I;16L", "I;16B"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 4),
}


def _image_bytes(mode: Any, size: Any) -> int:
    width, height = map(operator.index, size)
    if width < 0 or height < 0:
        raise ValueError(f"an image of {width} times {height} pixels")
    return (width + 7) // 8 * height if mode == "1" else width * height * _PIXEL_BYTES[mode]


def _image(value: Any, subject: str) -> list[Any]:
    if value.mode not in _PIXEL_BYTES and value.mode != "1":
        raise SchemaError(f"{subject}: an image of mode {value.mode!r} is not stored; give .convert('RGB')")
    pixels = value.tobytes()
    palette = value.palette.mode if value.mode in ("P", "PA") else None
    colours = bytes(value.getpalette(palette)) if palette else None
    return [value.mode, value.size, Buffer(pixels), palette, colours, dict(_image_facts(value.info))]


def _image_facts(info: Any) -> Iterator[tuple[str, Any]]:
    """Entries of an image's `info` that are text, numbers, bytes, or tuples of numbers."""
    for name, fact in info.items():
        if isinstance(fact, str):
            yield str(name), str(fact)
        elif isinstance(fact, bytes | int | float) or (
            type(fact) is tuple and all(isinstance(part, int | float) for part in fact)
        ):
            yield str(name), fact


def _image_of(parts: list[Any]) -> Any:
    mode, size, pixels, palette, colours, info = parts
    if len(pixels) != _image_bytes(mode, size):
        raise ValueError(f"{len(pixels)} bytes are no image of mode {mode} and size {size}")
    try:
        library = import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise UsageError("a stored value holds an image, and Pillow is not installed: pip install pillow") from error
    image = library.frombytes(mode, size, bytes(pixels)) if pixels else library.new(mode, size)
    if palette is not None:
        image.putpalette(colours, palette)
    image.info.update(info)
    return image


# ---------------------------------------------------------------- objects of libraries and of the caller


def _batch_feature_of(parts: list[Any]) -> Any:
    try:
        library = import_module("transformers.feature_extraction_utils")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a stored value holds a BatchFeature, and transformers is not installed: {install_line('transformers')}"
        ) from error
    return library.BatchFeature(*parts)


def _registered(value: Any, subject: str) -> list[Any]:
    registered = registered_class(type(value))
    if registered is None:
        raise SchemaError(f"{subject}: {type(value).__qualname__} is not registered")
    return [registered.name, registered.to_plain(value)]


def _registered_of(parts: list[Any]) -> Any:
    name, plain = parts
    return registered_name(name).from_plain(plain)


def _items(value: Any, _: str) -> list[Any]:
    return list(value)


def _one(convert: Callable[[Any], Any]) -> Callable[[Any, str], list[Any]]:
    return lambda value, _: [convert(value)]


def _made(make: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda parts: make(*parts)


FRAME: Final = 1
"""The row: a tree of MessagePack, then its buffers."""
BUFFER: Final = 2
"""The next buffer of the row: its length."""
INTEGER: Final = 3
"""An integer of more than 64 bits, little-endian, signed."""
PAIRS: Final = 4
"""A dict whose keys are not all text or integers: key, value, key, value."""
TUPLE: Final = ValueKind(5, _items, tuple)
_SET: Final = ValueKind(6, _items, set)
_FROZEN_SET: Final = ValueKind(7, _items, frozenset)
_COMPLEX: Final = ValueKind(8, lambda value, _: [value.real, value.imag], _made(complex))
_BYTE_ARRAY: Final = ValueKind(9, _one(bytes), _made(bytearray))
_DATE: Final = ValueKind(10, lambda value, _: [value.year, value.month, value.day], _made(dt.date))
_TIME: Final = ValueKind(11, _time, _time_of)
_DATETIME: Final = ValueKind(12, _moment, _moment_of)
_TIMEDELTA: Final = ValueKind(13, lambda value, _: [value.days, value.seconds, value.microseconds], _made(dt.timedelta))
_DECIMAL: Final = ValueKind(14, _one(str), _made(decimal.Decimal))
_UUID: Final = ValueKind(15, _one(lambda value: value.bytes), lambda parts: uuid.UUID(bytes=parts[0]))
_PATH: Final = ValueKind(16, _one(str), _made(PosixPath))
_ORDERED: Final = ValueKind(17, lambda value, _: [list(pair) for pair in value.items()], OrderedDict)
_ARRAY: Final = ValueKind(18, _array, _array_of)
_OBJECTS: Final = ValueKind(19, _objects, _objects_of)
_SCALAR: Final = ValueKind(20, _scalar, _scalar_of)
_DTYPE: Final = ValueKind(21, lambda value, subject: [_dtype_name(value, subject)], lambda parts: _numpy_dtype(*parts))
_TENSOR: Final = ValueKind(22, _tensor, _tensor_of)
_NESTED: Final = ValueKind(23, _nested, _nested_of)
_TORCH_DTYPE: Final = ValueKind(24, _one(lambda value: str(value).removeprefix("torch.")), _torch_dtype_of)
_TORCH_SIZE: Final = ValueKind(25, _items, lambda parts: require_torch("torch").Size(parts))
_TORCH_DEVICE: Final = ValueKind(26, _one(str), lambda parts: require_torch("torch").device(*parts))
_IMAGE: Final = ValueKind(27, _image, _image_of)
_BATCH_FEATURE: Final = ValueKind(28, _one(lambda value: dict(value.data)), _batch_feature_of)
_REGISTERED: Final = ValueKind(29, _registered, _registered_of)

_BY_TYPE: Final[dict[type, ValueKind]] = {
    tuple: TUPLE,
    set: _SET,
    frozenset: _FROZEN_SET,
    complex: _COMPLEX,
    bytearray: _BYTE_ARRAY,
    dt.date: _DATE,
    dt.time: _TIME,
    dt.datetime: _DATETIME,
    dt.timedelta: _TIMEDELTA,
    decimal.Decimal: _DECIMAL,
    uuid.UUID: _UUID,
    PosixPath: _PATH,
    OrderedDict: _ORDERED,
}
KINDS: Final[dict[int, ValueKind]] = {
    kind.code: kind
    for kind in (
        *_BY_TYPE.values(),
        *(_ARRAY, _OBJECTS, _SCALAR, _DTYPE),
        *(_TENSOR, _NESTED, _TORCH_DTYPE, _TORCH_SIZE, _TORCH_DEVICE),
        *(_IMAGE, _BATCH_FEATURE, _REGISTERED),
    )
}
"""Kinds by the number of their extension."""


def kind_of(value: object) -> ValueKind | None:
    """The kind of a value that is neither a leaf, a list nor a dict; None if it cannot be stored. Imports nothing: a
    library that is not imported has made no value."""
    cls = type(value)
    if kind := _BY_TYPE.get(cls):
        return kind
    if registered_class(cls) is not None:
        return _REGISTERED
    if isinstance(value, np.ndarray | np.generic | np.dtype):
        return _numpy_kind(value)
    if imported_torch() is not None and (kind := _torch_kind(value, imported_torch())):
        return kind
    images, features = imported_module("PIL.Image"), imported_module("transformers.feature_extraction_utils")
    if images is not None and isinstance(value, images.Image):
        return _IMAGE
    return _BATCH_FEATURE if features is not None and cls is features.BatchFeature else None


def _numpy_kind(value: Any) -> ValueKind | None:
    if isinstance(value, np.dtype):
        return _DTYPE
    if isinstance(value, np.generic):
        return _SCALAR
    if type(value) is not np.ndarray:
        return None
    return _OBJECTS if value.dtype.hasobject and value.dtype.names is None else _ARRAY


def _torch_kind(value: Any, torch: Any) -> ValueKind | None:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return _NESTED
        return _TENSOR if type(value) in (torch.Tensor, torch.nn.Parameter) else None
    simple = {torch.dtype: _TORCH_DTYPE, torch.Size: _TORCH_SIZE, torch.device: _TORCH_DEVICE}
    return simple.get(type(value))
