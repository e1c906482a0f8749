"""A read whose client fetches the bytes itself: the frames name ranges of the arena. No I/O but the registration of memory.

Pieces of at least `RANGE_BYTES_MIN` that lie in the arena are named, with a checksum each; shorter ones, gathered rows and padding are content,
as in any read. Docs/decisions/0044 has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from transferqueue.limits import FRAME_BYTES, PAGE_BYTES
from transferqueue.server.shards.frame_digests import FrameDigests
from transferqueue.server.shards.registered_arena import MetadataVersion, RegionUse, RegisteredArena
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.server.shards.transfers import (
    FrameContent,
    ReadPart,
    ReadTransfer,
    frames_of,
    known_digest,
    parts_of,
)
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import Backing
from transferqueue.transport.bulk import protocol as b

_RANGES_NAMED_MAX: Final = b.RANGES_MAX - FRAME_BYTES // PAGE_BYTES
"""The next piece may be in as many regions as it has pages."""


class RangedRead(ReadTransfer):
    """Names the ranges of the columns that a client asked for. registered: the arena, as the client reaches it."""

    def __init__(
        self,
        read: b.ReadRanges,
        backing: Backing,
        tickets: TicketIssuer,
        digests: FrameDigests,
        now: float,
        registered: RegisteredArena,
    ) -> None:
        self._registered: Final = registered
        self._use: Final = RegionUse()
        self._loaded = MetadataVersion(read.agent, read.generation, read.regions)
        try:
            super().__init__(read, backing, tickets, digests, now)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The regions may be given up."""
        self._registered.end(self._use)

    def _contents(self, read: b.ReadColumns, backing: Backing, digests: FrameDigests) -> Iterator[FrameContent]:
        registered, use = self._registered, self._use  # and not the transfer, which would then hold itself
        parts = parts_of(read, backing, b.RANGE_BYTES_MIN)
        return frames_of(read, parts, lambda: _RangesBuilder(registered, use, digests))

    def _head(self, number: int, content: FrameContent) -> b.ToClient:
        version = self._registered.version
        metadata = b""
        self.named_bytes = sum(each.nbytes for each in content.ranges if each.address)
        if version != self._loaded and any(each.address for each in content.ranges):
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


class _RangesBuilder:
    """A frame of ranges that is being filled. named: bytes of ranges. left: room for content."""

    __slots__ = ("_digests", "_registered", "_use", "begun", "left", "named", "pieces", "ranges")

    def __init__(self, registered: RegisteredArena, use: RegionUse, digests: FrameDigests) -> None:
        self._registered, self._use, self._digests = registered, use, digests
        self.begun: list[b.PartHead] = []
        self.pieces: list[U8] = []
        self.ranges: list[b.ByteRange] = []
        self.left, self.named = FRAME_BYTES, 0

    @property
    def empty(self) -> bool:
        return not self.begun and not self.ranges

    @property
    def full(self) -> bool:
        return (
            not self.left
            or self.named >= b.RANGES_FRAME_BYTES
            or len(self.ranges) >= _RANGES_NAMED_MAX
            or len(self.pieces) == b.PIECES_MAX
        )

    def add(self, part: ReadPart, piece: U8) -> U8:
        if len(piece) >= b.RANGE_BYTES_MIN and part.nbytes >= b.RANGED_PART_BYTES_MIN and self._name(part, piece):
            return piece[len(piece) :]
        taken = piece[: self.left]
        self.pieces.append(taken)
        self.ranges.append(b.ByteRange(0, len(taken)))
        self.left -= len(taken)
        return piece[len(taken) :]

    def _name(self, part: ReadPart, piece: U8) -> bool:
        """Name where this piece lies. False if that is not in the arena."""
        address = int(piece.__array_interface__["data"][0])
        at = 0
        for start, nbytes in self._registered.ranges(address, len(piece), self._use):
            digest = known_digest(part, [piece[at : at + nbytes]], self._digests)
            self.ranges.append(b.ByteRange(start, nbytes, digest))
            at += nbytes
        self.named += at
        return at > 0

    def content(self, part: ReadPart | None, *, last: bool) -> FrameContent:
        pieces = [piece.data for piece in self.pieces]
        return FrameContent(self.begun, pieces, last, b.digest(pieces), tuple(self.ranges))
