"""Torch tensors over the memory of columns, and tensors that have none. Imports torch when a tensor is asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from transferqueue.errors import SchemaError, UsageError
from transferqueue.lazy import install_line
from transferqueue.schema import ITEM_BYTES
from transferqueue.storage.elements.dtypes import I64, NUMPY_DTYPES, torch_dtype


@cache
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


def plain_classes(torch: Any) -> set[type]:
    """Classes whose instances have memory of their own."""
    return {torch.Tensor, torch.nn.Parameter}


def refuse_unstorable(tensor: Any, subject: str) -> None:
    """Raise `SchemaError` for a tensor whose values are not in memory of its own, or not all of them."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        raise SchemaError(f"{subject}: a parameter of a lazy module has no values before its first forward pass")
    if torch._is_functional_tensor(tensor):
        raise SchemaError(f"{subject}: a tensor of torch.func or torch.compile has no memory; give it outside of them")
    if tensor.is_quantized:
        raise SchemaError(
            f"{subject}: a quantised tensor has scales beside its values; give .dequantize() or .int_repr()"
        )
    if tensor.layout is not torch.strided:
        raise SchemaError(
            f"{subject}: a tensor of layout {tensor.layout} is not stored; give .to_dense(), or its parts"
        )
    if tensor.is_meta:
        raise SchemaError(f"{subject}: a meta tensor has no values; give a tensor with memory")
    if hasattr(tensor, "full_tensor"):
        raise SchemaError(f"{subject}: a distributed tensor is spread over ranks; give .full_tensor() or .to_local()")
    if type(tensor) in plain_classes(torch) and tensor.numel():
        _refuse_freed(tensor, subject)


def _refuse_freed(tensor: Any, subject: str) -> None:
    """Refuse a tensor whose storage ends before its last value. torch does not: it would read memory that is no longer
    the tensor's."""
    try:
        storage = tensor.untyped_storage().nbytes()
        strides = tensor.stride()
    except (RuntimeError, NotImplementedError):  # a functional tensor, or a nested one: these are refused elsewhere
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    nbytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if nbytes > storage:
        raise SchemaError(
            f"{subject}: a tensor whose values end at byte {nbytes:,} of a storage of {storage:,}: its memory was "
            "freed, as FSDP does with parameters between their uses; gather it first"
        )
