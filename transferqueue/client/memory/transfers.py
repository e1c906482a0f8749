"""The two kinds of transfer of the bulk protocol, at the client: columns that arrive, and bytes that leave. No I/O.

Both are driven alike: send `opening`, let a connection hand over what arrives (`expect`, `fill`), send what `receive` answers
to each message, until `done`. Bytes go from the connection to where they belong. What is wrong with what arrives is
`Corruption`, after which the transfer is begun again, from nothing, over another connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import Corruption, Unreachable, from_wire
from transferqueue.limits import FRAME_BYTES
from transferqueue.schema import Field, layout
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.buffer_pool import Buffers
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import messages as m
from transferqueue.wire import run_length as short


class ClientTransfer(Protocol):
    """One attempt at moving bytes over one connection."""

    @property
    def done(self) -> bool:
        """Whether it has come to its end."""

    def opening(self) -> list[b.Message]:
        """What to send first."""

    def expect(self, head: bytes, nbytes: int) -> None:
        """A message begins to arrive. Raises what the shard refused the transfer with, or `Corruption`."""

    def fill(self, read: b.Reader) -> int:
        """Its next bytes arrive."""

    def receive(self) -> list[b.Message]:
        """It has arrived whole, and matches: what to send now."""

    def ask(self) -> b.Message:
        """What to send when nothing has come for a while: does the shard still know of this?"""


class RequestedRows(msgspec.Struct, frozen=True):
    """Distinct rows of one part, as they are asked for, and which of them each row of the reply is."""

    wanted: b.RowSelection
    count: int
    slot_of_row: NDArray[np.int32]


def rows_of(part: m.ReplyColumns, rows: int) -> RequestedRows:
    """A row that several rows of the reply share crosses once."""
    blocks, slots = (
        short.encode_rows(part.block_of_row, "<i4", rows),
        short.each_ascending(part.slot_of_row, "<i4", rows),
    )
    keys = blocks.astype(np.int64) << 32 | slots
    index = np.arange(len(keys), dtype=np.int32)
    distinct, first, back = np.unique(keys, return_index=True, return_inverse=True)
    if len(distinct) < len(keys):
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
    )
    return RequestedRows(wanted, len(slots), index)


def _located(at: m.BlockLocation, layouts: dict[tuple[str, ...], int]) -> b.BulkBlock:
    layout_of = layouts.setdefault(tuple(at.fields), len(layouts))
    return b.BulkBlock(at.block, at.extent, at.offset, at.nbytes, at.rows, layout_of, at.counts, at.ticket)


class ReceivedBlock(msgspec.Struct, frozen=True):
    """A part that arrived: a block of `rows` rows. Has the shape that `storage.placement.Blocks` asks for."""

    block: int
    nbytes: int
    rows: int
    fields: list[str]
    counts: list[int]
    memory: U8


class FetchTransfer:
    """Columns of rows, from one shard. `landed`: the block of each part, by its number, complete once `done`."""

    def __init__(
        self,
        number: int,
        session: int,
        shard: int,
        fields: Mapping[str, Field],
        parts: Sequence[RequestedRows],
        buffers: Buffers,
    ) -> None:
        self.done = False
        self.landed: dict[int, ReceivedBlock] = {}
        self._number: Final = number
        self._session, self._shard = session, shard
        self._fields, self._parts, self._buffers = fields, parts, buffers
        self._intake = b.ReceiveWindow()
        self._due: deque[memoryview] = deque()
        self._arriving: b.ReadFrame | None = None

    def opening(self) -> list[b.Message]:
        """The request."""
        named = {name for part in self._parts for names in part.wanted.layouts for name in names}
        asked = {name for part in self._parts for name in part.wanted.fields}
        fields = [self._fields[name] for name in sorted(named | asked)]
        parts = [part.wanted for part in self._parts]
        return [b.message(b.ReadColumns(self._number, self._session, self._shard, fields, parts))]

    def ask(self) -> b.Message:
        """Whether more will come."""
        return b.message(b.FlowAck(self._number, self._intake.taken))

    def expect(self, head: bytes, nbytes: int) -> None:
        """A frame begins to arrive: from now on there is a place for each of its bytes."""
        told = _believed(head, self._number)
        self._arriving = told if isinstance(told, b.ReadFrame) and told.transfer == self._number else None
        if self._arriving is not None:
            self._intake.take(self._arriving.number)
            for begun in self._arriving.begun:
                self._begin(begun)
        if nbytes > sum(map(len, self._due)):
            raise Corruption(f"{nbytes} bytes came that belong to no part")

    def fill(self, read: b.Reader) -> int:
        """Put bytes where they belong."""
        into = self._due.popleft()
        try:
            size = read(into)
            into = into[size:]
        finally:
            if len(into):
                self._due.appendleft(into)
        return size

    def receive(self) -> list[b.Message]:
        """A frame is where it belongs."""
        if self._arriving is None:
            return []
        last = self._arriving.last
        if last:
            self._end()
        return [self.ask()] if self._intake.due(last=last) else []

    def _begin(self, begun: b.PartHead) -> None:
        if begun.part >= len(self._parts):
            raise Corruption(f"part {begun.part} came where {len(self._parts)} were asked for")
        part = self._parts[begun.part]
        names = part.wanted.fields
        _, nbytes = layout([self._fields[name] for name in names], part.count, begun.counts)
        if nbytes > self._bound(part):
            raise Corruption(f"a part came with {nbytes} bytes, more than the blocks that hold it")
        memory = self._buffers.take(nbytes)
        self.landed[begun.part] = ReceivedBlock(0, nbytes, part.count, names, begun.counts, memory)
        if nbytes:
            self._due.append(memory.data)

    def _bound(self, part: RequestedRows) -> int:
        """Rows are distinct, so their values are no more than the blocks have; offsets, shapes and padding come on top."""
        extra = sum(8 * (part.count + 1) * (1 + len(self._fields[name].shape)) + 256 for name in part.wanted.fields)
        return sum(at.nbytes for at in part.wanted.blocks) + extra

    def _end(self) -> None:
        if self._due or len(self.landed) != len(self._parts):
            raise Corruption(
                f"a bulk read ended with {len(self.landed)} of {len(self._parts)} parts, {len(self._due)} cut"
            )
        self.done = True


class StoreTransfer:
    """Bytes into an extent that was granted. They must not change before it is `done`."""

    def __init__(self, number: int, session: int, granted: m.Granted, at: int, data: memoryview) -> None:
        self.done = False
        self._number: Final = number
        self._window = b.SendWindow()
        self._head = b.WriteExtent(
            number,
            session,
            granted.shard,
            granted.extent,
            granted.offset,
            granted.nbytes,
            granted.ticket,
            at,
            len(data),
        )
        self._left = self._frames(data)

    def opening(self) -> list[b.Message]:
        """The request, with the first bytes, and as many more frames as may follow at once."""
        return self._more()

    def ask(self) -> b.Message:
        """Whether it has arrived."""
        return b.message(b.FlowAck(self._number, self._window.taken))

    def expect(self, head: bytes, nbytes: int) -> None:
        """The shard tells what it has taken."""
        told = _believed(head, self._number)
        if nbytes:
            raise Corruption(f"{nbytes} bytes came where a write was under way")
        if isinstance(told, b.FlowAck) and told.transfer == self._number:
            self._window.took(told.frames)
            self.done = told.done

    def fill(self, read: b.Reader) -> int:
        """Nothing has a place here."""
        raise Corruption("bytes came where a write was under way")

    def receive(self) -> list[b.Message]:
        """The shard has taken frames: send further ones."""
        return self._more()

    def _more(self) -> list[b.Message]:
        found = []
        while self._window.open and (frame := next(self._left, None)) is not None:
            self._window.send()
            found.append(frame)
        return found

    def _frames(self, data: memoryview) -> Iterator[b.Message]:
        yield b.message(self._head, [data[:FRAME_BYTES]])
        for number, start in enumerate(range(FRAME_BYTES, len(data), FRAME_BYTES), start=1):
            yield b.message(b.WriteFrame(self._number, number), [data[start : start + FRAME_BYTES]])


def _believed(head: bytes, number: int) -> b.ToClient:
    told = b.to_client(head)
    if isinstance(told, b.TransferFailed) and told.transfer in (0, number):
        error = from_wire(told.error, told.text)
        raise Unreachable(str(error)) if told.error == "ProtocolError" and not told.transfer else error
    return told
