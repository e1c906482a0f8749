"""Buffers that bytes from elsewhere are received into, used again and again.

Fresh pages cost several times the copy into pages that a process has already; so a buffer comes back when the last view of
it is collected, and waits for the next column of about its size. Finalizers bring them back, so there is no lock:
the places for all sizes exist from the beginning, and each is a deque.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from transferqueue.limits import ALIGNMENT, GIB, KIB, RECEIVED_KEPT_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.private_pages import array_at

_SMALLEST: Final = 64 * KIB
_STEPS: Final = 4
"""Sizes in each doubling: a buffer is at most a quarter larger than what it holds."""


def _sizes() -> list[int]:
    found, octave = [], _SMALLEST
    while octave < GIB:
        found += [octave + step * octave // _STEPS for step in range(_STEPS)]
        octave *= 2
    return found


class Buffers:
    """Memory on 64-byte boundaries. Safe from any thread, and from finalizers."""

    def __init__(self, kept_bytes: int = RECEIVED_KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._sizes = _sizes()
        self._free: dict[int, deque[U8]] = {size: deque() for size in self._sizes}

    def take(self, nbytes: int) -> U8:
        """``uint8 [nbytes]``, of any content, the caller's for as long as it or a view of it lives."""
        size = next((size for size in self._sizes if size >= nbytes), 0) if nbytes >= _SMALLEST else 0
        raw = self._pop(size) if size else None
        if raw is None:
            raw = np.empty((size or nbytes) + ALIGNMENT, np.uint8)
        address = raw.__array_interface__["data"][0]
        once = [raw]
        back = (lambda: self._back(size, once)) if size else None
        return array_at(address + -address % ALIGNMENT, nbytes, back, owner=raw)

    @property
    def kept(self) -> int:
        """Bytes of buffers that wait for use."""
        return sum(size * len(free) for size, free in self._free.items())

    def _pop(self, size: int) -> U8 | None:
        try:
            return self._free[size].pop()
        except IndexError:
            return None

    def _back(self, size: int, once: list[U8]) -> None:
        """once: the buffer; empty when it was taken back before, by a finalizer that an interrupt stopped."""
        raw = once.pop() if once else None
        if raw is not None and self.kept + size <= self._kept_bytes:
            self._free[size].append(raw)
