"""The bulk protocol: bytes of columns between a client and a shard that it cannot map. No I/O.

The law (docs/decisions/0013):

1. A *transfer* reads columns or writes into a granted extent. A connection carries one at a time; a client opens as
   many connections as it has transfers under way. Its number tells the frames of one from what is left of an earlier one.
2. A message is a head and its content, which is bytes. The head begins with the four bytes ``TQB`` and the number of the
   protocol, and then has the xxh3-64 of the rest of itself, and that has the length and the xxh3-64 of the content: so it can be believed before its content has come, and the content be
   received where it belongs. Nothing that is written there is believed before it matches. What does not is `Corruption`.
3. Bytes travel in frames of about `FRAME_BYTES`, numbered from 0; a gap is `Corruption`.
4. No more than `BULK_WINDOW_FRAMES` are on their way beyond those that the receiver said it took (`FlowAck`). So a reader
   that stalls holds that much at the shard, and a shard that stalls that much at a writer.
5. Only the client tries again: when something did not match, was missing or stayed away for `BULK_SILENCE_S`, it closes
   the connection and begins the transfer anew over another, `BULK_TRIES` times in all. That is safe: blocks never change,
   and a write that comes twice writes the same bytes.
   The bytes of a later one are the last ones to be written: it ends what is under way into the same place.
6. Who may touch which bytes is told by tickets, which the control plane gave (`server.tickets`).

What carries messages is `transport.bulk_streams` where nobody asks for keys, and `transport.bulk_sockets` where somebody does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Protocol, TypeVar, dataclass_transform

import msgspec
import xxhash
from msgspec import Meta

from transferqueue.errors import Corruption, ProtocolError
from transferqueue.limits import (
    BULK_WINDOW_FRAMES,
    FIELDS_MAX,
    FRAME_BYTES,
    MESSAGE_BYTES_MAX,
    ROWS_PER_REQUEST_MAX,
    TICKET_BYTES,
)
from transferqueue.wire.messages import I32, Count, Counts, Fields, Names, Text
from transferqueue.wire.versions import PROTOCOL

Piece = bytes | memoryview
"""Contiguous bytes, as whoever has them holds them (of an array: its ``data``)."""
Message = tuple[bytes, Sequence[Piece]]
"""A head and the pieces of its content."""
Reader = Callable[[memoryview], int]
"""Puts the next bytes of a content at the beginning of some memory, which is not empty; how many it were."""
Ticket = Annotated[bytes, Meta(max_length=TICKET_BYTES)]

PIECES_MAX: Final = 256
"""Pieces of one message: a frame of many small columns has several for each."""
PARTS_READ_MAX: Final = 2 * FIELDS_MAX
"""Parts of one read, and layouts of one part: a table has fewer of both."""
PARTS_BEGUN_MAX: Final = 4
"""Parts that begin in one frame: each says a number for each of its columns, and a head stays small."""
TAKEN_EVERY: Final = BULK_WINDOW_FRAMES // 2
"""A receiver says what it took after so many frames: before the window closes, and not after each."""
_LENGTHS: Final = struct.Struct("<II8s")
"""What follows the checksum of a head: the length of what is encoded after this, then length and checksum of the content."""
_DIGEST_BYTES: Final = 8
_OPENING: Final = b"TQB" + bytes([PROTOCOL])
"""What every head begins with: the name of the bulk protocol, and the number that it shares with the control messages."""
_DIGEST_AT: Final = len(_OPENING)
_LENGTHS_AT: Final = _DIGEST_AT + _DIGEST_BYTES
PRELUDE_BYTES: Final = _LENGTHS_AT + _LENGTHS.size
"""The part of a head that tells how long the rest is."""


@dataclass_transform(frozen_default=True)
class BulkHead(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all heads. transfer: its number, ascending in its connection. Tags stay when a class is renamed: they are on the wire."""

    transfer: Count


# ---------------------------------------------------------------- to the shard


class BulkBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block as a reply named it (`BlockAt`), its fields as an index into the layouts of its part."""

    block: Count
    extent: Count
    offset: Count
    nbytes: Count
    rows: Count
    layout: Count
    counts: Counts
    ticket: Ticket


class RowSelection(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Columns `fields` of some rows: for each its block (index into `blocks`; empty: the first) and its row in there."""

    fields: Names
    layouts: Annotated[list[Names], Meta(max_length=PARTS_READ_MAX)]
    blocks: Annotated[list[BulkBlock], Meta(max_length=ROWS_PER_REQUEST_MAX)]
    block_of_row: I32
    slot_of_row: I32


class ReadColumns(BulkHead, tag="Read"):
    """Send these columns. fields: definitions of all fields in the blocks. Answer: frames."""

    session: Count
    shard: Count
    fields: Fields
    parts: Annotated[list[RowSelection], Meta(max_length=PARTS_READ_MAX)]


class WriteExtent(BulkHead, tag="Write"):
    """`total` bytes follow, from byte `at` of the arena, inside this granted extent; its pieces are frame 0."""

    session: Count
    shard: Count
    extent: Count
    offset: Count
    nbytes: Count
    ticket: Ticket
    at: Count
    total: Count


class WriteFrame(BulkHead, tag="Data"):
    """A further frame of a write."""

    number: Count


class FlowAck(BulkHead, tag="Taken"):
    """The receiver has taken `frames` frames of the transfer. Sent again, it asks whether the transfer still lives.

    Of a write, `done` says that all of it lies in the arena.
    """

    frames: Count
    done: bool = False


# ---------------------------------------------------------------- to the client


class PartHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part begins: the count of each of its columns (`schema.layout`). Its bytes are a block of these columns."""

    part: Count
    counts: Counts


class ReadFrame(BulkHead, tag="Frame"):
    """The next bytes of a read: they continue the parts that began before, then those that begin here."""

    number: Count
    begun: Annotated[list[PartHead], Meta(max_length=PARTS_BEGUN_MAX)]
    last: bool


class TransferFailed(BulkHead, tag="Refused"):
    """The transfer (0: the one under way) is over. error: a class name of transferqueue.errors."""

    error: Text
    text: Annotated[str, Meta(max_length=FRAME_BYTES)]


ToShard = ReadColumns | WriteExtent | WriteFrame | FlowAck
ToClient = ReadFrame | FlowAck | TransferFailed

_Head = TypeVar("_Head")
_encoder: Final = msgspec.msgpack.Encoder()
_to_shard: Final[msgspec.msgpack.Decoder[ToShard]] = msgspec.msgpack.Decoder(ToShard)
_to_client: Final[msgspec.msgpack.Decoder[ToClient]] = msgspec.msgpack.Decoder(ToClient)


class MessageReceiver(Protocol):
    """Who receives messages: told of each by its head, then asked where its content belongs."""

    def expect(self, head: bytes, nbytes: int) -> None:
        """A head came; content of `nbytes` follows it. `Corruption` if that cannot be believed."""

    def fill(self, read: Reader) -> int:
        """Let `read` put the next bytes where they belong; how many it put there."""


def message(head: ToShard | ToClient, content: Sequence[Piece] = ()) -> Message:
    """A message with its checksums. The content must not change before it has left."""
    return framed(_encoder.encode(head), content), content


def framed(encoded: bytes, content: Sequence[Piece] = ()) -> bytes:
    """A head with its checksums, of what it says."""
    nbytes = sum(memoryview(piece).nbytes for piece in content)
    rest = _LENGTHS.pack(len(encoded), nbytes, digest(content)) + encoded
    return _OPENING + digest((rest,)) + rest


def to_shard(head: bytes) -> ToShard:
    """What a client sent. `Corruption` if the head does not match its checksum, `ProtocolError` for what is none."""
    return _decode(_to_shard, head)


def to_client(head: bytes) -> ToClient:
    """What a shard sent; errors as `to_shard`."""
    return _decode(_to_client, head)


def lengths(prelude: Piece | bytearray) -> tuple[int, int]:
    """Of a head that begins so: all its bytes, and those of its content. `Corruption` if no message is so long."""
    if len(prelude) < PRELUDE_BYTES:
        raise Corruption(f"a bulk message of {len(prelude)} bytes does not match its checksum, since it has none")
    if prelude[:_DIGEST_AT] != _OPENING:
        raise Corruption(_not_ours(bytes(prelude[:_DIGEST_AT])))
    encoded, content, _ = _LENGTHS.unpack_from(prelude, _LENGTHS_AT)
    if encoded > MESSAGE_BYTES_MAX or content > FRAME_BYTES:
        raise Corruption(
            f"a bulk message says that its head has {encoded} bytes and its content {content}, and none has so many: "
            "its bytes changed on the way"
        )
    return PRELUDE_BYTES + encoded, content


def _not_ours(opening: bytes) -> str:
    if opening[:-1] == _OPENING[:-1]:
        return (
            f"a bulk message speaks protocol {opening[-1]} and this end speaks protocol {PROTOCOL}: install the same package at both "
            "ends (docs/COMPATIBILITY.md), unless bytes changed on the way"
        )
    return f"a bulk message begins with {opening!r} and does not match {_OPENING!r}: its bytes changed on the way"


def check_content(head: Piece | bytearray, found: bytes) -> None:
    """`Corruption` unless the content that belongs to this head has `found` as its checksum."""
    if _LENGTHS.unpack_from(head, _LENGTHS_AT)[2] != found:
        raise Corruption("the content of a bulk message does not match its checksum: its bytes changed on the way")


def digest(content: Sequence[Piece]) -> bytes:
    """The checksum of these pieces, one after the other."""
    found = xxhash.xxh3_64()
    for piece in content:
        found.update(piece)
    return found.digest()


def deliver(head: bytes, content: Sequence[memoryview], taker: MessageReceiver) -> None:
    """Give a message that came whole to its taker. `Corruption` if it does not match; then nothing was given."""
    size, nbytes = lengths(head)
    if (size, nbytes) != (len(head), sum(map(len, content))):
        raise Corruption("a bulk message is not as long as it says, so it does not match its checksum")
    check_content(head, digest(content))
    taker.expect(head, nbytes)
    for piece in content:
        left = piece
        while len(left):
            left = left[taker.fill(_copy_of(left)) :]


def _copy_of(piece: memoryview) -> Reader:
    def read(into: memoryview) -> int:
        size = min(len(into), len(piece))
        into[:size] = piece[:size]
        return size

    return read


def _decode(decoder: msgspec.msgpack.Decoder[_Head], head: bytes) -> _Head:
    lengths(head)
    told, rest = head[_DIGEST_AT:_LENGTHS_AT], memoryview(head)[_LENGTHS_AT:]
    if digest((rest,)) != told:
        raise Corruption("the head of a bulk message does not match its checksum: its bytes changed on the way")
    encoded = rest[_LENGTHS.size :]
    try:
        return decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a bulk message of {len(encoded)} bytes is not one: {error}") from error


class SendWindow:
    """The sender's side of rule 4: how many frames of one transfer may leave now."""

    __slots__ = ("sent", "taken")

    def __init__(self) -> None:
        self.sent = self.taken = 0

    @property
    def open(self) -> bool:
        """Whether one more may leave."""
        return self.sent - self.taken < BULK_WINDOW_FRAMES

    def send(self) -> int:
        """One leaves; its number."""
        self.sent += 1
        return self.sent - 1

    def took(self, frames: int) -> None:
        """The receiver has taken `frames` in all. `ProtocolError` if that is more than were sent."""
        if frames > self.sent:
            raise ProtocolError(f"{frames} bulk frames were taken of {self.sent} that were sent")
        self.taken = max(self.taken, frames)


class ReceiveWindow:
    """The receiver's side of rules 3 and 4: frames in order, and when to say how many there were."""

    __slots__ = ("_told", "taken")

    def __init__(self) -> None:
        self.taken = self._told = 0

    def take(self, number: int) -> None:
        """A frame came. `Corruption` if it is not the next one."""
        if number != self.taken:
            raise Corruption(f"bulk frame {number} came where {self.taken} was due: frames were lost on the way")
        self.taken += 1

    def due(self, *, last: bool) -> bool:
        """Whether the sender should be told now; then it counts as told."""
        due = last or self.taken - self._told >= TAKEN_EVERY
        if due:
            self._told = self.taken
        return due
