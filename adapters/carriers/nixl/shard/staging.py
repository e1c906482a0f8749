"""Registered memory beside the arena, into which a shard gathers rows that lie apart, so that a client reads few large
ranges (docs/decisions/one-sided.md).

1. A *slot* has `SLOT_BYTES` and belongs to one frame of one read. The shard fills it before it names it, and nothing
   else writes to it.
2. A slot is free again when the client has acknowledged its frame, or the read is over, however it ended: by a stall,
   the end of the session, or a lost connection. A client that was suspended meanwhile may read other bytes late, which
   do not match their checksum.
3. There are at most `SLOTS_MAX` slots, registered a few at a time when they are first needed, and a read holds at most
   `SLOTS_PER_READ`: a read that holds so many waits for its client, and one that finds none free sends these bytes as
   content.
4. Slots are never deregistered before the end, so they change no generation of the metadata.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from transferqueue.errors import Unreachable
from transferqueue.limits import FRAME_BYTES, KIB
from transferqueue.storage.columns.ranges import Room
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk.protocol import RANGE_BYTES_MIN

_log: Final = logging.getLogger("transferqueue.server")
SLOT_BYTES: Final = 3 * FRAME_BYTES
STAGED_FRAME_BYTES: Final = 7 * FRAME_BYTES // 4
"""A frame ends once so many of its bytes are staged. One gather is at most a quarter longer than `FRAME_BYTES`, so a
frame seldom has two slots."""
SLOTS_MAX: Final = 12
SLOTS_REGISTERED_TOGETHER: Final = 4
"""Slots of one region: each region is another entry of the metadata, which clients load anew."""
SLOTS_PER_READ: Final = 6
"""Enough that some are gathered while the client reads one, and that a client which acknowledges every fourth frame
still does so."""
SLOTS_PER_FRAME: Final = 2
"""A long row that does not fit behind the gathered rows gets the next slot."""
STAGED_BYTES_MIN: Final = 4 * KIB
"""Less that is gathered is content, unless it follows staged bytes; so is less than `RANGE_BYTES_MIN` that lies in the
arena."""


class StagingPool:
    """The slots of one shard. `register` lets peers read this memory. Used by the thread of the bulk endpoint."""

    def __init__(self, register: Callable[[U8], object]) -> None:
        self._register: Final = register
        self._free: list[U8] = []
        self._slots = 0

    @property
    def taken(self) -> int:
        """Slots that reads hold."""
        return self._slots - len(self._free)

    def take(self) -> U8 | None:
        """A slot with arbitrary content; None: there is none free."""
        if not self._free and self._slots < SLOTS_MAX:
            self._grow()
        return self._free.pop() if self._free else None

    def give_back(self, slot: U8) -> None:
        """Free this slot."""
        self._free.append(slot)

    def _grow(self) -> None:
        memory = np.zeros(SLOTS_REGISTERED_TOGETHER * SLOT_BYTES, np.uint8)
        try:
            self._register(memory)
        except Unreachable as error:
            _log.warning("rows that lie apart cross as content of frames: %s", error)
            self._slots = SLOTS_MAX  # and do not try again
            return
        self._slots += SLOTS_REGISTERED_TOGETHER
        self._free += [memory[at : at + SLOT_BYTES] for at in range(0, len(memory), SLOT_BYTES)]


class StagedRead:
    """The staged rows of one read. `room` gives memory for gathered rows that are not staged."""

    def __init__(self, pool: StagingPool, room: Room) -> None:
        self.is_worth_it = False
        """Whether the part that is gathered now is so large that its bytes are staged."""
        self._pool: Final = pool
        self._room: Final = room
        self._slots: list[U8] = []  # of the frame that is being filled, the last one with room
        self._used = 0
        self._frames: deque[list[U8]] = deque()
        self._taken = 0

    @property
    def may_grow(self) -> bool:
        """Whether one more frame may be staged now (rule 3)."""
        return sum(map(len, self._frames)) + SLOTS_PER_FRAME <= SLOTS_PER_READ

    def room(self, nbytes: int) -> U8:
        """Memory for so many bytes that are gathered: staged if `place` is called with it next."""
        reserved = self._reserve(nbytes) if self.is_worth_it and nbytes >= STAGED_BYTES_MIN else None
        return self._room(nbytes) if reserved is None else reserved

    def place(self, piece: U8, *, follows: bool) -> U8 | None:
        """The staged place of this piece; None: it is not staged. Copies it unless it was gathered there. `follows`:
        staged bytes lie right before it."""
        if self._slots and len(piece) <= self._used:
            last = self._slots[-1][self._used - len(piece) : self._used]
            if memory_address(last) == memory_address(piece):
                return last
        if not self.is_worth_it or not (follows or len(piece) >= RANGE_BYTES_MIN):
            return None
        reserved = self._reserve(len(piece))
        if reserved is not None:
            reserved[:] = piece
        return reserved

    def end_frame(self) -> None:
        """The next bytes belong to another frame."""
        self._frames.append(self._slots)
        self._slots, self._used = [], 0

    def took(self, frames: int) -> None:
        """The client has read the first `frames` frames."""
        while self._taken < frames and self._frames:
            self._taken += 1
            self._give_back(self._frames.popleft())

    def end(self) -> None:
        """The read is over. A second call does nothing."""
        self.end_frame()
        while self._frames:
            self._give_back(self._frames.popleft())

    def _reserve(self, nbytes: int) -> U8 | None:
        if nbytes > SLOT_BYTES:
            return None
        if not self._slots or self._used + nbytes > SLOT_BYTES:
            slot = self._pool.take() if len(self._slots) < SLOTS_PER_FRAME else None
            if slot is None:
                return None
            self._slots.append(slot)
            self._used = 0
        self._used += nbytes
        return self._slots[-1][self._used - nbytes : self._used]

    def _give_back(self, slots: list[U8]) -> None:
        while slots:
            self._pool.give_back(slots.pop())
