"""The dtypes of fields, and the matching dtypes of numpy, ml_dtypes and torch.

This module imports torch or ml_dtypes only when a caller asks for a dtype or a value of theirs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import SchemaError, UsageError
from transferqueue.errors.text import SHOWN_CHARS, shortened
from transferqueue.schema import BLOB_DTYPES, ITEM_BYTES, TORCH_ONLY_DTYPES

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<") for name in ITEM_BYTES if name not in BLOB_DTYPES | TORCH_ONLY_DTYPES
}
"""The numpy dtype of each field dtype that numpy has, little-endian."""

STORED_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: NUMPY_DTYPES.get(name) or np.dtype(f"<u{size}") for name, size in ITEM_BYTES.items()
}
"""The numpy dtype in which a field's values are stored: the same dtype, or unsigned integers of its size if numpy lacks
it."""


def shown_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype in which users see a field's values; for bf16 and fp8, that of ml_dtypes. `UsageError` if there
    is none."""
    if dtype not in TORCH_ONLY_DTYPES:
        return STORED_DTYPES[dtype]
    extension = ml_dtype(dtype)
    if extension is None:
        raise UsageError(
            f"dtype {dtype} does not exist in numpy; use .torch(), .nested() (which .to_padded_tensor(value) pads) or "
            ".list(), or install ml_dtypes"
        )
    return extension


@cache
def ml_dtype(dtype: str) -> np.dtype[Any] | None:
    """The dtype of this name in ml_dtypes. None if ml_dtypes is not installed or has no such dtype."""
    if importlib.util.find_spec("ml_dtypes") is None:
        return None
    scalar_type = getattr(importlib.import_module("ml_dtypes"), dtype, None)
    return None if scalar_type is None else np.dtype(scalar_type)


def dtype_of_numpy(dtype: np.dtype[Any], subject: str) -> str:
    """The field dtype of a numpy dtype (ml_dtypes included); `SchemaError` if it cannot be stored."""
    name = _numeric_name(dtype)
    if name is not None:
        return name
    raise SchemaError(
        f"{subject}: numpy dtype {shortened(str(dtype), SHOWN_CHARS)} cannot be stored; "
        f"{_REMEDIES.get(dtype.kind if dtype.kind != 'V' or dtype.fields else '', _REMEDY)}"
    )


@lru_cache(maxsize=64)
def _numeric_name(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype that a field may have. Cached, since numpy makes a name anew each time it is asked for."""
    name = dtype.name
    return name if name in ITEM_BYTES and name not in BLOB_DTYPES and dtype.names is None else None


_REMEDY: Final = "convert it to one of " + ", ".join(name for name in ITEM_BYTES if name not in BLOB_DTYPES)
_REMEDIES: Final = {
    "O": "give a list of arrays, strings, bytes or plain values (dicts, lists) instead of an object array",
    "M": 'convert it to int64, as by .astype("datetime64[ns]").view("int64")',
    "m": 'convert it to int64, as by .astype("timedelta64[ns]").view("int64")',
    "V": "give one column per member of the structure",
}


def imported_module(module: str) -> Any | None:
    """A module that this process has imported completely, else None.

    While one thread imports a module, other threads find it in `sys.modules` half filled.
    """
    candidate = sys.modules.get(module)
    return None if getattr(getattr(candidate, "__spec__", None), "_initializing", False) else candidate


def imported_torch() -> Any | None:
    """The module torch if this process has imported it, else None: then no value can be a tensor."""
    return imported_module("torch")


def dtype_of_torch(dtype: Any, subject: str) -> str:
    """The field dtype of a torch dtype; `SchemaError` if it cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name in ITEM_BYTES:
        return name
    raise SchemaError(f"{subject}: {dtype} cannot be stored; convert it, as by .float(), .dequantize() or .int()")


def torch_dtype(dtype: str, torch: Any) -> Any:
    """The torch dtype of a field dtype; `UsageError` if this version of torch lacks it."""
    matching = getattr(torch, dtype, None)
    if matching is None:
        raise UsageError(f"torch {torch.__version__} has no dtype {dtype}; use .numpy(), or a newer torch")
    return matching


def as_array(tensor: Any, dtype: str) -> np.ndarray[Any, Any]:
    """An array of the field's stored dtype over the memory of a CPU tensor. Copies only a lazily conjugated or negated
    tensor."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if dtype not in NUMPY_DTYPES:
        torch = sys.modules["torch"]
        tensor = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array.view(STORED_DTYPES[dtype])
