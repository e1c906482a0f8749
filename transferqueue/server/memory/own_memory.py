"""Extents of the coordinator's own arena."""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np

from transferqueue.errors import Impossible
from transferqueue.limits import ARENA_STEP_BYTES, DEVICE_IDLE_S, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.server.memory.backlog import Backlog
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena

SHARD: Final = 0
"""The coordinator's own shard."""
GROWING: Final = 0.0
"""`OwnShardMemory.due_at` while pages are reserved ahead of use."""
TRIM_AFTER_S: Final = 1.0
"""Freed pages stay in memory for at least this long, so that a steady flow of puts reuses them."""


def check_size(nbytes: int, allocator: Allocator) -> None:
    """`Impossible` if this arena could never grant an extent of `nbytes`."""
    if nbytes > allocator.capacity:
        raise Impossible(
            f"{nbytes:,} bytes in one extent can never be granted: the arena has {allocator.capacity:,} in all; "
            "write fewer rows at a time, or start the server with a larger --arena-bytes"
        )


class OwnShardMemory:
    """An arena from which extents are granted; `extents` counts them. An extent is granted only after the file system
    reserved its pages, and is freed whole. `allocator` and `extents` may come from an earlier run of the server."""

    number: Final = SHARD

    def __init__(self, arena: Arena, allocator: Allocator | None = None, extents: int = 0) -> None:
        self.arena = arena
        self.allocator = allocator or Allocator(arena.capacity)
        self.extents = extents
        self.due_at: float | None = None
        """When to call `trim` next: at once (0) while pages are reserved ahead; None: nothing is due."""
        self.backlog: Backlog | None = None
        """The books of arena and spill disk together; None: no disk."""
        self.grows_ahead = True
        """Whether pages are reserved ahead of use. They are not while their disk is full."""
        self._trim_at: float | None = None
        self._ahead_from = self._ahead_to = 0
        self._refusal = ""
        """Why the file system reserved no pages for the last extent; "" if it did."""

    @property
    def used(self) -> int:
        """The granted bytes."""
        return self.allocator.used

    @property
    def grantable(self) -> int:
        """The most bytes that it can grant."""
        return self.allocator.capacity

    def mapped(self, protection: int) -> U8:
        """Map the arena for another thread. It is unmapped when the last view of it is collected."""
        fd = os.open(self.arena.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return np.frombuffer(mmap.mmap(fd, self.arena.capacity, mmap.MAP_SHARED, protection), np.uint8)
        finally:
            os.close(fd)

    def trim(self, now: float) -> None:
        """Reserve a few pages ahead of use, or give back pages that were free for a while, if there are many."""
        if self.due_at == GROWING:
            if not (self.grows_ahead and self.arena.grow(self._ahead_from, self._ahead_to)):
                self.due_at = self._trim_at
        elif self._trim_at is not None and now >= self._trim_at:
            self.arena.trim(self.allocator)
            self._trim_at = self.due_at = now + DEVICE_IDLE_S if self.arena.held else None

    def check(self, nbytes: int) -> None:
        """`Impossible` if an extent of `nbytes` could never be granted."""
        check_size(nbytes, self.allocator)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Take an extent of at least `nbytes` in whole pages. Returns offset and size; None if there is no room now.
        `OutOfMemory` if the file system has no pages for it."""
        self.check(nbytes)
        nbytes = align(nbytes, PAGE_BYTES)
        offset = self.allocator.allocate(nbytes)
        if offset is None:
            return None
        backed = self.arena.backed
        try:
            self.arena.ensure(offset, nbytes)
        except BaseException as error:
            self.allocator.free(offset, nbytes)
            self._refusal = str(error)
            raise
        self._refusal = ""
        self.extents += 1
        self._look_ahead(offset + nbytes, fresh=self.arena.backed > backed)
        return offset, nbytes

    def _look_ahead(self, end: int, *, fresh: bool) -> None:
        """Reserve the pages behind an extent that is granted for the first time: they are needed next."""
        if self.grows_ahead and (fresh or end > self._ahead_to - ARENA_STEP_BYTES // 2):
            self._ahead_from, self._ahead_to = end, min(end + ARENA_STEP_BYTES, self.arena.capacity)
            self.due_at = GROWING

    def give_back(self, offset: int, nbytes: int, now: float) -> None:
        """Free an extent that `take` returned."""
        self.allocator.free(offset, nbytes)
        self.extents -= 1
        if self._trim_at is None:
            self._trim_at = now + TRIM_AFTER_S
        if self.due_at is None:
            self.due_at = self._trim_at

    def explain(self, nbytes: int, holders: str) -> str:
        """Why `nbytes` cannot be granted now."""
        if self._refusal:
            return f"{self._refusal}. Bytes that are in use are held by {holders}"
        return (
            f"no extent of {nbytes:,} bytes is free: {self.used:,} of {self.allocator.capacity:,} bytes are in use, "
            f"the largest free piece has {self.allocator.largest:,}. Held by {holders}. Consume or drop rows, collect "
            "views that are no longer needed, or start the server with a larger --arena-bytes"
        )
