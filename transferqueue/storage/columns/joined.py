"""Cuts bytes that lie apart into pieces of one size, and joins each piece in memory of its own, across rows and
columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from transferqueue.limits import KIB
from transferqueue.storage.elements.dtypes import I64, U8

Join = Callable[[Sequence[memoryview]], U8]
"""Copies pieces, in order, into one memory."""


JOINED_BYTES: Final = 256 * KIB
"""Size of a joined piece. What is read, what is written, and what the kernel makes of it when it is sent fit the cache
of a core together, and leave room for the interpreter: with pieces of 1 MiB a read of random rows took 7 % longer, and
the steps between two pieces several times as long."""


RANGES_AT_ONCE: Final = 1024
"""So many ranges are plain numbers at a time, about 100 KiB of them."""


class PieceJoiner:
    """Takes bytes in order, and gives them as pieces of `piece_bytes`. What a call gives must be taken before the next
    call."""

    def __init__(self, join: Join, piece_bytes: int) -> None:
        self._join: Final = join
        self._piece_bytes: Final = piece_bytes
        self._views: list[memoryview] = []
        self._left = piece_bytes

    def add(self, *memories: memoryview) -> Iterator[U8]:
        """The next bytes."""
        for memory in memories:
            rest = memory
            while len(rest) >= self._left:
                self._views.append(rest[: self._left])
                rest = rest[self._left :]
                yield self._joined()
            if len(rest):
                self._views.append(rest)
                self._left -= len(rest)

    def add_ranges(self, memory: memoryview, lows: I64, highs: I64, ends: I64) -> Iterator[U8]:
        """The next bytes: ``memory[lows[i]:highs[i]]`` of all ranges in order. ends: the bytes up to the end of each. A
        few steps for each piece, and one for each range."""
        before = 0
        for at in range(0, len(ends), RANGES_AT_ONCE):
            first, last, until = (each[at : at + RANGES_AT_ONCE].tolist() for each in (lows, highs, ends))
            start, ranges = 0, len(until)
            while start < ranges:
                stop = bisect_right(until, before + self._left, start)  # up to here ranges fit whole
                if stop > start:
                    bounds = zip(first[start:stop], last[start:stop], strict=True)
                    self._views += [memory[low:high] for low, high in bounds]
                    self._left -= until[stop - 1] - before
                    before, start = until[stop - 1], stop
                    if not self._left:
                        yield self._joined()
                if start < ranges and (rest := until[start] - before) > self._left:  # part of a range ends the piece
                    before, end = until[start], last[start]
                    start += 1
                    yield from self.add(memory[end - rest : end])

    def rest(self) -> Iterator[U8]:
        """The last piece, which may be shorter."""
        if self._views:
            yield self._joined()

    def _joined(self) -> U8:
        views, self._views, self._left = self._views, [], self._piece_bytes
        return self._join(views)
