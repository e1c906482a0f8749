"""A read whose client fetches the bytes itself: the frames name ranges of the arena. No I/O but the registration of
memory.

Pieces of at least `RANGE_BYTES_MIN` that lie in the arena are named, with a checksum each. Gathered rows are staged in
registered memory and named there (`staging`), with what follows them; shorter pieces and padding are content, as in any
read. The rules are in docs/decisions/one-sided.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from transferqueue.adapters.carriers.nixl.shard.registered_arena import MetadataVersion, RegionUse, RegisteredArena
from transferqueue.adapters.carriers.nixl.shard.staging import STAGED_FRAME_BYTES, StagedRead
from transferqueue.limits import BULK_STALL_S, FRAME_BYTES, PAGE_BYTES
from transferqueue.server.shards.block_checks import PartCheck
from transferqueue.server.shards.frame_digests import FrameDigests
from transferqueue.server.shards.shard_transfer import (
    FrameContent,
    KnownSums,
    ReadPart,
    ReadTransfer,
    frames_of,
    known_digest,
    parts_of,
)
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.columns.ranges import Room
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import Backing
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk import protocol as b

_RANGES_NAMED_MAX: Final = b.RANGES_MAX - FRAME_BYTES // PAGE_BYTES
"""The next piece may be in as many regions as it has pages."""


class RangedRead(ReadTransfer):
    """Names the ranges of the columns that a client asked for. `registered`: the arena, as the client reaches it."""

    def __init__(
        self,
        read: b.ReadRanges,
        backing: Backing,
        tickets: TicketIssuer,
        sums: KnownSums,
        now: float,
        room: Room,
        registered: RegisteredArena,
    ) -> None:
        self._registered: Final = registered
        self._staged: Final = StagedRead(registered.staging, room)
        self._use: Final = RegionUse()
        self._loaded = MetadataVersion(read.agent, read.generation, read.regions)
        try:
            super().__init__(read, backing, tickets, sums, now, room)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The regions may be deregistered, and the slots reused."""
        self._registered.end(self._use)
        self._staged.end()

    @property
    def deadline(self) -> float:
        """A client that asks again and again, and takes nothing, keeps no slot for ever: it gives a read up after less
        time itself."""
        late = self.taken_at + BULK_STALL_S if self.window.sent > self.window.taken else math.inf
        return min(super().deadline, late)

    @property
    def needs_memory(self) -> bool:
        """Always: its client reads what the frames name."""
        return True

    needs_progress = True

    overdue = f"nothing was heard of it, or none of its frames was taken, for {BULK_STALL_S:g} s"

    @property
    def ready(self) -> bool:
        """Whether a frame may be sent now, and the next one be staged."""
        return super().ready and (self._next is not None or self._staged.may_grow)

    def took(self, frames: int) -> None:
        """See `ReadTransfer`. Their slots may be used again."""
        super().took(frames)
        self._staged.took(frames)

    def _contents(self, read: b.ReadColumns, backing: Backing, sums: KnownSums, room: Room) -> Iterator[FrameContent]:
        registered, use, staged = self._registered, self._use, self._staged  # not the transfer, which would hold itself
        parts = _weighed(parts_of(read, backing, sums.blocks, staged.room, b.RANGE_BYTES_MIN), staged)
        return frames_of(read, parts, lambda: _RangesBuilder(registered, use, sums.digests, staged))

    def _counted_bytes(self, content: FrameContent) -> int:
        """As many as the longest: what counts are the ranges, which stay until they were read."""
        return FRAME_BYTES

    def _head(self, number: int, content: FrameContent) -> b.ToClient:
        version = self._registered.version
        metadata = b""
        self.named_bytes = sum(place.nbytes for place in content.ranges if place.address)
        if version != self._loaded and any(place.address for place in content.ranges):
            metadata, self._loaded = self._registered.metadata(), version
        return b.RangesFrame(
            self.number,
            number,
            content.begun,
            content.last,
            list(content.ranges),
            version.agent,
            version.generation,
            version.regions,
            metadata,
        )


def _weighed(parts: Iterator[ReadPart], staged: StagedRead) -> Iterator[ReadPart]:
    """The parts, each after it was decided whether its gathered bytes are staged."""
    for part in parts:
        staged.is_worth_it = part.nbytes >= b.RANGED_PART_BYTES_MIN
        yield part


class _StagedRun:
    """Consecutive staged bytes of one part, the range at this place of its frame. `memory` has all of them."""

    __slots__ = ("memory", "part", "place")

    def __init__(self, part: ReadPart, place: int, memory: list[U8]) -> None:
        self.part, self.place, self.memory = part, place, memory

    @property
    def end(self) -> int:
        return memory_address(self.memory[-1]) + len(self.memory[-1])


class _RangesBuilder:
    """A frame of ranges that is being filled. `named`: bytes of ranges. `left`: room for content."""

    __slots__ = (
        "_digests",
        "_registered",
        "_runs",
        "_staged",
        "_staged_bytes",
        "_use",
        "begun",
        "left",
        "named",
        "pieces",
        "ranges",
    )

    def __init__(self, registered: RegisteredArena, use: RegionUse, digests: FrameDigests, staged: StagedRead) -> None:
        self._registered, self._use, self._digests, self._staged = registered, use, digests, staged
        self.begun: list[b.PartHead] = []
        self.pieces: list[U8] = []
        self.ranges: list[b.ByteRange] = []
        self._runs: list[_StagedRun] = []
        self.left, self.named, self._staged_bytes = FRAME_BYTES, 0, 0

    @property
    def empty(self) -> bool:
        return not self.begun and not self.ranges

    @property
    def full(self) -> bool:
        return (
            not self.left
            or self.named >= b.RANGES_FRAME_BYTES
            or self._staged_bytes >= STAGED_FRAME_BYTES
            or len(self.ranges) >= _RANGES_NAMED_MAX
            or len(self.pieces) == b.PIECES_MAX
        )

    def add(self, part: ReadPart, piece: U8) -> U8:
        if len(piece) >= b.RANGE_BYTES_MIN and part.nbytes >= b.RANGED_PART_BYTES_MIN and self._name(part, piece):
            return piece[len(piece) :]
        run = self._runs[-1] if self._runs else None
        if run is not None and (run.part is not part or run.place != len(self.ranges) - 1):
            run = None
        staged = self._staged.place(piece, follows=run is not None)
        if staged is not None:
            self._name_staged(part, staged, run)
            return piece[len(piece) :]
        taken = piece[: self.left]
        self.pieces.append(taken)
        self.ranges.append(b.ByteRange(0, len(taken)))
        self.left -= len(taken)
        return piece[len(taken) :]

    def _name(self, part: ReadPart, piece: U8) -> bool:
        """Name where this piece lies. False if that is not in the arena."""
        at = 0
        for start, nbytes in self._registered.ranges(memory_address(piece), len(piece), self._use):
            digest = known_digest(part, [piece[at : at + nbytes]], self._digests)
            self.ranges.append(b.ByteRange(start, nbytes, digest))
            at += nbytes
        self.named += at
        return at > 0

    def _name_staged(self, part: ReadPart, memory: U8, run: _StagedRun | None) -> None:
        """Name staged bytes. They may follow those of `run`."""
        if run is not None and run.end == memory_address(memory):
            run.memory.append(memory)
        else:
            self._runs.append(_StagedRun(part, len(self.ranges), [memory]))
            self.ranges.append(b.ByteRange(memory_address(memory), 0))
        self._staged_bytes += len(memory)

    def content(self, part: ReadPart | None, compare: tuple[PartCheck, ...], *, last: bool) -> FrameContent:
        for run in self._runs:
            digest = b.digest([memory.data for memory in run.memory])
            self.ranges[run.place] = b.ByteRange(memory_address(run.memory[0]), sum(map(len, run.memory)), digest)
        self._staged.end_frame()
        pieces = [piece.data for piece in self.pieces]
        return FrameContent(self.begun, pieces, last, b.digest(pieces), tuple(self.ranges), compare)
