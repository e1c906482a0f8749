"""Columns as torch users hold them: dense tensors, jagged tensors, lists of texts and pictures; and back to bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from bench.contenders.base import joined, raw
from bench.workloads import Bytes, Counts, Flat

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


def tensor(flat: Flat) -> Any:
    """The column as a user would hold it."""
    if flat.kind == "text":
        return [str(row, "ascii") for row in _rows(flat)]
    values = torch.from_numpy(flat.values).view(DTYPES[flat.dtype])
    if flat.kind in ("dense", "prompt"):
        return values.reshape(len(flat.counts), *flat.shape)
    if flat.kind == "image" and flat.shapes is not None:
        parts = values.split(flat.counts.tolist())
        return [part.reshape(*shape) for part, shape in zip(parts, flat.shapes.tolist(), strict=True)]
    offsets = torch.from_numpy(flat.offsets // values.element_size())
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _rows(flat: Flat) -> list[bytes]:
    at = flat.offsets
    return [flat.values[start:end].tobytes() for start, end in pairwise(at.tolist())]


def flat_bytes(got: Any) -> tuple[Bytes, Counts]:
    """What was delivered, as bytes and bytes per row."""
    if isinstance(got, torch.Tensor):
        return _nested(got) if got.is_nested else _dense(got)
    if isinstance(got, np.ndarray):
        return raw(got), np.full(len(got), got.nbytes // len(got), np.int64)
    return joined([_row(row) for row in got])


def _row(row: Any) -> Any:
    if isinstance(row, str):
        return row.encode()
    return _as_bytes(row) if isinstance(row, torch.Tensor) else row


def _as_bytes(values: torch.Tensor) -> Bytes:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy()


def _dense(got: torch.Tensor) -> tuple[Bytes, Counts]:
    return _as_bytes(got), np.full(len(got), got.nbytes // len(got), np.int64)


def _nested(got: torch.Tensor) -> tuple[Bytes, Counts]:
    if got.layout is not torch.jagged:
        return joined([_as_bytes(row) for row in got.unbind()])
    step = got.values().element_size() * int(np.prod(got.values().shape[1:], dtype=np.int64))
    return _as_bytes(got.values()), np.diff(got.offsets().numpy()).astype(np.int64) * step
