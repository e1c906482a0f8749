"""What lies behind a bulk endpoint: where bytes that arrive are kept, and come from when they are asked for.

The law (docs/decisions/0025), which `testing.conformance.backings` checks:

1. A backing is a line of `capacity` bytes. They are lent in extents: whole pages, each with a number that is never given again.
   Where bytes are lent, to whom, and who may touch them is decided elsewhere (`server.further`, `server.tickets`); a backing only
   keeps them.
2. What was settled is read again to the byte until its extent is forgotten. What arrived and was not
   settled counts for nothing. A write that comes twice changes nothing.
3. What is forgotten is needed by nobody when `forget` returns; its memory is free, of an arena once its pages are punched. The
   same place of the line may be lent again under another number, and has what is written there then.
4. If bytes are gone or are not what they were, that is told (`ShardLost`). Other bytes are never given.
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
"""Puts the next bytes that arrive at the beginning of some memory, which is not empty; how many it were."""


class Range(NamedTuple):
    """Bytes of an extent: `nbytes` from byte `offset` of the line on."""

    extent: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte behind the last."""
        return self.offset + self.nbytes


class IncomingWrite(Protocol):
    """One write under way. Used by one thread; nothing has to be done with one that is given up."""

    def fill(self, read: Reader) -> int:
        """Have the next bytes put where they belong; how many it were. Does not wait."""

    def settle(self, *, last: bool) -> None:
        """All that has arrived so far matches its checksums; `last`: and is all. It is kept once the call with `last` has returned.

        May wait for the store behind it, by whose own deadline it ends: `Unreachable`; `OutOfMemory` where that has no room.
        """


class Backing(Protocol):
    """The bytes of one shard. `landing` and `read` are one thread's, the bulk endpoint's; the rest another's, which takes orders."""

    path: str
    """Where processes of this host map all of it, so that no byte passes the endpoint; "": nobody can."""
    capacity: int
    """Bytes, in whole pages."""

    def ensure(self, offset: int, nbytes: int) -> None:
        """Make room for these bytes, as far as that can be done ahead. `OutOfMemory`: there is none, and nothing was changed."""

    def punch(self, offset: int, nbytes: int) -> None:
        """Nobody needs these bytes now; the room for them may go."""

    def landing(self, place: Range) -> IncomingWrite:
        """A write of exactly these bytes begins. `UsageError` where it crosses what was written before and is not the same again."""

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        """Bytes that were settled, ``uint8 [nbytes]`` of each range. Not to be written to, and good as long as they are held, or
        until their extent is forgotten.

        May wait, as `IncomingWrite.settle`. `ShardLost` if some are gone for good, `Unreachable` if they may come back.
        """

    def forget(self, extent: int) -> None:
        """Nothing of this extent is needed any more. One that is not known: nothing. To be called when no landing in it is
        filled or settled any more."""

    def keep(self, extents_to: int, extents: Collection[int]) -> None:
        """Of all extents below `extents_to` only these are needed: as `forget` of all others."""

    def close(self) -> None:
        """Give up what is kept, as far as it is the backing's own. Nothing may be asked of it any more. Again: nothing."""


class ArenaBacking:
    """An arena as a backing: bytes arrive where they stay, and leave from there. The arena remains its maker's to close, and
    may be closed while this is used: the mapping here is one of its own."""

    def __init__(self, arena: Arena) -> None:
        self.path, self.capacity = arena.path, arena.capacity
        self.memory: Final = _view(arena.path, arena.capacity)
        self._arena: Final = arena

    def ensure(self, offset: int, nbytes: int) -> None:
        """See `Arena.ensure`."""
        self._arena.ensure(offset, nbytes)

    def punch(self, offset: int, nbytes: int) -> None:
        """See `Arena.punch`."""
        self._arena.punch(offset, nbytes)

    def landing(self, place: Range) -> IncomingWrite:
        """Straight into the arena."""
        return _InPlace(self.memory[place.offset : place.end])

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        """Views of the arena."""
        return [self.memory[one.offset : one.end] for one in ranges]

    def forget(self, extent: int) -> None:
        """The pages stay until they are lent again or `punch` takes them: fresh ones are dear."""

    def keep(self, extents_to: int, extents: Collection[int]) -> None:
        """As `forget`."""

    def close(self) -> None:
        """The arena is its maker's; the mapping goes with the last view of it."""


class _InPlace:
    """Bytes that arrive where they stay."""

    __slots__ = ("_left",)

    def __init__(self, memory: U8) -> None:
        self._left = memory.data

    def fill(self, read: Reader) -> int:
        size = read(self._left)
        self._left = self._left[size:]
        return size

    def settle(self, *, last: bool) -> None:
        """They are where they stay."""


def _view(path: str, capacity: int) -> U8:
    """The whole arena, as memory that is unmapped with the last piece of it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Disconnected(f"the arena {path} cannot be opened for the bulk endpoint: {error.strerror}") from error
    try:
        return np.frombuffer(mmap.mmap(fd, capacity), np.uint8)
    finally:
        os.close(fd)
