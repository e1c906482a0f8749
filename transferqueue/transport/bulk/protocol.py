"""The bulk protocol: moves bytes of columns between a client and a shard whose memory the client cannot map. No I/O.

See docs/decisions/remote-bytes.md.

1. A *transfer* reads columns, or writes into a granted extent. A connection carries one transfer at a time; a client
   opens one connection for each concurrent transfer. The transfer's number tells its frames from late frames of an
   earlier transfer.
2. A message is a head and its content, which is bytes. The head begins with ``TQB`` and the protocol number, then the
   xxh3-64 of the rest of the head. The rest has the length and the xxh3-64 of the content. So the receiver can trust
   the head before the content has arrived, and receive the content at its destination. Received content counts only
   after its checksum matched; otherwise `Corruption`.
3. Bytes travel in frames of at most `FRAME_BYTES`, numbered from 0. A gap is `Corruption`.
4. At most `BULK_WINDOW_FRAMES` of the longest frames, or as many bytes in shorter ones, are sent beyond those that the
   receiver has acknowledged (`FlowAck`). So a stalled reader holds only that much at the shard, and a stalled shard
   only that much at a writer.
5. Only the client retries. If a checksum failed, a frame was missing, or no byte arrived for `BULK_SILENCE_S`, it
   closes the connection and starts the transfer again over another one, at most `BULK_TRIES` times. That is safe:
   blocks never change, and a repeated write writes the same bytes. A later write ends an earlier one into the same
   place, so the bytes of the later one are written last.
6. Tickets, which the coordinator issues, say which bytes a client may read or write (`server.shards.tickets`).
7. A block of which a client reads a part is compared whole at the shard, if the client names its checksum: the last
   frame of the read follows the comparison.
8. A client whose carrier reads memory (`transport.bulk.carriers`, docs/decisions/one-sided.md) asks with `ReadRanges`.
   The answer, `RangesFrame`, names the ranges of at least `RANGE_BYTES_MIN` with a checksum each, and those into which
   the shard gathered rows; the rest comes as content. The client acknowledges a frame when it has read its ranges and
   they match, so the shard knows how long they are needed.
9. A write may name ranges of the client's registered memory instead (`WriteRanges`, docs/decisions/one-sided.md). The
   shard reads them into its own memory, compares them, copies them into the extent, and then acknowledges the frame.

`transport.bulk.stream` carries messages over TCP, `transport.bulk.tls` encrypts them where the server has keys.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Protocol, TypeVar, dataclass_transform

import msgspec
import xxhash
from msgspec import Meta

from transferqueue.errors import Corruption, ProtocolError
from transferqueue.limits import (
    BULK_HEAD_BYTES_MAX,
    BULK_WINDOW_FRAMES,
    FIELDS_MAX,
    FRAME_BYTES,
    ITEMS_MAX,
    KIB,
    MIB,
    TICKET_BYTES,
)
from transferqueue.schema import RAGGED_RANK_MAX, Share, Slice
from transferqueue.wire.messages import I32, Checksum, Count, Counts, Fields, Names, Text
from transferqueue.wire.versions import PROTOCOL

Piece = bytes | memoryview
"""Contiguous bytes (of an array: its ``data``)."""
Message = tuple[bytes, Sequence[Piece]]
"""A head and the pieces of its content."""
Reader = Callable[[memoryview], int]
"""Writes the next bytes of a content to the start of a non-empty memory, and returns how many."""
Ticket = Annotated[bytes, Meta(max_length=TICKET_BYTES)]

PIECES_MAX: Final = 256
"""Pieces of one message: a frame of many small columns has several pieces for each column."""
PARTS_READ_MAX: Final = 2 * FIELDS_MAX
"""Parts of one read, and layouts of one part. A table has fewer of both."""
PARTS_BEGUN_MAX: Final = 4
"""Parts that begin in one frame: each adds a number for each of its columns to the head."""
RANGE_BYTES_MIN: Final = 16 * KIB
"""Shorter ranges come as content: 8,192 ranges of 4 KiB took three times as long as one range of the same bytes, and
1,024 ranges of 32 KiB 1.2 times."""
RANGED_PART_BYTES_MIN: Final = 64 * KIB
"""A smaller part comes as content: one round trip."""
RANGES_MAX: Final = 1024
"""Ranges and pieces of content of one frame."""
RANGES_FRAME_BYTES: Final = 8 * MIB
"""A frame names about this many bytes: the shard hashes those without a kept checksum in a millisecond."""
METADATA_BYTES_MAX: Final = 4 * MIB
"""An agent's description of its registered memory: some hundred bytes for each of up to thousands of regions."""
WINDOW_BYTES: Final = BULK_WINDOW_FRAMES * FRAME_BYTES
"""Bytes that may be on their way before the receiver acknowledges some."""
COUNTED_BYTES_MIN: Final = 128 * KIB
"""A frame of a read counts as its content's bytes, and at least as this many. A frame of a write, or of ranges, counts
as `FRAME_BYTES`."""
TAKEN_EVERY_BYTES: Final = WINDOW_BYTES // 2
"""A receiver acknowledges after this many bytes: before the window closes, but not after each frame."""
_LENGTHS: Final = struct.Struct("<II8s")
"""After the checksum of a head: the length of the encoded head, then length and checksum of the content."""
_DIGEST_BYTES: Final = 8
_OPENING: Final = b"TQB" + bytes([PROTOCOL])
"""The start of every head: the name of the bulk protocol, and the protocol number, which the control messages share."""
_DIGEST_AT: Final = len(_OPENING)
_LENGTHS_AT: Final = _DIGEST_AT + _DIGEST_BYTES
PRELUDE_BYTES: Final = _LENGTHS_AT + _LENGTHS.size
"""The part of a head up to the length of the rest."""


@dataclass_transform(frozen_default=True)
class BulkHead(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all heads. `transfer` is the number of the transfer, ascending within its connection. Tags are on the
    wire: they stay when a class is renamed."""

    transfer: Count


# ---------------------------------------------------------------- to the shard


class BulkBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block as a reply gives it (`BlockLocation`). `layout`: index of its fields in the layouts of its part."""

    block: Count
    extent: Count
    offset: Count
    nbytes: Count
    rows: Count
    layout: Count
    counts: Counts
    ticket: Ticket


_Part = Annotated[list[Count], Meta(max_length=3)]


class BulkCut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The wanted part of each row's value (`schema.Slice`).

    Args:
        first: of the first dimension: nothing (all of it), two numbers (start, stop), or three (index, of, zigzag) of a
            share.
        inner: of the other dimensions, in the same form; fewer: the rest is whole.
    """

    first: _Part
    inner: Annotated[list[_Part], Meta(max_length=RAGGED_RANK_MAX)]

    @staticmethod
    def of(wanted: Slice) -> BulkCut:
        """A slice in the form of a message."""
        return BulkCut(_numbers(wanted.first), [_numbers(cut) for cut in wanted.inner or ()])

    def slice(self) -> Slice:
        """The slice. `UsageError` if it is invalid."""
        return Slice(_part(self.first), *map(_part, self.inner))


def _numbers(wanted: tuple[int, int] | Share | None) -> list[int]:
    return [wanted.index, wanted.of, int(wanted.zigzag)] if isinstance(wanted, Share) else list(wanted or ())


def _part(numbers: list[int]) -> tuple[int, int] | Share | None:
    if len(numbers) == 3:
        return Share(numbers[0], numbers[1], bool(numbers[2]))
    return tuple(numbers) if numbers else None  # type: ignore[return-value]  # `Slice` refuses anything but a pair


class RowSelection(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The columns `fields` of some rows.

    Args:
        block_of_row: the index into `blocks` of each row (empty: 0).
        slot_of_row: the slot of each row there.
        slices: of each field that is not wanted whole, by name.
        sums: the checksum of each block (0: none), which the shard compares before the read ends, since the receiver of
            a part of a block cannot; empty: no block has one.
    """

    fields: Names
    layouts: Annotated[list[Names], Meta(max_length=PARTS_READ_MAX)]
    blocks: Annotated[list[BulkBlock], Meta(max_length=ITEMS_MAX)]
    block_of_row: I32
    slot_of_row: I32
    slices: Annotated[dict[Text, BulkCut], Meta(max_length=FIELDS_MAX)] = {}
    sums: Annotated[list[Checksum], Meta(max_length=ITEMS_MAX)] = []


class ReadColumns(BulkHead, tag="Read"):
    """Asks for these columns; the shard answers with `ReadFrame`. `fields`: all fields of the blocks."""

    session: Count
    shard: Count
    fields: Fields
    parts: Annotated[list[RowSelection], Meta(max_length=PARTS_READ_MAX)]


class ReadRanges(ReadColumns, tag="ReadRanges"):
    """Asks for these columns by ranges of the shard's memory; the shard answers with `RangesFrame`.

    `agent`, `generation` and `regions` are of the metadata that the client has loaded (`RangesFrame`); "" and 0: none.
    """

    agent: Text
    generation: Count
    regions: Count


class ExtentWrite(BulkHead):
    """The common part of writes: `total` bytes from byte `at` of the arena on, inside this granted extent."""

    session: Count
    shard: Count
    extent: Count
    offset: Count
    nbytes: Count
    ticket: Ticket
    at: Count
    total: Count


class WriteExtent(ExtentWrite, tag="Write"):
    """Starts a write whose bytes come over the connection. Its content is frame 0."""


class ByteRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`nbytes` bytes from `address` on, with their xxh3-64. Of a read: in the shard's process; address 0 means the next
    bytes of the content. Of a write: in the client's process; no range is longer than `FRAME_BYTES`."""

    address: Count
    nbytes: Count
    digest: Annotated[bytes, Meta(max_length=_DIGEST_BYTES)] = b""


class WriteFrame(BulkHead, tag="Data"):
    """The next frame of a write."""

    number: Count


class WriteRanges(ExtentWrite, tag="WriteRanges"):
    """Starts a write whose bytes the shard reads one-sided, in order. Frame 0; without content. The ranges of all
    frames are `total` bytes.

    Args:
        agent: of the client, as in `RangesFrame`.
        generation: likewise.
        regions: likewise.
        metadata: the shard must load it to read the ranges; empty: it has that, or newer.
    """

    agent: Text
    generation: Count
    regions: Count
    metadata: Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)]
    ranges: Annotated[list[ByteRange], Meta(max_length=RANGES_MAX)]


class WriteRangesFrame(BulkHead, tag="DataRanges"):
    """The next ranges of a write of ranges."""

    number: Count
    ranges: Annotated[list[ByteRange], Meta(max_length=RANGES_MAX)]


class FlowAck(BulkHead, tag="Taken"):
    """Acknowledges the first `frames` frames of the transfer. A repeated one asks whether the transfer still lives.

    `done` says that all of a write is stored.
    """

    frames: Count
    done: bool = False


# ---------------------------------------------------------------- to the client


class PartHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Starts a part, whose bytes are a block of its columns. `counts`: of each column, see `schema.layout`."""

    part: Count
    counts: Counts


class ReadFrame(BulkHead, tag="Frame"):
    """The next bytes of a read: first of the parts that began earlier, then of those that begin here."""

    number: Count
    begun: Annotated[list[PartHead], Meta(max_length=PARTS_BEGUN_MAX)]
    last: bool


class RangesFrame(BulkHead, tag="RangesFrame"):
    """The next bytes of a read of ranges, in order: first of the parts that began earlier, then of those that begin
    here.

    Args:
        agent: has registered the ranges.
        generation: how often the agent has given up registered memory.
        regions: how many regions it has ever registered.
        metadata: the client must load it to read the ranges, in place of that of another generation; empty: it has it.
    """

    number: Count
    begun: Annotated[list[PartHead], Meta(max_length=PARTS_BEGUN_MAX)]
    last: bool
    ranges: Annotated[list[ByteRange], Meta(max_length=RANGES_MAX)]
    agent: Text
    generation: Count
    regions: Count
    metadata: Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)]


class TransferFailed(BulkHead, tag="Refused"):
    """Ends the transfer (0: the current one) with an error. `error`: a class name of transferqueue.errors."""

    error: Text
    text: Annotated[str, Meta(max_length=FRAME_BYTES)]


ToShard = ReadColumns | WriteExtent | WriteFrame | FlowAck | ReadRanges | WriteRanges | WriteRangesFrame
ToClient = ReadFrame | FlowAck | TransferFailed | RangesFrame

_Head = TypeVar("_Head")
_encoder: Final = msgspec.msgpack.Encoder()
_to_shard: Final[msgspec.msgpack.Decoder[ToShard]] = msgspec.msgpack.Decoder(ToShard)
_to_client: Final[msgspec.msgpack.Decoder[ToClient]] = msgspec.msgpack.Decoder(ToClient)


class MessageReceiver(Protocol):
    """Receives messages: first the head of each, then its content."""

    def expect(self, head: bytes, nbytes: int) -> None:
        """A head has arrived; `nbytes` bytes of content follow. `Corruption` if the head's checksum does not match."""

    def fill(self, read: Reader) -> int:
        """Let `read` put the next bytes of content at their destination, and return how many."""


def message(head: ToShard | ToClient, content: Sequence[Piece] = (), known: bytes | None = None) -> Message:
    """A message with its checksums. The content must not change until it has been sent. `known`: its checksum, if it
    was computed before."""
    return framed(_encoder.encode(head), content, known), content


def framed(encoded: bytes, content: Sequence[Piece] = (), known: bytes | None = None) -> bytes:
    """An encoded head with its lengths and checksums. `known` is as in `message`."""
    nbytes = 0
    for piece in content:  # not a generator, which is slower with a cold cache between two frames
        nbytes += memoryview(piece).nbytes
    rest = _LENGTHS.pack(len(encoded), nbytes, digest(content) if known is None else known) + encoded
    return _OPENING + digest((rest,)) + rest


def to_shard(head: bytes) -> ToShard:
    """Decode the head of a client's message. `Corruption` if its checksum does not match, `ProtocolError` if it is no
    head."""
    return _decode(_to_shard, head)


def to_client(head: bytes) -> ToClient:
    """Decode the head of a shard's message. Errors as in `to_shard`."""
    return _decode(_to_client, head)


def lengths(prelude: Piece | bytearray) -> tuple[int, int]:
    """The sizes of a head that begins with `prelude`, and of its content, in bytes. `Corruption` if no message is that
    long."""
    if len(prelude) < PRELUDE_BYTES:
        raise Corruption(f"a bulk message of {len(prelude)} bytes is too short to have a checksum")
    if prelude[:_DIGEST_AT] != _OPENING:
        raise Corruption(_not_ours(bytes(prelude[:_DIGEST_AT])))
    encoded, content, _ = _LENGTHS.unpack_from(prelude, _LENGTHS_AT)
    if encoded > BULK_HEAD_BYTES_MAX or content > FRAME_BYTES:
        raise Corruption(
            f"a bulk message claims a head of {encoded} bytes and content of {content}, more than any has: its bytes "
            "changed on the way"
        )
    return PRELUDE_BYTES + encoded, content


def _not_ours(opening: bytes) -> str:
    if opening[:-1] == _OPENING[:-1]:
        return (
            f"a bulk message speaks protocol {opening[-1]} and this end speaks protocol {PROTOCOL}: install the same "
            "package at both ends (`transferqueue docs compatibility`), unless bytes changed on the way"
        )
    return f"a bulk message begins with {opening!r} instead of {_OPENING!r}: its bytes changed on the way"


def check_content(head: Piece | bytearray, actual: bytes) -> None:
    """Raise `Corruption` unless `actual`, the checksum of the received content, is the one in its head."""
    if content_digest(head) != actual:
        raise Corruption("the content of a bulk message does not match its checksum: its bytes changed on the way")


def content_digest(head: Piece | bytearray) -> bytes:
    """The checksum of the content, as its sender computed it, 8 bytes."""
    checksum: bytes = _LENGTHS.unpack_from(head, _LENGTHS_AT)[2]
    return checksum


def digest(content: Sequence[Piece]) -> bytes:
    """The checksum of these pieces in order, 8 bytes."""
    if len(content) == 1:
        return xxhash.xxh3_64_digest(content[0])
    state = xxhash.xxh3_64()
    for piece in content:
        state.update(piece)
    return state.digest()


def reader_of(piece: memoryview) -> Reader:
    """A reader of the bytes of this memory, from its start each time."""

    def read(into: memoryview) -> int:
        size = min(len(into), len(piece))
        into[:size] = piece[:size]
        return size

    return read


def _decode(decoder: msgspec.msgpack.Decoder[_Head], head: bytes) -> _Head:
    lengths(head)
    expected, rest = head[_DIGEST_AT:_LENGTHS_AT], memoryview(head)[_LENGTHS_AT:]
    if digest((rest,)) != expected:
        raise Corruption("the head of a bulk message does not match its checksum: its bytes changed on the way")
    encoded = rest[_LENGTHS.size :]
    try:
        return decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(encoded)} bytes are not a bulk message: {error}") from error


class SendWindow:
    """Rule 4 at the sender: whether a frame of a transfer may be sent now."""

    __slots__ = ("_counted", "_on_the_way", "sent", "taken")

    def __init__(self) -> None:
        self.sent = self.taken = 0
        self._counted: deque[int] = deque()
        self._on_the_way = 0

    @property
    def open(self) -> bool:
        """Whether one more frame may be sent."""
        return self._on_the_way < WINDOW_BYTES

    def send(self, nbytes: int = FRAME_BYTES) -> int:
        """Count one frame as sent, and return its number."""
        self._counted.append(max(nbytes, COUNTED_BYTES_MIN))
        self._on_the_way += self._counted[-1]
        self.sent += 1
        return self.sent - 1

    def took(self, frames: int) -> None:
        """The receiver has acknowledged `frames` frames in total. `ProtocolError` if that is more than were sent."""
        if frames > self.sent:
            raise ProtocolError(f"{frames} bulk frames were acknowledged, but only {self.sent} were sent")
        while self.taken < frames:
            self._on_the_way -= self._counted.popleft()
            self.taken += 1


class ReceiveWindow:
    """Rules 3 and 4 at the receiver: checks the order of frames, and tells when to acknowledge them."""

    __slots__ = ("_unacknowledged", "taken")

    def __init__(self) -> None:
        self.taken = self._unacknowledged = 0

    def take(self, number: int, nbytes: int = FRAME_BYTES) -> None:
        """Count a received frame. `Corruption` if it is not the next one."""
        if number != self.taken:
            raise Corruption(f"bulk frame {number} came instead of frame {self.taken}: frames were lost on the way")
        self.taken += 1
        self._unacknowledged += max(nbytes, COUNTED_BYTES_MIN)

    def due(self, *, last: bool) -> bool:
        """Whether to acknowledge now; if so, the frames count as acknowledged."""
        due = last or self._unacknowledged >= TAKEN_EVERY_BYTES
        if due:
            self._unacknowledged = 0
        return due
