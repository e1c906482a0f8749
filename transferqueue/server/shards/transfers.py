"""The two kinds of transfer of the bulk protocol, at the shard: rows gathered into frames, and frames written into an extent. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from transferqueue.errors import Corruption, NotFound, ProtocolError
from transferqueue.limits import FIELDS_MAX, FRAME_BYTES, PARTS_MAX
from transferqueue.schema import Field
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.columns.byte_stream import count_of, stream_pieces
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import Backing, Range
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire.messages import BlockLocation

Content = tuple[list[b.PartHead], list[memoryview]]


class ShardTransfer:
    """What both kinds share. heard_at: when the last frame of its peer arrived."""

    def __init__(self, number: int, session: int, extents: frozenset[int], tickets: TicketIssuer, now: float) -> None:
        self.number: Final = number
        self.session: Final = session
        self.heard_at = now
        self._extents = extents
        self._tickets = tickets
        self._checked_at = -1

    @property
    def has_shown_tickets(self) -> bool:
        """Whether the transfer has any tickets. A read of no block has none."""
        return bool(self._extents)

    def check(self) -> None:
        """`Disconnected` if the session ended, or an extent of the transfer was freed."""
        revoked = self._tickets.revoked
        if revoked != self._checked_at:
            self._tickets.check_live(self.session, self._extents)
            self._checked_at = revoked


class ReadTransfer(ShardTransfer):
    """Sends the columns that a client asked for. Gathers only one frame ahead."""

    def __init__(self, read: b.ReadColumns, backing: Backing, tickets: TicketIssuer, now: float) -> None:
        named = [at for part in read.parts for at in part.blocks]
        tickets.check_read(read.session, read.shard, named)
        super().__init__(read.transfer, read.session, frozenset(at.extent for at in named), tickets, now)
        self.check()
        self.window: Final = b.SendWindow()
        self._frames = _frames(_columns(read, backing))
        self._next: Content | None = next(self._frames, ([], []))

    @property
    def ready(self) -> bool:
        """Whether a frame may be sent now."""
        return self._next is not None and self.window.open

    @property
    def done(self) -> bool:
        """Whether the receiver has confirmed all frames."""
        return self._next is None and self.window.taken == self.window.sent

    def frame(self) -> b.Message:
        """The next frame. Raises as `check` and `Backing.read`, and `Corruption` for a block that is damaged."""
        if self._next is None:
            raise ProtocolError("a bulk read has no frame after its last one")
        begun, content = self._next
        following = next(self._frames, None)
        head = b.ReadFrame(self.number, self.window.send(), begun, last=following is None)
        message = b.message(head, content)
        self.check()  # after the checksum: the bytes were not granted to another session meanwhile
        self._next = following
        return message


class WriteTransfer(ShardTransfer):
    """Receives frames for an extent."""

    def __init__(self, write: b.WriteExtent, backing: Backing, tickets: TicketIssuer, now: float) -> None:
        tickets.check_write(write)
        if write.offset + write.nbytes > backing.capacity:
            raise Corruption(f"extent {write.extent} ends beyond the arena's {backing.capacity} bytes")
        super().__init__(write.transfer, write.session, frozenset((write.extent,)), tickets, now)
        self._window = b.ReceiveWindow()
        self._range: Final = Range(write.extent, write.at, write.total)
        self._write: Final = backing.begin_write(self._range)
        self._written = 0

    @property
    def done(self) -> bool:
        """Whether every byte has arrived."""
        return self._written == self._range.nbytes

    def overlaps(self, other: WriteTransfer) -> bool:
        """Whether both write some byte."""
        return self._range.offset < other._range.end and other._range.offset < self._range.end

    def expect(self, number: int, nbytes: int) -> None:
        """A frame begins. `Corruption` if it is not the next one, or exceeds the announced size."""
        self._window.take(number)
        more = self._written + nbytes - self._range.nbytes
        if more > 0:
            raise Corruption(f"a bulk write of {self._range.nbytes} bytes has {more} more than it said")

    def fill(self, read: b.Reader) -> int:
        """Write the next bytes of a frame; returns how many. `Disconnected` if they may not be written any more."""
        with self._tickets.writing(self.session, self._extents):
            size = self._write.fill(read)
        self._written += size
        return size

    def frame_complete(self) -> b.FlowAck | None:
        """A frame is complete. Returns the acknowledgement, if one is due. Raises as `fill` and `IncomingWrite.commit`."""
        with self._tickets.writing(self.session, self._extents):
            self._write.commit(last=self.done)
        return self.progress() if self._window.due(last=self.done) else None

    def progress(self) -> b.FlowAck:
        """How much has arrived."""
        return b.FlowAck(self.number, self._window.taken, self.done)


# ---------------------------------------------------------------- columns as frames


def _columns(read: b.ReadColumns, backing: Backing) -> Iterator[b.PartHead | U8]:
    """All parts in order: a head for each, then its columns piece by piece."""
    if len(read.parts) > PARTS_MAX or len(read.fields) > FIELDS_MAX:
        raise ProtocolError(f"a bulk read of {len(read.parts)} parts with {len(read.fields)} fields; that is too many")
    fields = {field.name: field for field in read.fields}
    for number, part in enumerate(read.parts):
        placement = _placement(read.shard, part, fields, backing)
        wanted = [_known(fields, name) for name in part.fields]
        yield b.PartHead(number, [count_of(field, placement) for field in wanted])
        for field in wanted:
            yield from stream_pieces(field, placement, FRAME_BYTES)


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
    blocks = _numbers(part.block_of_row) if part.block_of_row else np.zeros(len(slots), np.int32)
    return RowPlacement(MappedBlocks(shapes, memory, fields), blocks, slots)


def _numbers(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if len(packed) % 4:
        raise ProtocolError(f"{len(packed)} bytes are no list of int32")
    return np.frombuffer(packed, "<i4")


def _known(fields: dict[str, Field], name: str) -> Field:
    if name not in fields:
        raise NotFound(f'field "{name}" of a bulk read is not among those it defines; define every field of its blocks')
    return fields[name]


def _frames(stream: Iterator[b.PartHead | U8]) -> Iterator[Content]:
    """Cut the stream into full frames, each a list of pieces: no byte is copied."""
    begun: list[b.PartHead] = []
    content: list[memoryview] = []
    left = FRAME_BYTES
    for item in stream:
        if isinstance(item, b.PartHead):
            begun.append(item)
        else:
            while len(item) >= left:
                content.append(item[:left].data)
                yield begun, content
                begun, content, item, left = [], [], item[left:], FRAME_BYTES
            if len(item):
                content.append(item.data)
                left -= len(item)
        if len(content) == b.PIECES_MAX or len(begun) == b.PARTS_BEGUN_MAX:
            yield begun, content
            begun, content, left = [], [], FRAME_BYTES
    if begun or content:
        yield begun, content
