"""Stores Python numbers as the elements of a column.

Python numbers have no dtype, so they take that of the field. A number fits dtypes of its own kind and of any later kind
in the order bool < int < float < complex, if it is in the dtype's range. A float may be rounded to float32; it must not
overflow. Without a field the dtype is bool, int64, float64 or complex128, or that of the numpy scalars among the
numbers. Numpy scalars count as numbers.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.errors.text import shown
from transferqueue.schema import BLOB_DTYPES, TORCH_ONLY_DTYPES
from transferqueue.storage.elements.dtypes import NUMPY_DTYPES, STORED_DTYPES, dtype_of_numpy, ml_dtype, torch_dtype

Numbers = np.ndarray[Any, Any]

_KINDS: Final[tuple[tuple[str, tuple[type, ...]], ...]] = (
    ("bool", (bool, np.bool_)),
    ("int", (int, np.integer)),
    ("float", (float, np.floating)),
    ("complex", (complex, np.complexfloating)),
)
_ORDER: Final = tuple(name for name, _ in _KINDS)
_DEFAULTS: Final = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}
_CODES: Final = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


def kind_of(cls: type) -> str | None:
    """The kind of number that the instances of a class are; None if they are no numbers."""
    if issubclass(cls, np.timedelta64):
        return None
    return next((name for name, classes in _KINDS if issubclass(cls, classes)), None)


def are_numbers(classes: Collection[type]) -> bool:
    """Whether all instances of these classes are numbers."""
    return all(kind_of(cls) is not None for cls in classes)


def store_numbers(
    numbers: Sequence[Any], classes: Collection[type], dtype: str | None, subject: str
) -> tuple[str, Numbers]:
    """The field dtype, and the numbers as a one-dimensional array of its stored dtype.

    `classes` are the types of all numbers. `dtype` is the field's, or None to infer it. `SchemaError` if a number does
    not fit.
    """
    kind = _ORDER[max(_ORDER.index(kind_of(cls) or "complex") for cls in classes)]
    target = dtype or _inferred(classes, kind, subject)
    if target in BLOB_DTYPES or _ORDER.index(kind) > _ORDER.index(_kind_of_dtype(target)):
        raise SchemaError(f"{subject}: {kind} values do not fit dtype {target}; convert them, or declare another dtype")
    if not len(numbers):
        return target, np.empty(0, STORED_DTYPES[target])
    return target, _cast(_collect(numbers, _kind_of_dtype(target), kind, subject), target, subject)


def store_integers(numbers: Numbers, dtype: str | None, subject: str) -> tuple[str, Numbers]:
    """As `store_numbers`, for Python integers that are already an int64 array."""
    target = dtype or "int64"
    if target in BLOB_DTYPES or _kind_of_dtype(target) == "bool":
        raise SchemaError(f"{subject}: int values do not fit dtype {target}; convert them, or declare another dtype")
    if not len(numbers) or _kind_of_dtype(target) == "int":
        return target, _cast(numbers, target, subject)
    return target, _cast(
        numbers.astype(np.float64 if _kind_of_dtype(target) == "float" else np.complex128), target, subject
    )


def _inferred(classes: Collection[type], kind: str, subject: str) -> str:
    scalars = {dtype_of_numpy(np.dtype(cls), subject) for cls in classes if issubclass(cls, np.generic)}
    if len(scalars) > 1:
        raise SchemaError(
            f"{subject}: numpy scalars of {', '.join(sorted(scalars))} in one column; convert them to one dtype"
        )
    dtype = scalars.pop() if scalars else _DEFAULTS[kind]
    return dtype if _kind_of_dtype(dtype) == kind else _DEFAULTS[kind]


def _kind_of_dtype(dtype: str) -> str:
    return "float" if dtype in TORCH_ONLY_DTYPES else _CODES[STORED_DTYPES[dtype].kind]


def _collect(numbers: Sequence[Any], wanted: str, kind: str, subject: str) -> Numbers:
    """The numbers in the widest dtype of this kind. `array` reads a list three times as fast as numpy does."""
    try:
        if wanted == "bool" or wanted == "complex":
            return np.array(numbers, np.bool_ if wanted == "bool" else np.complex128)
        if wanted == "float":
            return np.frombuffer(array("d", numbers), np.float64)
        return _integers(numbers)
    except OverflowError as error:
        raise SchemaError(
            f"{subject}: {_first_beyond(numbers)} is beyond 64 bits ({error}); store it as text"
        ) from error


def _first_beyond(numbers: Sequence[Any]) -> str:
    """The first integer of more than 64 bits, for a message."""
    beyond = (number for number in numbers if isinstance(number, int) and number.bit_length() > 64)
    return next(map(shown, beyond), "an integer")


def _integers(numbers: Sequence[Any]) -> Numbers:
    try:
        return np.frombuffer(array("q", numbers), np.int64)
    except OverflowError:
        return np.frombuffer(array("Q", numbers), np.uint64)


def _cast(numbers: Numbers, dtype: str, subject: str) -> Numbers:
    if numbers.dtype == STORED_DTYPES[dtype] and dtype in NUMPY_DTYPES:
        return numbers
    if numbers.dtype.kind in "iu":
        return _cast_integers(numbers, dtype, subject)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = _narrow(numbers, dtype, subject) if dtype in TORCH_ONLY_DTYPES else numbers.astype(STORED_DTYPES[dtype])
        shown = widen_to_float32(cast, dtype) if dtype in TORCH_ONLY_DTYPES else cast
    overflowed = np.isfinite(numbers) & ~np.isfinite(shown)
    if overflowed.any():
        _refuse_range(numbers[overflowed][0], dtype, subject)
    return cast


def _cast_integers(numbers: Numbers, dtype: str, subject: str) -> Numbers:
    if not len(numbers):
        return numbers.astype(STORED_DTYPES[dtype])
    bounds = np.iinfo(STORED_DTYPES[dtype])
    for extreme in (int(numbers.min()), int(numbers.max())):
        if not bounds.min <= extreme <= bounds.max:
            _refuse_range(extreme, dtype, subject, f" of {bounds.min} to {bounds.max}")
    return numbers.astype(STORED_DTYPES[dtype])


def _refuse_range(number: object, dtype: str, subject: str, bounds: str = "") -> None:
    raise SchemaError(f"{subject}: {number} is out of the range{bounds} of dtype {dtype}; declare a wider dtype")


def _narrow(numbers: Numbers, dtype: str, subject: str) -> Numbers:
    """The bits of bf16 or fp8 numbers; ml_dtypes or torch rounds them to nearest."""
    extension = ml_dtype(dtype)
    if extension is not None:
        return numbers.astype(extension).view(STORED_DTYPES[dtype])
    if importlib.util.find_spec("torch") is None:
        raise SchemaError(
            f"{subject}: Python numbers become {dtype} only with torch or ml_dtypes; install one, or give arrays"
        )
    import torch

    bits = torch.int16 if STORED_DTYPES[dtype].itemsize == 2 else torch.uint8
    cast: Numbers = torch.from_numpy(numbers.copy()).to(torch_dtype(dtype, torch)).view(bits).numpy()
    return cast.view(STORED_DTYPES[dtype])


def widen_to_float32(bits: Numbers, dtype: str) -> Numbers:
    """The values of bf16 or fp8 bits as float32."""
    extension = ml_dtype(dtype)
    if extension is not None:
        return bits.view(extension).astype(np.float32)
    import torch

    signed = bits.view(np.int16) if bits.itemsize == 2 else bits
    values: Numbers = torch.from_numpy(signed).view(torch_dtype(dtype, torch)).float().numpy()
    return values
