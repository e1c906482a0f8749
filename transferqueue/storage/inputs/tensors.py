"""Parses torch tensors: dense, nested (jagged), or a list with a tensor for each row."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np

from transferqueue.errors import SchemaError
from transferqueue.errors.text import counted
from transferqueue.schema import ITEM_BYTES
from transferqueue.storage.elements.dtypes import I64, as_array, dtype_of_torch, imported_torch
from transferqueue.storage.elements.torch_interop import plain_classes, refuse_unstorable
from transferqueue.storage.inputs.parsed import DenseInput, Parsed, RaggedInput, only_rank
from transferqueue.storage.inputs.sources import Arrays, DeviceTensors, TensorMemory, ValueSource

LOW_ADDRESS: Final = 1 << 40
"""The memory of a tensor mostly lies above this address. A tensor whose storage was freed begins at 0, or at the offset
of its view: rows with such an address are checked one by one."""


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor. Does not import torch: before that there are no tensors."""
    torch = imported_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def are_tensors(classes: set[type]) -> bool:
    """Whether all instances of these classes are torch tensors."""
    torch = imported_torch()
    return torch is not None and all(issubclass(cls, torch.Tensor) for cls in classes)


def parse_tensor(tensor: Any, subject: str) -> Parsed:
    """Parse one tensor over all rows: strided, or nested with one ragged dimension."""
    if tensor.is_nested:
        return _parse_nested(tensor, subject)
    refuse_unstorable(tensor, subject)
    dtype = dtype_of_torch(tensor.dtype, subject)
    return DenseInput(dtype, tensor.shape[0], tuple(tensor.shape[1:]), _source([tensor], dtype, subject))


def parse_tensors(rows: Sequence[Any], subject: str) -> Parsed:
    """Parse a tensor for each row, all of one dtype and number of dimensions."""
    import torch

    if not set(map(type, rows)) <= plain_classes(torch):
        for row in rows:
            refuse_unstorable(row, subject)
    names = {dtype_of_torch(dtype, subject) for dtype in set(map(attrgetter("dtype"), rows))}
    if len(names) > 1:
        raise SchemaError(f"{subject}: rows of dtypes {', '.join(sorted(names))}; convert them to one dtype")
    dtype = names.pop()
    flat = _parse_flat(rows, dtype, torch)
    if flat is not None:
        return flat
    for row in rows:
        refuse_unstorable(row, subject)
        if row.is_nested:
            raise SchemaError(f"{subject}: a row is a nested tensor; give one nested tensor, or a list of plain ones")
    ndim = only_rank(set(map(torch.Tensor.dim, rows)), subject)
    if ndim == 0:
        return DenseInput(dtype, len(rows), (), _source([row.reshape(1) for row in rows], dtype, subject))
    return RaggedInput(
        dtype, np.array([tuple(row.shape) for row in rows], np.int64).reshape(-1, ndim), _source(rows, dtype, subject)
    )


def _parse_flat(rows: Sequence[Any], dtype: str, torch: Any) -> RaggedInput | None:
    """Parse plain one-dimensional rows, in half a microsecond each. None for other rows, which the caller parses one by
    one."""
    if not set(map(type, rows)) <= plain_classes(torch) or set(map(torch.Tensor.dim, rows)) != {1}:
        return None
    try:
        plain = all(map(attrgetter("is_cpu"), rows)) and all(map(torch.Tensor.is_contiguous, rows))
        if not plain or any(map(torch.Tensor.is_neg, rows)) or (rows[0].is_complex() and any(map(torch.is_conj, rows))):
            return None
        if torch._is_functional_tensor(rows[0]):  # half a microsecond, and rows are of one kind
            return None
        starts = np.fromiter(map(torch.Tensor.data_ptr, rows), np.int64, len(rows))
    except (RuntimeError, NotImplementedError):  # sparse, quantised or functional: these have no such memory
        return None
    lengths = np.fromiter(map(torch.Tensor.numel, rows), np.int64, len(rows))
    filled = lengths > 0
    if starts[filled].min(initial=LOW_ADDRESS) < LOW_ADDRESS:
        return None
    ends = starts + lengths * ITEM_BYTES[dtype]
    return RaggedInput(dtype, lengths.reshape(-1, 1), TensorMemory(rows, starts[filled], ends[filled]))


def _source(tensors: Sequence[Any], dtype: str, subject: str) -> ValueSource:
    if not all(map(attrgetter("is_cpu"), tensors)):
        return DeviceTensors(tensors, dtype)
    try:
        return Arrays([as_array(tensor, dtype) for tensor in tensors], dtype)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"{subject}: a tensor without memory of its own ({error}); give an ordinary one") from error


def _parse_nested(tensor: Any, subject: str) -> Parsed:
    import torch

    if tensor.layout is not torch.jagged or tensor.lengths() is not None or tensor._ragged_idx != 1:
        listed = parse_tensors(tensor.detach().unbind(), subject)
        return (
            RaggedInput(listed.dtype, listed.shapes, listed.source, jagged=True)
            if isinstance(listed, RaggedInput)
            else listed
        )
    values = tensor.values().detach()
    refuse_unstorable(values, subject)
    dtype = dtype_of_torch(values.dtype, subject)
    offsets = tensor.offsets().cpu().numpy().astype(np.int64, copy=False)
    _check_offsets(offsets, len(values), subject)
    shapes = np.empty((len(offsets) - 1, values.dim()), np.int64)
    shapes[:, 0], shapes[:, 1:] = np.diff(offsets), values.shape[1:]
    return RaggedInput(
        dtype, shapes, _source([values[int(offsets[0]) : int(offsets[-1])]], dtype, subject), jagged=True
    )


def _check_offsets(offsets: I64, steps: int, subject: str) -> None:
    """Refuse a nested tensor with bad offsets, which torch does not check."""
    if offsets[0] < 0 or offsets[-1] > steps or (offsets[1:] < offsets[:-1]).any():
        raise SchemaError(
            f"{subject}: a nested tensor whose offsets do not ascend from 0 to its {counted(steps, 'step')} of values; "
            "make it anew, as by torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
