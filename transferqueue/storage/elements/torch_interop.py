"""Torch tensors over the memory of columns. Imports torch when the first tensor is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, cast

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.schema import ITEM_BYTES
from transferqueue.storage.elements.dtypes import I64, NUMPY_DTYPES, torch_dtype


def require_torch(module: str) -> Any:
    """The module torch or tensordict; `UsageError` if it is not installed. The queue itself needs neither."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UsageError(
            f"{module} is not installed here, and tensors were asked for: pip install 'asyncflow-transferqueue[torch]', or ask "
            "for .numpy(), .ragged(), .arrow() or .list()"
        ) from error


def as_torch(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """A tensor of a field's dtype over the memory of an array of its stored dtype. Copies no bytes."""
    return _maker(dtype)(array)


def as_jagged(values: Any, offsets: I64) -> Any:
    """A jagged nested tensor over `values`, a tensor ``[steps, ...]``. offsets: int64 ``[rows + 1]``. Copies no bytes.

    It knows its shortest and longest row: torch computes neither when it pads, and would pad to the length of all rows together.
    """
    torch, lengths = require_torch("torch"), np.diff(offsets)
    ends = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets), **ends)


@cache
def _maker(dtype: str) -> Callable[[np.ndarray[Any, Any]], Any]:
    """Cached for each dtype: the import statement alone costs a third of making a tensor."""
    torch = require_torch("torch")
    if dtype in NUMPY_DTYPES:
        return cast("Callable[[np.ndarray[Any, Any]], Any]", torch.from_numpy)
    kind, bits = torch_dtype(dtype, torch), np.dtype(f"<i{ITEM_BYTES[dtype]}")
    return lambda array: torch.from_numpy(array.view(bits) if bits.itemsize > 1 else array).view(kind)
