"""Sources of a column's values: each writes them in one pass into their place in a block.

A source holds no second copy of bulk bytes. It keeps the caller's objects and copies straight from them into shared
memory. The values of a column lie row after row in row-major order, in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np

from transferqueue.limits import KIB
from transferqueue.storage.columns.ranges import copy_ranges
from transferqueue.storage.elements.dtypes import I64, STORED_DTYPES, U8
from transferqueue.storage.elements.torch_interop import as_torch
from transferqueue.storage.memory.parallel_copy import PART_BYTES, Job
from transferqueue.storage.memory.private_pages import array_at

SLICED_BYTES: Final = 2 * KIB
"""Byte strings of at least this mean size are copied one by one; shorter ones are joined first, which is faster."""


class ValueSource(Protocol):
    """Writes the values of a column."""

    def write(self, out: U8) -> None:
        """Fill `out` (``uint8``), which has exactly the size of the values."""

    def jobs(self, out: U8) -> list[Job]:
        """Fill `out` together with the jobs that this returns. The jobs may run in any order and in any threads. By
        default there are none."""
        self.write(out)
        return []

    def memory(self) -> U8 | None:
        """The values where they lie, if that is as they are written. By default None: they lie otherwise."""
        return None


class Arrays(ValueSource):
    """Numpy arrays in order, of the column's stored dtype, with any strides and byte order."""

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]], dtype: str) -> None:
        self.arrays, self.dtype = arrays, dtype

    def write(self, out: U8) -> None:
        """Fill `out`. The copy also swaps bytes and follows strides."""
        into, array = out.view(STORED_DTYPES[self.dtype]), self.arrays[0]
        if len(self.arrays) > 1:
            self._write_several(into)
        elif array.dtype == into.dtype:  # mostly: fewer steps than `copyto`
            into.reshape(array.shape)[...] = array
        else:
            np.copyto(into.reshape(array.shape), array, casting="equiv")

    def _write_several(self, into: np.ndarray[Any, Any]) -> None:
        if self.arrays[0].ndim == 1:
            np.concatenate(self.arrays, out=into, casting="equiv")
        else:
            self._write_each(into)

    def memory(self) -> U8 | None:
        """The values of one contiguous array."""
        array = self.arrays[0]
        if len(self.arrays) > 1 or array.dtype != STORED_DTYPES[self.dtype] or not array.flags.c_contiguous:
            return None
        return array.reshape(-1).view(np.uint8)

    def jobs(self, out: U8) -> list[Job]:
        """Split the copy of one long array. Several arrays are mostly small, and one job copies them."""
        parts = min(-(-out.nbytes // PART_BYTES), len(self.arrays[0])) if len(self.arrays) == 1 else 1
        if parts < 2:
            return [partial(self.write, out)]
        array = self.arrays[0]
        into = out.view(STORED_DTYPES[self.dtype]).reshape(array.shape)
        edges = [len(array) * part // parts for part in range(parts + 1)]
        return [partial(np.copyto, into[low:high], array[low:high], casting="equiv") for low, high in pairwise(edges)]

    def _write_each(self, into: np.ndarray[Any, Any]) -> None:
        at = 0
        for array in self.arrays:
            np.copyto(into[at : at + array.size].reshape(array.shape), array, casting="equiv")
            at += array.size


class DeviceTensors(ValueSource):
    """Torch tensors in order that are on a device. They are packed there and copied once, after what the calling
    thread's stream did to them."""

    def __init__(self, tensors: Sequence[Any], dtype: str) -> None:
        self.tensors, self.dtype = tensors, dtype

    def write(self, out: U8) -> None:
        """Fill `out`. Blocks until the device has copied."""
        from transferqueue.storage.devices.packing import fill

        if not fill(out, self.tensors):
            self._write_each(out)

    def _write_each(self, out: U8) -> None:
        into, at = as_torch(out.view(STORED_DTYPES[self.dtype]), self.dtype), 0
        for tensor in self.tensors:
            size = tensor.numel()
            into[at : at + size].view(tensor.shape).copy_(tensor.detach())
            at += size


class TensorMemory(ValueSource):
    """One-dimensional contiguous CPU tensors in order, read by the addresses of their memory. Keeps the tensors alive.

    This costs 0.2 µs a tensor; a numpy array of a tensor costs 2 µs, and ``torch.cat`` of integers 1 µs.
    """

    def __init__(self, tensors: Sequence[Any], starts: I64, ends: I64) -> None:
        self.tensors, self.starts, self.ends = tensors, starts, ends

    def write(self, out: U8) -> None:
        """Fill `out`."""
        low = int(self.starts.min())
        memory = array_at(low, int(self.ends.max()) - low)
        copy_ranges(memory, self.starts - low, self.ends - low, out)


class ByteStrings(ValueSource):
    """Byte strings in order, of `nbytes` in total."""

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
