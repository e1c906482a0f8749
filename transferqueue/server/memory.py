"""Extents of the node's arena, lent to sessions through the ledger."""

from __future__ import annotations

from typing import Final

from transferqueue.errors import Impossible
from transferqueue.limits import PAGE_BYTES
from transferqueue.schema import align
from transferqueue.storage.allocator import Allocator
from transferqueue.storage.arena import Arena

SHARD: Final = 0
"""The only shard of a node on one machine."""
TRIM_AFTER_S: Final = 1.0
"""Freed pages stay warm this long at least: a flow of puts finds them again."""


class Memory:
    """An arena, lent in extents (of which there are `extents` now). An extent is lent only after the file system has promised its
    pages, and is taken back exactly as it was lent. allocator, extents: of what a server before this one has lent."""

    def __init__(self, arena: Arena, allocator: Allocator | None = None, extents: int = 0) -> None:
        self.arena = arena
        self.allocator = allocator or Allocator(arena.capacity)
        self.extents = extents
        self._trim_at: float | None = None

    @property
    def used(self) -> int:
        """Bytes lent."""
        return self.allocator.used

    def next_deadline(self) -> float | None:
        """When `trim` may give pages back to the system."""
        return self._trim_at

    def trim(self, now: float) -> None:
        """Give back pages that have been free for a while, if they are many."""
        if self._trim_at is not None and now >= self._trim_at:
            self._trim_at = None
            self.arena.trim(self.allocator)

    def check(self, nbytes: int) -> None:
        """`Impossible` if an extent of `nbytes` could never be lent."""
        if nbytes > self.allocator.capacity:
            raise Impossible(
                f"{nbytes:,} bytes in one extent can never be granted: the arena has {self.allocator.capacity:,} in all; "
                "write fewer rows at a time, or start the server with a larger --arena-bytes"
            )

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Offset and size of an extent of at least `nbytes`, in whole pages; None if there is no room now."""
        self.check(nbytes)
        nbytes = align(nbytes, PAGE_BYTES)
        offset = self.allocator.allocate(nbytes)
        if offset is None:
            return None
        try:
            self.arena.ensure(offset, nbytes)
        except BaseException:
            self.allocator.free(offset, nbytes)
            raise
        self.extents += 1
        return offset, nbytes

    def give_back(self, offset: int, nbytes: int, now: float) -> None:
        """An extent that `take` lent is free again."""
        self.allocator.free(offset, nbytes)
        self.extents -= 1
        if self._trim_at is None:
            self._trim_at = now + TRIM_AFTER_S

    def explain(self, nbytes: int, holders: str) -> str:
        """Why `nbytes` cannot be granted now."""
        return (
            f"no extent of {nbytes:,} bytes is free: {self.used:,} of {self.allocator.capacity:,} bytes are in use, the "
            f"largest free piece has {self.allocator.largest:,}. Held by {holders}. Consume or drop rows, collect views "
            "that are no longer needed, or start the server with a larger --arena-bytes"
        )
