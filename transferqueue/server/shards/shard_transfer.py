"""The two kinds of transfer of the bulk protocol, at the shard: rows gathered into frames, and frames written into an
extent. No I/O."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np

from transferqueue.errors import Corruption, NotFound, ProtocolError
from transferqueue.limits import BULK_STALL_S, FIELDS_MAX, FRAME_BYTES, PARTS_MAX
from transferqueue.schema import Field, Slice, known, layout, sliced_field
from transferqueue.server.shards.block_checks import BACKLOG_BYTES_MAX, BlockChecks, PartCheck
from transferqueue.server.shards.frame_digests import DIGESTED_MIN_BYTES, FrameDigests
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.columns.byte_stream import column_stream, sliced_column_stream
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.columns.ranges import Room
from transferqueue.storage.columns.slicing import slice_span
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import Backing, Range
from transferqueue.storage.memory.checksum import UNCHECKED
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire.messages import BlockLocation


class FrameContent(NamedTuple):
    """A frame that has not been sent yet.

    Args:
        digest: of its pieces in order.
        ranges: of a read of ranges, see `b.RangesFrame`.
        compare: the comparisons of the parts that end with it.
    """

    begun: list[b.PartHead]
    pieces: list[memoryview]
    last: bool
    digest: bytes
    ranges: tuple[b.ByteRange, ...] = ()
    compare: tuple[PartCheck, ...] = ()


class KnownSums(NamedTuple):
    """Checksums that a shard knows of its memory."""

    digests: FrameDigests
    blocks: BlockChecks


class ShardTransfer:
    """The common part of both kinds. `heard_at`: when the last frame of its peer arrived."""

    def __init__(self, number: int, session: int, extents: frozenset[int], tickets: TicketIssuer, now: float) -> None:
        self.number: Final = number
        self.session: Final = session
        self.heard_at = now
        self._extents = extents
        self._tickets = tickets
        self._checked_at = -1

    @property
    def needs_memory(self) -> bool:
        """Whether it, or its peer, will read or write bytes of its extents. If not, the extents may be freed."""
        return True

    @property
    def has_shown_tickets(self) -> bool:
        """Whether the transfer has any tickets. A read of no block has none."""
        return bool(self._extents)

    @property
    def deadline(self) -> float:
        """The time at which the transfer ends if nothing moves."""
        return self.heard_at + BULK_STALL_S

    overdue: str = f"its peer was silent for {BULK_STALL_S:g} s"
    """The reason if it ends at its deadline."""

    def end(self) -> None:
        """The transfer is over, however it ended. Called once."""

    def check(self) -> None:
        """`Disconnected` if the session ended, or an extent of the transfer was freed."""
        revoked = self._tickets.revoked
        if revoked != self._checked_at:
            self._tickets.check_live(self.session, self._extents)
            self._checked_at = revoked


class ReadTransfer(ShardTransfer):
    """Sends the columns that a client asked for. Gathers only one frame ahead."""

    def __init__(
        self,
        read: b.ReadColumns,
        backing: Backing,
        tickets: TicketIssuer,
        sums: KnownSums,
        now: float,
        room: Room,
    ) -> None:
        named = [at for part in read.parts for at in part.blocks]
        tickets.check_read(read.session, read.shard, named)
        super().__init__(read.transfer, read.session, frozenset(at.extent for at in named), tickets, now)
        self.check()
        self.window: Final = b.SendWindow()
        self._frames = self._contents(read, backing, sums, room)
        self._next: FrameContent | None = None
        self._checks = deque[PartCheck]()
        self._ended = False
        self.taken_at = now
        """When the receiver last took a frame, or had taken all but the last one."""
        self.prepare()

    def _contents(self, read: b.ReadColumns, backing: Backing, sums: KnownSums, room: Room) -> Iterator[FrameContent]:
        parts = parts_of(read, backing, sums.blocks, room)
        return frames_of(read, parts, partial(_Frame, sums.digests))

    def _head(self, number: int, content: FrameContent) -> b.ToClient:
        return b.ReadFrame(self.number, number, content.begun, last=content.last)

    def _counted_bytes(self, content: FrameContent) -> int:
        """The bytes that the frame counts in the window."""
        return sum(map(len, content.pieces))

    @property
    def needs_memory(self) -> bool:
        """Whether frames are left to send. Often the rows are acked and freed before the last acknowledgement comes."""
        return not self._ended

    named_bytes = 0
    """Bytes of the ranges in the last frame."""
    needs_progress = False
    """Whether its client needs `ShardCarrier.progress` while it reads."""

    @property
    def ready(self) -> bool:
        """Whether there is work now: a frame may be sent, or blocks must be compared."""
        return not self._ended and (self.window.open or bool(self._checks))

    @property
    def done(self) -> bool:
        """Whether the receiver has confirmed all frames."""
        return self._ended and self.window.taken == self.window.sent

    def took(self, frames: int) -> None:
        """The receiver has acknowledged the first `frames` frames. Raises as `SendWindow.took`."""
        self.window.took(frames)

    def prepare(self) -> None:
        """Gather the next frame and compute its checksum, unless that is done or there is none, while an earlier one is
        sent. Compare some bytes of blocks. Raises as `frame`."""
        if self._next is None and not self._ended:
            self._next = next(self._frames)
            for check in self._next.compare:
                check.begin()
                self._checks.append(check)
        try:
            if self._checks and self._checks[0].step():
                self._checks.popleft()
        except Corruption:
            self.check()  # the memory may have been granted to others
            raise

    def frame(self) -> b.Message | None:
        """The next frame; None: none may be sent yet. Raises as `check` and `Backing.read`, and `Corruption` for a
        damaged block."""
        if self._ended:
            raise ProtocolError("a bulk read has no frame after its last one")
        if self._next is None or self._checks:
            self.prepare()
        content = self._next
        if content is None or not self.window.open or (self._checks and (content.last or self._lags)):
            return None
        head = self._head(self.window.send(self._counted_bytes(content)), content)
        self.check()  # after the checksum: the bytes were not granted to another session meanwhile
        self._next, self._ended = None, content.last
        return b.message(head, content.pieces, content.digest)

    @property
    def _lags(self) -> bool:
        return sum(check.nbytes for check in self._checks) >= BACKLOG_BYTES_MAX


class ExtentTransfer(ShardTransfer):
    """Writes bytes into an extent, in order. The common part of both kinds of write."""

    def __init__(
        self, write: b.ExtentWrite, backing: Backing, tickets: TicketIssuer, digests: FrameDigests, now: float
    ) -> None:
        tickets.check_write(write)
        if write.offset + write.nbytes > backing.capacity:
            raise Corruption(f"extent {write.extent} ends beyond the arena's {backing.capacity} bytes")
        super().__init__(write.transfer, write.session, frozenset((write.extent,)), tickets, now)
        self._window = b.ReceiveWindow()
        self._range: Final = Range(write.extent, write.at, write.total)
        self._write: Final = backing.begin_write(self._range)
        self._written = 0
        self._digests: Final = digests
        digests.forget(self._range)

    @property
    def done(self) -> bool:
        """Whether every byte has arrived."""
        return self._written == self._range.nbytes

    def overlaps(self, other: ExtentTransfer) -> bool:
        """Whether both write a common byte."""
        return self._range.offset < other._range.end and other._range.offset < self._range.end

    def fill(self, read: b.Reader) -> int:
        """Write the next bytes; returns how many. `Disconnected` if they may not be written any more."""
        with self._tickets.writing(self.session, self._extents):
            size = self._write.fill(read)
        self._written += size
        return size

    def _commit(self, nbytes: int, digest: bytes) -> None:
        """Commit the last `nbytes` bytes, whose checksum `digest` matched. Raises as `fill` and
        `IncomingWrite.commit`."""
        with self._tickets.writing(self.session, self._extents):
            self._write.commit(last=self.done)
        start = self._range.offset + self._written - nbytes
        self._digests.remember(Range(self._range.extent, start, nbytes), digest)

    def progress(self) -> b.FlowAck:
        """The acknowledgement of the bytes that have arrived."""
        return b.FlowAck(self.number, self._window.taken, self.done)


class WriteTransfer(ExtentTransfer):
    """Receives frames for an extent."""

    def expect(self, number: int, nbytes: int) -> None:
        """A frame begins. `Corruption` if it is not the next one, or exceeds the announced size."""
        self._window.take(number)
        more = self._written + nbytes - self._range.nbytes
        if more > 0:
            raise Corruption(f"a bulk write of {self._range.nbytes} bytes has {more} more than it announced")

    def frame_complete(self, nbytes: int, digest: bytes) -> b.FlowAck | None:
        """A frame of `nbytes` bytes is complete, with this checksum. Returns the acknowledgement, if one is due. Raises
        as `fill` and `IncomingWrite.commit`."""
        self._commit(nbytes, digest)
        return self.progress() if self._window.due(last=self.done) else None


class SteppedWrite(ExtentTransfer):
    """A write of named ranges, which a carrier reads step by step."""

    moved_at: float
    """When bytes last moved, or the write last got something to move."""
    is_busy = False
    """Whether there are bytes to move."""

    @abstractmethod
    def name(self, number: int, ranges: Sequence[b.ByteRange]) -> None:
        """The client names its next ranges. `Corruption` or `ProtocolError` if they do not belong to this write."""

    @abstractmethod
    def step(self, now: float) -> int:
        """Move some bytes; returns how many were stored. An error ends the write."""

    @abstractmethod
    def acknowledge(self) -> b.FlowAck | None:
        """The acknowledgement of the frames that are stored, if it is due."""


# ---------------------------------------------------------------- columns as frames


class ReadPart(NamedTuple):
    """A part of a read.

    Args:
        stored: the memory of its only block, and where that lies; None if it has several.
        nbytes: of all `pieces`.
        compare: the comparisons that must end before the read does.
    """

    head: b.PartHead
    stored: tuple[int, Range] | None
    nbytes: int
    pieces: Iterator[U8]
    compare: list[PartCheck] = []  # noqa: RUF012


def parts_of(
    read: b.ReadColumns,
    backing: Backing,
    checks: BlockChecks,
    room: Room,
    ranges_from: int = 0,
) -> Iterator[ReadPart]:
    """The parts of a read, in order. `room` and `ranges_from` are as in `column_stream`."""
    if len(read.parts) > PARTS_MAX or len(read.fields) > FIELDS_MAX:
        raise ProtocolError(f"a bulk read has too many parts ({len(read.parts)}) or fields ({len(read.fields)})")
    fields = {field.name: known(field) for field in read.fields}
    for number, part in enumerate(read.parts):
        placement = _placement(read.shard, part, fields, backing)
        wanted = [_known(fields, name) for name in part.fields]
        slices = {name: sent.slice() for name, sent in part.slices.items()}
        sent = [sliced_field(field, slices[field.name]) if field.name in slices else field for field in wanted]
        if slices:
            counts, pieces = sliced_column_stream(wanted, slices, placement, FRAME_BYTES, ranges_from, room)
        else:
            counts, pieces = column_stream(wanted, placement, FRAME_BYTES, ranges_from, room)
        stored = None
        if len(part.blocks) == 1 and (ranges_from or placement.run is not None):  # else every piece is a copy
            at = part.blocks[0]
            stored = placement.blocks.addresses.item(0), Range(at.extent, at.offset, at.nbytes)
        nbytes = layout(sent, placement.rows, counts)[1]
        compare = _compared(part, placement, fields, slices, checks)
        yield ReadPart(b.PartHead(number, counts), stored, nbytes, pieces, compare)


def _compared(
    part: b.RowSelection,
    placement: RowPlacement,
    fields: Mapping[str, Field],
    slices: Mapping[str, Slice],
    checks: BlockChecks,
) -> list[PartCheck]:
    """The comparisons that the client asks for. If the part has one field of one block and the block's sums are known,
    only the bytes that it may have are compared."""
    if not part.sums:
        return []
    if len(part.sums) != len(part.blocks):
        raise ProtocolError(f"a bulk read names {len(part.sums)} checksums for {len(part.blocks)} blocks")
    checks_of_part = []
    for at, memory, expected in zip(part.blocks, placement.blocks.live_memory(), part.sums, strict=True):
        span = 0, at.nbytes
        if len(part.blocks) == len(part.fields) == 1 and part.fields[0] in slices:
            span = slice_span(fields[part.fields[0]], slices[part.fields[0]], placement)
        if expected != UNCHECKED and span[0] < span[1]:
            checks_of_part.append(
                checks.check(Range(at.extent, at.offset, at.nbytes), memory, expected, at.block, span)
            )
    return checks_of_part


def _placement(shard: int, part: b.RowSelection, fields: dict[str, Field], backing: Backing) -> RowPlacement:
    for names in part.layouts:
        for name in names:
            _known(fields, name)
    shapes = []
    for at in part.blocks:
        if at.layout >= len(part.layouts) or at.offset + at.nbytes > backing.capacity:
            raise ProtocolError(f"block {at.block} of a bulk read has no layout, or lies beyond the arena")
        names = part.layouts[at.layout]
        if len(names) != len(at.counts):
            raise ProtocolError(f"block {at.block} of a bulk read has {len(at.counts)} counts for {len(names)} fields")
        shapes.append(BlockLocation(at.block, shard, at.extent, at.offset, at.nbytes, at.rows, names, at.counts))
    memory = backing.read([Range(at.extent, at.offset, at.nbytes) for at in part.blocks])
    slots = _numbers(part.slot_of_row)
    if not len(slots):
        raise ProtocolError("a part of a bulk read names no row")
    blocks = _numbers(part.block_of_row) if part.block_of_row else np.zeros(len(slots), np.int32)
    return RowPlacement(MappedBlocks(shapes, memory, fields), blocks, slots)


def _numbers(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if len(packed) % 4:
        raise ProtocolError(f"{len(packed)} bytes are not a list of int32")
    return np.frombuffer(packed, "<i4")


def _known(fields: dict[str, Field], name: str) -> Field:
    if name not in fields:
        raise NotFound(f'field "{name}" of a bulk read is not defined in it; define every field of its blocks')
    return fields[name]


class FrameBuilder(Protocol):
    """A frame that is being filled."""

    begun: list[b.PartHead]

    @property
    def empty(self) -> bool:
        """Whether it has neither a part nor a byte."""

    @property
    def full(self) -> bool:
        """Whether it takes no further byte."""

    def add(self, part: ReadPart, piece: U8) -> U8:
        """Take as much as has room; returns the rest."""

    def content(self, part: ReadPart | None, compare: tuple[PartCheck, ...], *, last: bool) -> FrameContent:
        """The frame. `part`: of its last byte. `compare`: the comparisons of the parts that end with it."""


class _Frame:
    """A frame whose bytes are its content."""

    __slots__ = ("_digests", "begun", "full", "left", "pieces")

    def __init__(self, digests: FrameDigests) -> None:
        self.begun: list[b.PartHead] = []
        self.pieces: list[U8] = []
        self.left = FRAME_BYTES
        self.full = False
        self._digests = digests

    @property
    def empty(self) -> bool:
        return not self.begun and not self.pieces

    def add(self, part: ReadPart, piece: U8) -> U8:
        taken = piece[: self.left]
        self.pieces.append(taken)
        self.left -= len(taken)
        self.full = not self.left or len(self.pieces) == b.PIECES_MAX
        return piece[len(taken) :]

    def content(self, part: ReadPart | None, compare: tuple[PartCheck, ...], *, last: bool) -> FrameContent:
        pieces = [piece.data for piece in self.pieces]
        return FrameContent(self.begun, pieces, last, known_digest(part, self.pieces, self._digests), compare=compare)


def known_digest(part: ReadPart | None, pieces: list[U8], digests: FrameDigests) -> bytes:
    """The checksum of these pieces in order: the kept one if they are one range of a block that has one."""
    stretch = None
    if part is not None and part.stored is not None and len(pieces) == 1 and len(pieces[0]) >= DIGESTED_MIN_BYTES:
        stretch = _stretch_of(part.stored, pieces[0])
    digest = None if stretch is None else digests.of(stretch)
    if digest is None:
        digest = b.digest([piece.data for piece in pieces])
        if stretch is not None:
            digests.remember(stretch, digest)
    return digest


def _stretch_of(stored: tuple[int, Range], piece: U8) -> Range | None:
    """The place of these bytes of a frame, if it is in the stored block."""
    address, block = stored
    ahead = memory_address(piece) - address
    inside = 0 <= ahead <= block.nbytes - len(piece)
    return Range(block.extent, block.offset + ahead, len(piece)) if inside else None


def frames_of(
    read: b.ReadColumns, parts: Iterator[ReadPart], new_frame: Callable[[], FrameBuilder]
) -> Iterator[FrameContent]:
    """Cut all parts, in order, into full frames, each a list of pieces, without copying. The final frame is marked
    last."""
    frame, part, owed = new_frame(), None, 0
    ended = list[PartCheck]()

    def content(*, last: bool) -> FrameContent:
        content_of_frame = frame.content(part, tuple(ended), last=last)
        ended.clear()
        return content_of_frame

    for part in parts:
        if len(frame.begun) == b.PARTS_BEGUN_MAX:
            yield content(last=False)
            frame = new_frame()
        frame.begun.append(part.head)
        owed += part.nbytes
        compare = part.compare
        for piece in part.pieces:
            owed -= len(piece)
            rest = piece
            while len(rest):
                rest = frame.add(part, rest)
                if frame.full:
                    complete = not owed and not len(rest)
                    if complete:
                        ended += compare
                        compare = []
                    yield content(last=complete and part.head.part == len(read.parts) - 1)
                    frame = new_frame()
            del piece, rest  # the memory of a piece that has left is used again
        ended += compare
    if owed:
        raise Corruption(
            f"a part of a bulk read has {-owed} bytes more than its counts say: its offsets changed while it was read"
        )
    if not frame.empty or not read.parts:
        yield content(last=True)
