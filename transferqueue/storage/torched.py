"""Memory of a column as a torch tensor: the one place here that imports torch, when a tensor is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from transferqueue.storage.dtypes import NUMPY_DTYPES, torch_dtype


def as_torch(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """A tensor of a field's dtype over the memory of an array of its stored dtype; no bytes are copied."""
    import torch

    if dtype in NUMPY_DTYPES:
        return torch.from_numpy(array)
    kind = torch_dtype(dtype, torch)
    return torch.from_numpy(array.view(np.dtype(f"<i{array.itemsize}")) if array.itemsize > 1 else array).view(kind)
