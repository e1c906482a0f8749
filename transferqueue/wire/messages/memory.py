"""Messages about bytes in arenas: where a block lies, grants to write, pins to return."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

from transferqueue.limits import COPIES_MAX, ITEMS_MAX, UNPINNED_MAX
from transferqueue.wire.messages.base import (
    I32,
    I64,
    Bytes,
    Checksum,
    Content,
    Count,
    Counts,
    DoneReply,
    Message,
    Names,
    Seconds,
)
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.roles import CLIENTS, WORKERS


class WrittenCopy(Message, tag="CopyAt"):
    """Where else a block was written, in a grant of the sender's: the same bytes, in another shard."""

    extent: Count
    offset: Count


class WrittenBlock(Message, tag="Placed"):
    """A block that the sender has written into an extent granted to it.

    offset: Bytes from the start of the arena, inside the extent. rows: rows of the block. fields: the
    columns in it. counts: one per field (`schema.layout`). slots: for each row of the request the row
    of the block that holds it (int32; None: the same order, one to one); several rows may share one.
    checksum: xxh3-64 of the bytes, by whoever wrote them; 0 where `Welcome` asks for none. copies: as many more as the
    table has replicas. content: of a block of one value that later commits into the table may refer to, xxh3-128 of its
    bytes; else empty. A block with a content and extent 0 is such a reference: nothing was written, and the request is
    refused unless the table has a block of this content and layout. Of rows that exist already none may have the field
    in a newer block beside other fields. members: None: the block has a value
    for each row of the request. Else the column lies in up to `CONTENTS_MAX` blocks of one value, each with its
    content: the rows of the request that have this one, counted from 0 (int32). Each row is in one of them.
    """

    extent: Count
    offset: Count
    nbytes: Count
    rows: Count
    fields: Names
    counts: Counts
    slots: I32 | None = None
    checksum: Checksum = 0
    copies: Annotated[list[WrittenCopy], Meta(max_length=COPIES_MAX)] = []
    content: Content = b""
    members: I32 | None = None


class CopyLocation(Message, tag="Copy"):
    """A further place of a block."""

    shard: int
    extent: int
    offset: int


class BlockLocation(Message, tag="BlockAt"):
    """Where a committed block lies: shard, extent, bytes [offset, offset + nbytes) of the arena, layout.

    ticket: for a session that reads over the bulk endpoint, what it shows there; else empty. copies: where the same
    bytes lie too; who needs tickets is told only the one to read. content: as of `WrittenBlock`; a reader that received
    the bytes once may keep them.
    """

    block: int
    shard: int
    extent: int
    offset: int
    nbytes: int
    rows: int
    fields: Names
    counts: Annotated[list[int], Meta(max_length=ITEMS_MAX)]
    checksum: int = 0
    ticket: Bytes = b""
    copies: Annotated[list[CopyLocation], Meta(max_length=COPIES_MAX)] = []
    content: Content = b""


@request(reply=None, roles=CLIENTS, verb="")
class Unpin(Message):
    """Notice: blocks no longer viewed; block ids and how many pins of each. No answer."""

    blocks: I64
    counts: I64


def unpin(blocks: Iterable[int]) -> list[Unpin]:
    """The notices that one pin of each of `blocks` is returned; nothing for no blocks."""
    counts: dict[int, int] = {}
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1
    ids, pins = list(counts), list(counts.values())
    return [
        Unpin(blocks=_int64s(ids[at : at + UNPINNED_MAX]), counts=_int64s(pins[at : at + UNPINNED_MAX]))
        for at in range(0, len(ids), UNPINNED_MAX)
    ]


def _int64s(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


GrantPurpose = Literal["rows", "results", "weights"]
"""What bytes are for."""


class Granted(Message):
    """Bytes [offset, offset + nbytes) of the shard's arena are this session's to write. ticket: as of
    `BlockLocation`."""

    extent: int
    shard: int
    offset: int
    nbytes: int
    ticket: Bytes = b""


def _return_grant(request: Grant, reply: Granted, reason: str) -> list[ReturnGrant]:
    return [ReturnGrant(extent=reply.extent)]


@request(reply=Granted, roles=WORKERS, undo=_return_grant, verb="Table.put")
class Grant(Message):
    """An extent of at least `nbytes` in the arena of a near shard, else of another, for this session to write.

    apart: shards that it must not be in, since they have the other copies. `Impossible` if there is no further one.
    use: new rows leave room for what is made of those that are there (`RESULTS_SHARE`); weights, without which nothing
    goes on, lie with the coordinator while it has room.
    """

    nbytes: Annotated[int, Meta(ge=1)]
    wait_s: Seconds = 0.0
    apart: Annotated[list[Count], Meta(max_length=COPIES_MAX)] = []
    use: GrantPurpose = "results"


@request(reply=DoneReply, roles=WORKERS, verb="")
class ReturnGrant(Message):
    """The session writes no more into this extent; what it committed there stays."""

    extent: int


MemoryRequests = Unpin | Grant | ReturnGrant
MemoryReplies = Granted
