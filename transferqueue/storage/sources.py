"""Where the bytes of a column come from, and how they are written in one pass into their place in a block.

A source never holds a second copy of bulk bytes: it keeps what the caller gave and copies straight into shared memory.
Whatever its layout, a column's values lie one row after the other in row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from transferqueue.limits import KIB
from transferqueue.storage.dtypes import as_torch, stored
from transferqueue.storage.pages import U8

SLICED_BYTES: Final = 2 * KIB
"""Byte strings of this mean size are copied one by one; joining shorter ones first is faster than a call for each."""


class Source(Protocol):
    """Writes the values of a column."""

    def write(self, out: U8) -> None:
        """Fill `out`, which has exactly the bytes of the values."""


class Arrays:
    """Numpy arrays one after the other: of any strides and byte order, of the column's stored dtype."""

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]], dtype: str) -> None:
        self.arrays, self.dtype = arrays, dtype

    def write(self, out: U8) -> None:
        """Fill `out`; the copy also swaps bytes and walks strides."""
        into = out.view(stored(self.dtype))
        if len(self.arrays) == 1:
            np.copyto(into.reshape(self.arrays[0].shape), self.arrays[0], casting="equiv")
        elif self.arrays[0].ndim == 1:
            np.concatenate(self.arrays, out=into, casting="equiv")
        else:
            self._write_each(into)

    def _write_each(self, into: np.ndarray[Any, Any]) -> None:
        at = 0
        for array in self.arrays:
            np.copyto(into[at : at + array.size].reshape(array.shape), array, casting="equiv")
            at += array.size


class Tensors:
    """Torch tensors one after the other: of any strides and device, attached to a graph or not."""

    def __init__(self, tensors: Sequence[Any], dtype: str) -> None:
        self.tensors, self.dtype = tensors, dtype

    def write(self, out: U8) -> None:
        """Fill `out`. Tensors on a device are copied from there directly."""
        import torch

        into = as_torch(out.view(stored(self.dtype)), self.dtype)
        with torch.no_grad():
            if len(self.tensors) == 1:
                into.view(self.tensors[0].shape).copy_(self.tensors[0])
            elif self.tensors[0].dim() == 1:
                _concatenate(self.tensors, into, torch)
            else:
                _copy_each(self.tensors, into)


def _concatenate(tensors: Sequence[Any], into: Any, torch: Any) -> None:
    if into.dtype.itemsize == 1 and into.dtype.is_floating_point:  # fp8: torch.cat knows it on few versions
        into, tensors = into.view(torch.uint8), [tensor.view(torch.uint8) for tensor in tensors]
    if all(tensor.is_cpu for tensor in tensors):
        torch.cat(tensors, out=into)
    else:
        _copy_each(tensors, into)


def _copy_each(tensors: Sequence[Any], into: Any) -> None:
    at = 0
    for tensor in tensors:
        size = tensor.numel()
        into[at : at + size].view(tensor.shape).copy_(tensor)
        at += size


class ByteStrings:
    """Byte strings one after the other."""

    def __init__(self, strings: Sequence[bytes | bytearray | memoryview], nbytes: int) -> None:
        self.strings, self.nbytes = strings, nbytes

    def write(self, out: U8) -> None:
        """Fill `out`."""
        into = out.data
        if self.nbytes < SLICED_BYTES * len(self.strings):
            into[:] = b"".join(self.strings)
            return
        at = 0
        for string in self.strings:
            into[at : at + len(string)] = string
            at += len(string)
