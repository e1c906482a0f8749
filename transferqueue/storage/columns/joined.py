"""Cuts bytes that lie apart into pieces of one size, and joins each piece in memory of its own, across rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from transferqueue.storage.elements.dtypes import I64, U8

Join = Callable[[Sequence[memoryview]], U8]
"""Copies pieces, in order, into one memory."""


class PieceJoiner:
    """Takes bytes in order, and gives them as pieces of `piece_bytes`. What a call gives must be taken before the next call."""

    def __init__(self, join: Join, piece_bytes: int) -> None:
        self._join: Final = join
        self._piece_bytes: Final = piece_bytes
        self._views: list[memoryview] = []
        self._left = piece_bytes

    def add(self, memory: memoryview) -> Iterator[U8]:
        """The next bytes."""
        while len(memory) >= self._left:
            self._views.append(memory[: self._left])
            memory = memory[self._left :]
            yield self._joined()
        if len(memory):
            self._views.append(memory)
            self._left -= len(memory)

    def add_ranges(self, memory: memoryview, lows: I64, highs: I64) -> Iterator[U8]:
        """The next bytes: ``memory[lows[i]:highs[i]]`` of all ranges in order. A few steps for each piece, and one for each range."""
        ends = np.cumsum(highs - lows)
        done, start = 0, 0
        while start < len(ends):
            stop = int(np.searchsorted(ends, done + self._left, side="right"))  # up to here ranges fit whole
            if stop > start:
                first, last = lows[start:stop].tolist(), highs[start:stop].tolist()
                self._views += [memory[low:high] for low, high in zip(first, last, strict=True)]
                self._left -= int(ends[stop - 1]) - done
                done, start = int(ends[stop - 1]), stop
                if not self._left:
                    yield self._joined()
            if start < len(ends) and int(ends[start]) - done > self._left:  # part of a range ends the piece
                end = int(highs[start])
                yield from self.add(memory[end - (int(ends[start]) - done) : end])
                done, start = int(ends[start]), start + 1

    def rest(self) -> Iterator[U8]:
        """The last piece, which may be shorter."""
        if self._views:
            yield self._joined()

    def _joined(self) -> U8:
        views, self._views, self._left = self._views, [], self._piece_bytes
        return self._join(views)
