"""Checksums of ranges of a shard's memory, kept so that a frame that is sent as stored is not hashed again.

1. A checksum is kept when a frame of a write has arrived whole (its writer computed it), and when a frame was hashed to
   be sent. A read whose frame is exactly that range sends the kept one. So if bytes changed in memory since, the
   receiver detects it; a new checksum would match them.
2. Committed bytes never change, and the number of an extent is never used again. Bytes that were not committed may be
   written again, perhaps in other frames: a write forgets the checksums of all ranges that it touches.
3. Only ranges of at least `DIGESTED_MIN_BYTES` have a checksum here, at most `DIGESTS_MAX` of them. Beyond that all are
   forgotten.

No I/O. Used by one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from transferqueue.limits import FRAME_BYTES, KIB
from transferqueue.storage.memory.backing import Range

DIGESTED_MIN_BYTES: Final = 64 * KIB
"""For fewer bytes a hash costs no more than the look-up."""
DIGESTS_MAX: Final = 1 << 16
"""In frames of 1 MiB these are 64 GiB. They take about 16 MiB of memory."""


class FrameDigests:
    """The known checksums."""

    def __init__(self) -> None:
        self._starts: dict[int, list[int]] = {}  # of each extent, ascending
        self._digests: dict[Range, bytes] = {}
        self._ranges: dict[tuple[int, int], Range] = {}  # by extent and start

    def __len__(self) -> int:
        return len(self._digests)

    def of(self, stretch: Range) -> bytes | None:
        """The checksum of exactly these bytes, if known."""
        return self._digests.get(stretch)

    def remember(self, stretch: Range, digest: bytes) -> None:
        """Keep the checksum of a range of at most `FRAME_BYTES`. It replaces one that begins at the same byte."""
        if stretch.nbytes < DIGESTED_MIN_BYTES:
            return
        if len(self._digests) >= DIGESTS_MAX:
            self.keep_only(lambda _: False)
        key = stretch.extent, stretch.offset
        earlier = self._ranges.get(key)
        if earlier is None:
            starts = self._starts.setdefault(stretch.extent, [])
            starts.insert(bisect_left(starts, stretch.offset), stretch.offset)
        else:
            del self._digests[earlier]
        self._ranges[key] = stretch
        self._digests[stretch] = digest

    def forget(self, place: Range) -> None:
        """A write changes these bytes: forget every range that it touches."""
        starts = self._starts.get(place.extent)
        if starts is None:
            return
        first, last = bisect_left(starts, place.offset - FRAME_BYTES + 1), bisect_left(starts, place.end)
        kept = []
        for start in starts[first:last]:
            if self._ranges[place.extent, start].end > place.offset:
                del self._digests[self._ranges.pop((place.extent, start))]
            else:
                kept.append(start)
        starts[first:last] = kept

    def keep_only(self, lives: Callable[[int], bool]) -> None:
        """Forget the ranges of extents that are gone."""
        for extent in [extent for extent in self._starts if not lives(extent)]:
            for start in self._starts.pop(extent):
                del self._digests[self._ranges.pop((extent, start))]
