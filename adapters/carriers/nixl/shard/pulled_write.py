"""A write whose bytes the shard reads itself out of its client's registered memory (docs/decisions/one-sided.md). No
I/O but these reads.

The client names ranges with a checksum each, up to a window of frames ahead. The shard reads them into buffers of its
own (`ClientMemory`), at most `PULLS_AHEAD` reads at a time, compares each range, and copies it into the extent under
the lock of its ticket. So neither a late read nor a client that changes its memory meanwhile changes a byte of the
arena.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from transferqueue.adapters.carriers.nixl.shard.client_memory import PULL_BYTES, ClientMemory, ClientRead
from transferqueue.adapters.carriers.nixl.shard.registered_arena import MetadataVersion
from transferqueue.errors import Corruption, ProtocolError, Unreachable
from transferqueue.limits import BULK_SILENCE_S, BULK_WINDOW_FRAMES, FRAME_BYTES
from transferqueue.server.shards.frame_digests import FrameDigests
from transferqueue.server.shards.shard_transfer import SteppedWrite
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.memory.backing import Backing
from transferqueue.transport.bulk import protocol as b

PULLS_AHEAD: Final = 2
"""Reads of one write at a time: the second is read while the first is compared and copied."""


class PulledWrite(SteppedWrite):
    """Reads ranges of a client's memory into an extent. `clients`: the memory of this shard's clients."""

    def __init__(
        self,
        write: b.WriteRanges,
        backing: Backing,
        tickets: TicketIssuer,
        digests: FrameDigests,
        now: float,
        clients: ClientMemory,
    ) -> None:
        super().__init__(write, backing, tickets, digests, now)
        self.check()
        self._clients: Final = clients
        self._version = MetadataVersion(write.agent, write.generation, write.regions)
        self._metadata = write.metadata
        self._is_loaded = False
        self._waiting: deque[b.ByteRange] = deque()
        self._pulls: deque[ClientRead] = deque()
        self._frame_ends: deque[int] = deque()
        self._named = self._taken = 0
        self.moved_at = now
        self.name(0, write.ranges)

    def name(self, number: int, ranges: Sequence[b.ByteRange]) -> None:
        """The client names its next ranges. `Corruption` or `ProtocolError` if they are none of this write."""
        self._window.take(number)
        if len(self._frame_ends) >= BULK_WINDOW_FRAMES:
            raise ProtocolError(f"{len(self._frame_ends)} frames of ranges were named ahead, and that is the most")
        for place in ranges:
            _check_range(place)
        self._named += sum(place.nbytes for place in ranges)
        if self._named > self._range.nbytes:
            raise Corruption(
                f"a bulk write of {self._range.nbytes} bytes names {self._named - self._range.nbytes} more than it "
                "announced"
            )
        self._waiting += ranges
        self._frame_ends.append(self._named)

    def end(self) -> None:
        """Abandon the reads that are under way."""
        self._clients.forgotten(self)
        while self._pulls:
            self._clients.give_up(self._pulls.popleft())

    def step(self, now: float) -> int:
        """Begin reads, and take in one that has ended; returns how many bytes that were. Raises `Disconnected` if the
        write may not go on, `Unreachable` if the client's memory cannot be read, `Corruption` if a checksum does not
        match."""
        self.check()
        if not self.is_busy:
            self.moved_at = now
        self._begin(now)
        if not self._pulls or not self._pulls[0].done():
            self._look(now)
            return 0
        self.moved_at = now
        pull = self._pulls.popleft()
        try:
            self._store(pull)
        finally:
            self._clients.end(pull)
        self._begin(now)
        self._look(now)
        return sum(place.nbytes for place in pull.ranges)

    def acknowledge(self) -> b.FlowAck | None:
        """The acknowledgement of the frames whose last byte is stored, if it is due."""
        before = self._taken
        while self._frame_ends and self._frame_ends[0] <= self._written:
            self._frame_ends.popleft()
            self._taken += 1
        return self.progress() if self._taken > before else None

    def progress(self) -> b.FlowAck:
        """How many frames are stored."""
        return b.FlowAck(self.number, self._taken, self.done)

    def _begin(self, now: float) -> None:
        """Begin as many reads as may be under way."""
        while self._waiting and len(self._pulls) < PULLS_AHEAD and self._load():
            ranges = self._next()
            pull = self._clients.pull(self, self.session, ranges)
            if pull is None:
                return
            for _ in ranges:
                self._waiting.popleft()
            self._pulls.append(pull)
            self.moved_at = now

    def _load(self) -> bool:
        if not self._is_loaded:
            self._is_loaded = self._clients.load(self.session, self._version, self._metadata)
        return self._is_loaded

    def _next(self) -> list[b.ByteRange]:
        """The ranges of the next read."""
        ranges, room = [], PULL_BYTES
        for place in self._waiting:
            if place.nbytes > room:
                break
            ranges.append(place)
            room -= place.nbytes
        return ranges

    def _store(self, pull: ClientRead) -> None:
        """Compare each range, and copy it into the extent."""
        start = 0
        for place in pull.ranges:
            piece = pull.buffer[start : start + place.nbytes].data
            if b.digest((piece,)) != place.digest:
                raise Corruption(
                    f"{place.nbytes} bytes that the shard read from its client's memory do not match their checksum: "
                    "they changed there, or on the way"
                )
            rest = piece
            while len(rest):
                rest = rest[self.fill(b.reader_of(rest)) :]
            self._commit(place.nbytes, place.digest)
            start += place.nbytes

    def _look(self, now: float) -> None:
        self.is_busy = bool(self._waiting or self._pulls)
        if self.is_busy and now - self.moved_at >= BULK_SILENCE_S:
            raise Unreachable(f"no byte of the client's memory could be read for {BULK_SILENCE_S:g} s")


def _check_range(named: b.ByteRange) -> None:
    if not named.address or not 0 < named.nbytes <= FRAME_BYTES:
        raise ProtocolError(
            f"a bulk write names {named.nbytes} bytes at address {named.address}; name 1 to {FRAME_BYTES} bytes of "
            "registered memory"
        )
