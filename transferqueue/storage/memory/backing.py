"""The backing of a shard: stores the bytes that its bulk endpoint receives, and reads them for the endpoint.

See docs/decisions/shards.md; `testing.conformance.backings` checks these rules.
1. A backing is an address space of `capacity` bytes. The coordinator allocates it in extents: whole pages, each with an
   id that is never reused. The coordinator decides which extents exist and who may use them
   (`server.shards.remote_shard`, `server.shards.tickets`); a backing only stores bytes.
2. Bytes that were committed read back unchanged until their extent is forgotten. Bytes that arrived and were not
   committed do not count. A repeated write changes nothing.
3. After `forget` returns, the bytes of the extent are not needed, and their memory is free (of an arena: once the pages
   are punched). The same range may be allocated again under another id, with other bytes.
4. If bytes are lost or differ, the backing raises `ShardLost`. It never returns other bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from transferqueue.errors import Disconnected
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.arena import Arena

Reader = Callable[[memoryview], int]
"""Writes the next bytes that arrive to the start of a non-empty memory, and returns how many."""


class Range(NamedTuple):
    """`nbytes` bytes of an extent, from byte `offset` of the backing on."""

    extent: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.nbytes


class IncomingWrite(Protocol):
    """A write in progress. Used by one thread. An abandoned write needs no call."""

    def fill(self, read: Reader) -> int:
        """Let `read` put the next bytes at their destination, and return how many. Does not block."""

    def commit(self, *, last: bool) -> None:
        """Commit the bytes that have arrived; the caller has compared their checksums. With `last`, the write is
        complete, and is stored when this returns.

        May block until the store's own deadline, then `Unreachable`; `OutOfMemory` if the store has no room.
        """


class Backing(Protocol):
    """The bytes of one shard. The thread of the bulk endpoint calls `begin_write` and `read`; the thread that executes
    the coordinator's commands calls the rest."""

    path: str
    """Processes of this host map this file instead of using the endpoint; "": there is none."""
    capacity: int
    """Bytes, in whole pages."""

    def ensure(self, offset: int, nbytes: int) -> None:
        """Reserve room for these bytes, if the store can do that in advance. `OutOfMemory`, with nothing changed, if
        there is none."""

    def punch(self, offset: int, nbytes: int) -> None:
        """These bytes are unused: their room may be freed."""

    def begin_write(self, place: Range) -> IncomingWrite:
        """Begin a write of exactly these bytes. `UsageError` if it overlaps an earlier write and does not repeat it."""

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        """Committed bytes: ``uint8 [nbytes]`` for each range. The caller must not write to them. They are valid until
        their extent is forgotten.

        May block as in `IncomingWrite.commit`. `ShardLost` if bytes are lost for good, `Unreachable` if they may come
        back.
        """

    def forget(self, extent: int) -> None:
        """The bytes of this extent are not needed any more; an unknown extent is ignored. Call it only when no write
        into the extent is in progress."""

    def forget_others(self, extents_to: int, extents: Collection[int]) -> None:
        """Forget all extents with ids below `extents_to` except these."""

    def close(self) -> None:
        """Free what the backing owns. No other method may be called afterwards. A second call does nothing."""


class ArenaBacking:
    """An arena as a backing: bytes are received into it and sent from it without a copy. The caller closes the arena,
    also while this is used: this has a mapping of its own."""

    def __init__(self, arena: Arena) -> None:
        self.path, self.capacity = arena.path, arena.capacity
        self.memory: Final = _view(arena.path, arena.capacity)
        self.arena: Final = arena

    def ensure(self, offset: int, nbytes: int) -> None:
        """See `Arena.ensure`."""
        self.arena.ensure(offset, nbytes)

    def punch(self, offset: int, nbytes: int) -> None:
        """See `Arena.punch`."""
        self.arena.punch(offset, nbytes)

    def begin_write(self, place: Range) -> IncomingWrite:
        """A write straight into the arena."""
        return _InPlace(self.memory[place.offset : place.end])

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        """Views of the arena."""
        return [self.memory[place.offset : place.end] for place in ranges]

    def forget(self, extent: int) -> None:
        """Does nothing: the pages stay until they are allocated again or `punch` frees them, because fresh pages are
        slow."""

    def forget_others(self, extents_to: int, extents: Collection[int]) -> None:
        """Does nothing, as `forget`."""

    def close(self) -> None:
        """Does nothing: the caller closes the arena, and the mapping ends with its last view."""


class _InPlace:
    """A write straight into the arena."""

    __slots__ = ("_left",)

    def __init__(self, memory: U8) -> None:
        self._left = memory.data

    def fill(self, read: Reader) -> int:
        size = read(self._left)
        self._left = self._left[size:]
        return size

    def commit(self, *, last: bool) -> None:
        """Does nothing: the bytes are in place."""


def _view(path: str, capacity: int) -> U8:
    """The whole arena as an array; it is unmapped after the last view was collected."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Disconnected(f"the arena {path} cannot be opened for the bulk endpoint: {error.strerror}") from error
    try:
        return np.frombuffer(mmap.mmap(fd, capacity), np.uint8)
    finally:
        os.close(fd)
