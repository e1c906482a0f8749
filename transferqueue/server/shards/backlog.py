"""How much an arena and the disk to which it spills may hold together, so that whatever is on the disk can always come
back. It only keeps books.

A block comes back into memory that others leave, and these need space on the disk. So both together have some room that
nothing new takes, and the memory that blocks leave goes to nothing new. The rules (docs/decisions/spill.md):

1. Memory and disk together hold no more than can change places: what fits on the disk; or what fits in memory, without
   the share of results; or both less two of the largest extents. Whichever is most, but beyond two arenas only what
   fits on the disk: then free memory in pieces hinders nothing.
2. New rows leave the share of results free of that, too.
3. While something is done that makes room for blocks that come back, new rows and results get no memory.
4. If nothing can be done, since somebody uses the memory that these blocks need, results may have some more: whoever
   uses that memory may need them to finish.
5. While nothing is on the disk, nothing has to come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from transferqueue.limits import LOADS_SHARE, RESULTS_SHARE


class Backlog:
    """The books of one arena. arena_bytes, disk_bytes: how large it and its disk are."""

    def __init__(self, arena_bytes: int, disk_bytes: int) -> None:
        self.disk_bytes = disk_bytes
        self.on_disk = 0
        """Bytes of the disk that blocks take."""
        self.growth: Callable[[], int] = lambda: 0
        """How many bytes more the blocks in memory would take on the disk."""
        self.is_held = False
        """Whether something is done that makes room for blocks that come back (rule 3)."""
        self.is_stuck = False
        """Whether blocks are to come back, and nothing can be done about it (rule 4)."""
        self.has_refused = False
        """Whether somebody was refused memory since the caller set this to False, who may have it when blocks have left
        the disk."""
        self.largest = arena_bytes // LOADS_SHARE
        """Bytes of the largest extent so far whose blocks may be spilled, and no fewer than results may have."""
        self._arena_bytes: Final = arena_bytes

    def admits(self, nbytes: int, in_memory: int, *, rows: bool) -> bool:
        """Whether there may be so many bytes more, of new rows or of results, beside those in memory and on the
        disk."""
        admitted = not self.on_disk or self.may_have(nbytes, in_memory, rows=rows)
        self.has_refused = self.has_refused or not admitted
        return admitted

    def may_have(self, nbytes: int, in_memory: int, *, rows: bool) -> bool:
        """`admits`, if blocks must leave for it first."""
        return in_memory + self.growth() + self.on_disk + nbytes <= self._most(nbytes, rows=rows)

    def room_for_rows(self, in_memory: int) -> int:
        """The bytes of new rows that there may be beside those in memory and on the disk, if some go to the disk."""
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
