"""Python numbers as the elements of a column.

Python numbers have no dtype, so they take the field's: a number fits every kind at or above its own in the order
bool < int < float < complex, if it is in the dtype's range (rounding a float to float32 is fitting, overflow is not).
Without a field: bool, int64, float64, complex128, or the dtype of the numpy scalars among them.
Numpy scalars count as numbers.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.schema import BLOB_DTYPES, TORCH_ONLY_DTYPES
from transferqueue.storage.elements.dtypes import NUMPY_DTYPES, ml_dtype, of_numpy, stored, torch_dtype

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
    """Which kind of number instances of a class are; None if they are none."""
    if issubclass(cls, np.timedelta64):
        return None
    return next((name for name, classes in _KINDS if issubclass(cls, classes)), None)


def are_numbers(classes: Collection[type]) -> bool:
    """Whether all instances of these classes are numbers."""
    return all(kind_of(cls) is not None for cls in classes)


def store_numbers(
    numbers: Sequence[Any], classes: Collection[type], dtype: str | None, subject: str
) -> tuple[str, Numbers]:
    """The field dtype, and the numbers as a one-dimensional array in its stored form.

    classes: of all numbers. dtype: the field's, or None to infer it. Raises `SchemaError` if a number does not fit.
    """
    kind = _ORDER[max(_ORDER.index(kind_of(cls) or "complex") for cls in classes)]
    target = dtype or _inferred(classes, kind, subject)
    if target in BLOB_DTYPES or _ORDER.index(kind) > _ORDER.index(_kind_of_dtype(target)):
        raise SchemaError(f"{subject}: {kind} values do not fit dtype {target}; convert them, or declare another dtype")
    if not len(numbers):
        return target, np.empty(0, stored(target))
    return target, _cast(_collect(numbers, _kind_of_dtype(target), kind, subject), target, subject)


def store_integers(found: Numbers, dtype: str | None, subject: str) -> tuple[str, Numbers]:
    """The same for Python integers that were collected already, as int64."""
    target = dtype or "int64"
    if target in BLOB_DTYPES or _kind_of_dtype(target) == "bool":
        raise SchemaError(f"{subject}: int values do not fit dtype {target}; convert them, or declare another dtype")
    if not len(found) or _kind_of_dtype(target) == "int":
        return target, _cast(found, target, subject)
    return target, _cast(
        found.astype(np.float64 if _kind_of_dtype(target) == "float" else np.complex128), target, subject
    )


def _inferred(classes: Collection[type], kind: str, subject: str) -> str:
    scalars = {of_numpy(np.dtype(cls), subject) for cls in classes if issubclass(cls, np.generic)}
    if len(scalars) > 1:
        raise SchemaError(
            f"{subject}: numpy scalars of {', '.join(sorted(scalars))} in one column; convert them to one dtype"
        )
    found = scalars.pop() if scalars else _DEFAULTS[kind]
    return found if _kind_of_dtype(found) == kind else _DEFAULTS[kind]


def _kind_of_dtype(dtype: str) -> str:
    return "float" if dtype in TORCH_ONLY_DTYPES else _CODES[stored(dtype).kind]


def _collect(numbers: Sequence[Any], wanted: str, kind: str, subject: str) -> Numbers:
    """The numbers in the widest dtype of the wanted kind. `array` reads a list three times as fast as numpy does."""
    if wanted == "bool" or wanted == "complex":
        return np.array(numbers, np.bool_ if wanted == "bool" else np.complex128)
    try:
        if wanted == "float":
            return np.frombuffer(array("d", numbers), np.float64)
        return _integers(numbers)
    except OverflowError as error:
        raise SchemaError(
            f"{subject}: an integer of {kind} values is beyond 64 bits ({error}); store it as text"
        ) from error


def _integers(numbers: Sequence[Any]) -> Numbers:
    try:
        return np.frombuffer(array("q", numbers), np.int64)
    except OverflowError:
        return np.frombuffer(array("Q", numbers), np.uint64)


def _cast(found: Numbers, dtype: str, subject: str) -> Numbers:
    if found.dtype == stored(dtype) and dtype in NUMPY_DTYPES:
        return found
    if found.dtype.kind in "iu":
        return _cast_integers(found, dtype, subject)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = _narrow(found, dtype, subject) if dtype in TORCH_ONLY_DTYPES else found.astype(stored(dtype))
        shown = widened(cast, dtype) if dtype in TORCH_ONLY_DTYPES else cast
    lost = np.isfinite(found) & ~np.isfinite(shown)
    if lost.any():
        _refuse_range(found[lost][0], dtype, subject)
    return cast


def _cast_integers(found: Numbers, dtype: str, subject: str) -> Numbers:
    if not len(found):
        return found.astype(stored(dtype))
    bounds = np.iinfo(stored(dtype))
    for extreme in (int(found.min()), int(found.max())):
        if not bounds.min <= extreme <= bounds.max:
            _refuse_range(extreme, dtype, subject, f" of {bounds.min} to {bounds.max}")
    return found.astype(stored(dtype))


def _refuse_range(number: object, dtype: str, subject: str, bounds: str = "") -> None:
    raise SchemaError(f"{subject}: {number} is out of the range{bounds} of dtype {dtype}; declare a wider dtype")


def _narrow(found: Numbers, dtype: str, subject: str) -> Numbers:
    """Bits of bf16 or fp8, rounded to nearest by whoever knows the format."""
    known = ml_dtype(dtype)
    if known is not None:
        return found.astype(known).view(stored(dtype))
    if importlib.util.find_spec("torch") is None:
        raise SchemaError(
            f"{subject}: Python numbers become {dtype} only with torch or ml_dtypes; install one, or give arrays"
        )
    import torch

    bits = torch.int16 if stored(dtype).itemsize == 2 else torch.uint8
    cast: Numbers = torch.from_numpy(found.copy()).to(torch_dtype(dtype, torch)).view(bits).numpy()
    return cast.view(stored(dtype))


def widened(bits: Numbers, dtype: str) -> Numbers:
    """Values of bf16 or fp8 bits as float32."""
    known = ml_dtype(dtype)
    if known is not None:
        return bits.view(known).astype(np.float32)
    import torch

    signed = bits.view(np.int16) if bits.itemsize == 2 else bits
    widened: Numbers = torch.from_numpy(signed).view(torch_dtype(dtype, torch)).float().numpy()
    return widened
