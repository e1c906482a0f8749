"""One dtype name, three libraries: what a field's dtype is in numpy's memory, in numpy's and in torch's terms.

Neither torch nor ml_dtypes is imported here before a value of theirs is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import SchemaError, UsageError
from transferqueue.schema import BLOB_DTYPES, ITEM_BYTES, TORCH_ONLY_DTYPES

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<") for name in ITEM_BYTES if name not in BLOB_DTYPES | TORCH_ONLY_DTYPES
}
"""Dtypes that numpy has, little-endian."""

_STORED: Final[dict[str, np.dtype[Any]]] = {
    name: NUMPY_DTYPES.get(name) or np.dtype(f"<u{size}") for name, size in ITEM_BYTES.items()
}


def stored(dtype: str) -> np.dtype[Any]:
    """The numpy dtype whose memory a field of `dtype` has: its own, or unsigned bits where numpy has none."""
    return _STORED[dtype]


def viewed(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that values of a field are shown in; for bf16 and fp8, that of ml_dtypes."""
    if dtype not in TORCH_ONLY_DTYPES:
        return stored(dtype)
    found = ml_dtype(dtype)
    if found is None:
        raise UsageError(
            f"dtype {dtype} does not exist in numpy; use .torch(), .nested() (which .to_padded_tensor(value) pads) or "
            ".list(), or install ml_dtypes"
        )
    return found


@cache
def ml_dtype(dtype: str) -> np.dtype[Any] | None:
    """The ml_dtypes dtype of this name, None if that library (or that dtype in it) is not installed."""
    if importlib.util.find_spec("ml_dtypes") is None:
        return None
    found = getattr(importlib.import_module("ml_dtypes"), dtype, None)
    return None if found is None else np.dtype(found)


def of_numpy(dtype: np.dtype[Any], subject: str) -> str:
    """The field dtype of a numpy dtype (ml_dtypes included); `SchemaError` if it cannot be stored."""
    name = dtype.name
    if name in ITEM_BYTES and name not in BLOB_DTYPES and dtype.names is None:
        return name
    raise SchemaError(f"{subject}: numpy dtype {dtype} cannot be stored; {_REMEDIES.get(dtype.kind, _REMEDY)}")


_REMEDY: Final = "convert it to one of " + ", ".join(name for name in ITEM_BYTES if name not in BLOB_DTYPES)
_REMEDIES: Final = {
    "O": "give a list of arrays, strings, bytes or plain values (dicts, lists) instead of an object array",
    "M": 'convert it to int64, as by .astype("datetime64[ns]").view("int64")',
    "m": 'convert it to int64, as by .astype("timedelta64[ns]").view("int64")',
    "V": "give one column per member of the structure",
}


def loaded(module: str) -> Any | None:
    """A module that this process has imported whole; None before. While one thread imports it, others find a part of it in
    `sys.modules`, which has none of what the module defines later."""
    found = sys.modules.get(module)
    return None if getattr(getattr(found, "__spec__", None), "_initializing", False) else found


def torch_loaded() -> Any | None:
    """The torch module if this process has imported it: no value can be a tensor before."""
    return loaded("torch")


def of_torch(dtype: Any, subject: str) -> str:
    """The field dtype of a torch dtype; `SchemaError` if it cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name in ITEM_BYTES:
        return name
    raise SchemaError(f"{subject}: {dtype} cannot be stored; convert it, as by .float(), .dequantize() or .int()")


def torch_dtype(dtype: str, torch: Any) -> Any:
    """The torch dtype of a field dtype; `UsageError` if this torch has none."""
    found = getattr(torch, dtype, None)
    if found is None:
        raise UsageError(f"torch {torch.__version__} has no dtype {dtype}; use .numpy(), or a newer torch")
    return found


def as_array(tensor: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The memory of a CPU tensor as an array of the field's stored dtype; no bytes are copied unless it is a lazy conjugate."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if dtype not in NUMPY_DTYPES:
        torch = sys.modules["torch"]
        tensor = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array.view(stored(dtype))
