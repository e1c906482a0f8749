"""A pool of receive buffers.

A write into fresh pages costs several times a copy into existing pages. So a buffer returns to the pool when the last
view of it is collected, and serves the next column of about its size. Finalizers return buffers and must take no lock:
the pool has one deque for each size, all made at the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final

import numpy as np

from transferqueue.limits import ALIGNMENT, GIB, KIB, RECEIVED_KEPT_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.private_pages import array_at

SMALLEST_POOLED: Final = 64 * KIB
"""Smaller buffers are not kept."""
_STEPS: Final = 4
"""Sizes per doubling: a new buffer is at most a quarter larger than its content."""
_SIZES_TRIED: Final = 3
"""A free buffer up to one size less than this larger is used too: batches of ragged rows differ in size, and fresh
pages for 8 MiB take 14 ms."""


def _sizes() -> list[int]:
    sizes, octave = [], SMALLEST_POOLED
    while octave < GIB:
        sizes += [octave + step * octave // _STEPS for step in range(_STEPS)]
        octave *= 2
    return sizes


class BufferPool:
    """Buffers on 64-byte boundaries. Safe from any thread, and from finalizers. Free buffers hold at most
    `kept_bytes`."""

    def __init__(self, kept_bytes: int = RECEIVED_KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._sizes = _sizes()
        self._free: dict[int, deque[U8]] = {size: deque() for size in self._sizes}

    def take(self, nbytes: int) -> U8:
        """A buffer ``uint8 [nbytes]`` with arbitrary content. The caller owns it until it and all views of it are
        collected."""
        size, raw = self._free_for(nbytes) if nbytes >= SMALLEST_POOLED else (0, None)
        if raw is None:
            raw = self._fresh((size or nbytes) + ALIGNMENT, pooled=nbytes >= SMALLEST_POOLED)
        address = raw.__array_interface__["data"][0]
        once = [raw]
        give_back = (lambda: self._return(size, once)) if nbytes >= SMALLEST_POOLED else None
        return array_at(address + -address % ALIGNMENT, nbytes, give_back, owner=raw)

    @property
    def kept(self) -> int:
        """Bytes of free buffers."""
        return sum(size * len(free) for size, free in self._free.items())

    def _free_for(self, nbytes: int) -> tuple[int, U8 | None]:
        """The pooled size for this many bytes (0: not pooled), and a free buffer, if there is any."""
        fit = bisect_left(self._sizes, nbytes)
        sizes = self._sizes[fit : fit + _SIZES_TRIED]
        for size in sizes:
            if (raw := self._pop(size)) is not None:
                return size, raw
        return (sizes[0] if sizes else 0), None

    def _pop(self, size: int) -> U8 | None:
        try:
            return self._free[size].pop()
        except IndexError:
            return None

    def _return(self, size: int, once: list[U8]) -> None:
        """Return a buffer to the pool. `once` holds it until then: a finalizer that an interrupt stopped runs again and
        finds it empty."""
        raw = once.pop() if once else None
        if raw is None:
            return
        if size and self.kept + size <= self._kept_bytes:
            self._free[size].append(raw)
        else:
            self._drop(raw)

    def _fresh(self, nbytes: int, *, pooled: bool) -> U8:
        """New memory. `pooled`: it will be returned."""
        return np.empty(nbytes, np.uint8)

    def _drop(self, raw: U8) -> None:
        """A returned buffer that is not kept. Called by finalizers."""
