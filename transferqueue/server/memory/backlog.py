"""How much an arena and its spill disk may hold together, so that each block on the disk can always come back. It only
keeps books.

A block comes back into memory that other blocks leave, and these need space on the disk. So memory and disk keep some
room together that new rows do not take, and new rows do not take the memory that blocks leave.
See docs/decisions/spill.md.

1. Memory and disk together hold no more than can change places. That is the most of: the size of the disk; the memory
   without the share of results; both less two of the largest extents. Beyond two arenas it is only the size of the
   disk: then free memory in pieces hinders nothing.
2. New rows leave the share of results free of that, too.
3. While the spiller makes room for blocks that come back, new rows and results get no memory.
4. If it can make no room, because clients use the memory that these blocks need, results may have some more: those
   clients may need them to finish.
5. While no block is on the disk, none has to come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from transferqueue.limits import LOADS_SHARE, RESULTS_SHARE


class Backlog:
    """The books of one arena of `arena_bytes` and its disk of `disk_bytes`."""

    def __init__(self, arena_bytes: int, disk_bytes: int) -> None:
        self.disk_bytes = disk_bytes
        self.on_disk = 0
        """Bytes of the disk that blocks take."""
        self.growth: Callable[[], int] = lambda: 0
        """How many more bytes the blocks in memory would take on the disk."""
        self.is_held = False
        """Whether the spiller makes room for blocks that come back (rule 3)."""
        self.is_stuck = False
        """Whether blocks must come back, and the spiller can make no room (rule 4)."""
        self.has_refused = False
        """Whether a request was refused memory that it may have once blocks have left the disk. The caller resets
        it."""
        self.largest = arena_bytes // LOADS_SHARE
        """Bytes of the largest extent so far whose blocks may be spilled; at least as many as results may have."""
        self._arena_bytes: Final = arena_bytes

    def admits(self, nbytes: int, in_memory: int, *, rows: bool) -> bool:
        """Whether `nbytes` more, of new rows or of results, fit beside the bytes in memory and on the disk."""
        admitted = not self.on_disk or self.may_have(nbytes, in_memory, rows=rows)
        self.has_refused = self.has_refused or not admitted
        return admitted

    def may_have(self, nbytes: int, in_memory: int, *, rows: bool) -> bool:
        """`admits`, if blocks are spilled for it first."""
        return in_memory + self.growth() + self.on_disk + nbytes <= self._most(nbytes, rows=rows)

    def room_for_rows(self, in_memory: int) -> int:
        """The bytes of new rows that fit beside the bytes in memory and on the disk, if some are spilled."""
        return max(self._most(0, rows=True) - in_memory - self.growth() - self.on_disk, 0)

    def _most(self, nbytes: int, *, rows: bool) -> int:
        """The most bytes in memory and on the disk, with an extent of `nbytes`."""
        arena, disk = self._arena_bytes, self.disk_bytes
        for_results = arena // RESULTS_SHARE
        changing = disk + arena - for_results - 2 * max(self.largest, nbytes)
        usually = max(disk, arena - for_results, min(changing - arena // LOADS_SHARE, 2 * arena))
        if rows:
            return usually - for_results
        return max(usually, changing) if self.is_stuck else usually
