"""The client's side of the two bulk transfers: columns that it reads, and bytes that it writes. No I/O.

Both are run alike: send `opening`; for each message that arrives call `expect`, then `fill` with its bytes, and send
what `receive` returns, until `done`. Bytes are read straight to their place. A message that does not fit is
`Corruption`; the caller then begins the transfer again over another connection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import Corruption, Unreachable, from_wire
from transferqueue.limits import FRAME_BYTES
from transferqueue.schema import NO_SLICES, Field, Slice, layout, sliced_field
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.buffer_pool import BufferPool
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import codec
from transferqueue.wire import messages as m


class ClientTransfer(Protocol):
    """One attempt at moving bytes over one connection."""

    serve_s: float
    """While nothing arrives, `serve` is called so often at least."""

    @property
    def done(self) -> bool:
        """Whether the transfer has ended."""

    def serve(self) -> bool:
        """Called after a silence. Returns whether to ask the shard now (`ask`)."""

    def opening(self) -> Iterable[b.Message]:
        """The messages to send first, each made when the one before it was sent."""

    def expect(self, head: bytes, nbytes: int) -> None:
        """A message begins to arrive. Raises the shard's refusal of the transfer, or `Corruption`."""

    def fill(self, read: b.Reader) -> int:
        """Read the next bytes of the message to their place. Returns how many."""

    def receive(self) -> Iterable[b.Message]:
        """The message has arrived whole, and its checksum matches. Returns the messages to send now, made as those of
        `opening`."""

    def ask(self) -> b.Message:
        """The message to send after a silence: it asks whether the shard still knows of the transfer."""


class RequestedRows(msgspec.Struct, frozen=True):
    """The distinct rows of one part, as the request names them.

    `slot_of_row` says for each row of the reply which of them it is; None: they are the rows of the reply, in order.
    """

    wanted: b.RowSelection
    count: int
    slot_of_row: NDArray[np.int32] | None


def rows_of(
    part: m.ReplyColumns, rows: int, slices: Mapping[str, Slice] = NO_SLICES, *, compare: bool = False
) -> RequestedRows:
    """The rows to ask for: a stored row that several rows of the reply share is sent once.

    Args:
        part: of the reply.
        rows: number of rows of the reply.
        slices: of fields that are not wanted whole; default: none.
        compare: whether the shard compares the blocks of sliced fields with their checksums; default False.
    """
    rows = part.values(rows)
    blocks, slots = (
        codec.decode_constant(part.block_of_row, "<i4", rows),
        codec.decode_ascending(part.slot_of_row, "<i4", rows),
    )
    keys = blocks.astype(np.int64) << 32 | slots
    index = None
    ordered = np.sort(keys)
    if (ordered[1:] == ordered[:-1]).any():
        _, first, back = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first)  # in the order of the reply, so that runs stay runs
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        blocks, slots, index = blocks[first[order]], slots[first[order]], rank[back.reshape(-1)]
    layouts: dict[tuple[str, ...], int] = {}
    located = [_located(block, layouts) for block in part.blocks]
    alone = len(located) == 1 and not blocks.any()
    wanted = b.RowSelection(
        fields=part.fields,
        layouts=[list(names) for names in layouts],
        blocks=located,
        block_of_row=b"" if alone else blocks.tobytes(),
        slot_of_row=slots.tobytes(),
        slices={name: b.BulkCut.of(slices[name]) for name in part.fields if name in slices},
        sums=[block.checksum for block in part.blocks] if compare and slices.keys() & set(part.fields) else [],
    )
    return RequestedRows(wanted, len(slots), index)


def _located(at: m.BlockLocation, layouts: dict[tuple[str, ...], int]) -> b.BulkBlock:
    layout_of = layouts.setdefault(tuple(at.fields), len(layouts))
    return b.BulkBlock(at.block, at.extent, at.offset, at.nbytes, at.rows, layout_of, at.counts, at.ticket)


class RequestedColumns(msgspec.Struct, frozen=True):
    """The request of one read to one shard: columns of `fields`, by name, for rows of each part."""

    session: int
    shard: int
    fields: Mapping[str, Field]
    parts: Sequence[RequestedRows]

    def message(self, number: int) -> b.ReadColumns:
        """The request, as transfer `number`."""
        named = {name for part in self.parts for names in part.wanted.layouts for name in names}
        asked = {name for part in self.parts for name in part.wanted.fields}
        fields = [self.fields[name] for name in sorted(named | asked)]
        return b.ReadColumns(number, self.session, self.shard, fields, [part.wanted for part in self.parts])


class ReceivedBlock(msgspec.Struct, frozen=True):
    """A part that arrived: a block of `rows` rows."""

    block: int
    nbytes: int
    rows: int
    fields: list[str]
    counts: list[int]
    memory: U8


class _StreamTransfer:
    """A transfer whose only work while no bytes arrive is to ask."""

    serve_s = math.inf

    def serve(self) -> bool:
        """Always ask."""
        return True


class FetchTransfer(_StreamTransfer):
    """Reads columns of rows from one shard. `landed` has the block of each part, by its number, complete once
    `done`."""

    def __init__(self, number: int, asked: RequestedColumns, buffers: BufferPool) -> None:
        self.done = False
        self.landed: dict[int, ReceivedBlock] = {}
        self._number: Final = number
        self._asked, self._buffers = asked, buffers
        self._fields, self._parts = asked.fields, asked.parts
        self._intake = b.ReceiveWindow()
        self._due: deque[memoryview] = deque()
        self._arriving: b.ReadFrame | b.RangesFrame | None = None

    def opening(self) -> list[b.Message]:
        """The request."""
        return [b.message(self._request())]

    def _request(self) -> b.ReadColumns:
        return self._asked.message(self._number)

    def ask(self) -> b.Message:
        """Whether more will come."""
        return b.message(b.FlowAck(self._number, self._intake.taken))

    def expect(self, head: bytes, nbytes: int) -> None:
        """A frame begins to arrive: make room for its bytes."""
        message = checked(head, self._number)
        self._arriving = None
        if isinstance(message, b.ReadFrame | b.RangesFrame):
            if message.transfer != self._number:  # whose bytes must not go where those of this one are due
                raise Corruption(f"a frame of bulk transfer {message.transfer} came where {self._number} was under way")
            self._intake.take(message.number, nbytes if isinstance(message, b.ReadFrame) else FRAME_BYTES)
            for begun in message.begun:
                self._begin(begun)
            self._place(message)
            self._arriving = message
        if nbytes > sum(map(len, self._due)):
            raise Corruption(f"{nbytes} bytes came that belong to no part")

    def _place(self, frame: b.ReadFrame | b.RangesFrame) -> None:
        if isinstance(frame, b.RangesFrame):
            raise Corruption("a bulk read was answered with ranges, which it did not ask for")

    def fill(self, read: b.Reader) -> int:
        """Read bytes to their place."""
        into = self._due.popleft()
        try:
            size = read(into)
            into = into[size:]
        finally:
            if len(into):
                self._due.appendleft(into)
        return size

    def receive(self) -> list[b.Message]:
        """A frame has arrived whole."""
        if self._arriving is None:
            return []
        last = self._arriving.last
        if last:
            self._end()
        return [self.ask()] if self._intake.due(last=last or self._frees(self._arriving)) else []

    def _frees(self, frame: b.ReadFrame | b.RangesFrame) -> bool:
        """Whether the shard should hear at once that this frame was taken."""
        return False

    def _begin(self, begun: b.PartHead) -> None:
        if begun.part >= len(self._parts):
            raise Corruption(f"part {begun.part} came where {len(self._parts)} were asked for")
        part = self._parts[begun.part]
        names, slices = part.wanted.fields, part.wanted.slices
        fields = [
            sliced_field(self._fields[name], slices[name].slice()) if name in slices else self._fields[name]
            for name in names
        ]
        _, nbytes = layout(fields, part.count, begun.counts)
        if nbytes > self._bound(part):
            raise Corruption(f"a part came with {nbytes} bytes, more than the blocks that hold it")
        memory = self._buffers.take(nbytes)
        self.landed[begun.part] = ReceivedBlock(0, nbytes, part.count, names, begun.counts, memory)
        if nbytes:
            self._owe(memory.data)

    def _owe(self, memory: memoryview) -> None:
        """These bytes come next."""
        self._due.append(memory)

    def _bound(self, part: RequestedRows) -> int:
        """Most bytes that a part may have: rows are distinct, so at most the bytes of their blocks, and offsets, shapes
        and padding."""
        extra = sum(8 * (part.count + 1) * (1 + len(self._fields[name].shape)) + 256 for name in part.wanted.fields)
        return sum(at.nbytes for at in part.wanted.blocks) + extra

    def _end(self) -> None:
        if self._due or len(self.landed) != len(self._parts):
            raise Corruption(
                f"a bulk read ended with {len(self.landed)} of {len(self._parts)} parts, {len(self._due)} cut"
            )
        self.done = True


class WritingTransfer:
    """The base of both kinds of writes: it sends the frames that `left` makes as the window allows, and the shard says
    which ones it has stored."""

    def __init__(self, number: int, left: Iterator[b.Message]) -> None:
        self.done = False
        self._number: Final = number
        self._window = b.SendWindow()
        self._left = left

    def opening(self) -> Iterable[b.Message]:
        """The request with the first frame, and as many more frames as the window allows."""
        return self._more()

    def ask(self) -> b.Message:
        """Whether it has arrived."""
        return b.message(b.FlowAck(self._number, self._window.taken))

    def expect(self, head: bytes, nbytes: int) -> None:
        """The shard says which frames it has stored."""
        message = checked(head, self._number)
        if nbytes:
            raise Corruption(f"{nbytes} bytes came where a write was under way")
        if isinstance(message, b.FlowAck) and message.transfer == self._number:
            self._window.took(message.frames)
            self.done = message.done

    def fill(self, read: b.Reader) -> int:
        """A write receives no bytes."""
        raise Corruption("bytes came where a write was under way")

    def receive(self) -> Iterable[b.Message]:
        """The shard has stored frames: send further ones."""
        return self._more()

    def _more(self) -> Iterator[b.Message]:
        while self._window.open and (frame := next(self._left, None)) is not None:
            self._window.send()
            yield frame


class StoreTransfer(WritingTransfer, _StreamTransfer):
    """Writes the bytes that `head` names. They must not change before it is `done`."""

    def __init__(self, head: b.WriteExtent, data: memoryview) -> None:
        super().__init__(head.transfer, _frames(head, data))


def write_head(number: int, session: int, granted: m.Granted, at: int, nbytes: int) -> b.WriteExtent:
    """The head of transfer `number`, which writes `nbytes` from byte `at` of the arena on, inside a granted extent."""
    extent = granted.shard, granted.extent, granted.offset, granted.nbytes, granted.ticket
    return b.WriteExtent(number, session, *extent, at, nbytes)


def _frames(head: b.WriteExtent, data: memoryview) -> Iterator[b.Message]:
    yield b.message(head, [data[:FRAME_BYTES]])
    for number, start in enumerate(range(FRAME_BYTES, len(data), FRAME_BYTES), start=1):
        yield b.message(b.WriteFrame(head.transfer, number), [data[start : start + FRAME_BYTES]])


def checked(head: bytes, number: int) -> b.ToClient:
    """The message of this head. Raises the shard's refusal of transfer `number`, and `Corruption`."""
    message = b.to_client(head)
    if isinstance(message, b.TransferFailed) and message.transfer in (0, number):
        error = from_wire(message.error, message.text)
        raise Unreachable(str(error)) if message.error == "ProtocolError" and not message.transfer else error
    return message
