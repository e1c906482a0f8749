"""Torch tensors over the memory of columns. Imports torch when the first tensor is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.lazy import install_line
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
            f"{module} is not installed here, and tensors were asked for: {install_line('torch')}, or ask "
            "for .numpy(), .ragged(), .arrow() or .list()"
        ) from error


def as_torch(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """A tensor of a field's dtype over the memory of an array of its stored dtype. Copies no bytes."""
    torch = require_torch("torch")
    if dtype in NUMPY_DTYPES:
        return torch.from_numpy(array)
    kind, bits = torch_dtype(dtype, torch), np.dtype(f"<i{ITEM_BYTES[dtype]}")
    return torch.from_numpy(array.view(bits) if bits.itemsize > 1 else array).view(kind)


def as_jagged(values: Any, offsets: I64) -> Any:
    """A jagged nested tensor over `values`, a tensor ``[steps, ...]``, with `offsets` int64 ``[rows + 1]``. Copies no
    bytes.

    It knows its shortest and longest row: torch computes neither when it pads, and would pad to the length of all rows
    together.
    """
    torch = require_torch("torch")
    if len(offsets) == 1:
        return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))
    lengths = offsets[1:] - offsets[:-1]  # as np.diff, in a tenth of the time: a batch may have hundreds of columns
    shortest, longest = int(np.minimum.reduce(lengths)), int(np.maximum.reduce(lengths))
    return torch.nested.nested_tensor_from_jagged(
        values, torch.from_numpy(offsets), min_seqlen=shortest, max_seqlen=longest
    )
