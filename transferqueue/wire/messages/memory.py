"""Messages about bytes in arenas: locations of blocks, grants to write, pins to return."""

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
    """A further copy of a written block, in a grant of the sender: the same bytes, in another shard."""

    extent: Count
    offset: Count


class WrittenBlock(Message, tag="Placed"):
    """A block that the sender has written into an extent granted to it.

    Args:
        offset: bytes from the start of the arena, inside the extent.
        rows: rows of the block.
        fields: the columns in it.
        counts: one per field (`schema.layout`).
        slots: for each row of the request the row of the block that holds it (int32); several rows may share one. None:
            the same order, one to one.
        checksum: xxh3-64 of the bytes, from their writer; 0 where `Welcome` asks for none.
        copies: the further copies, as many as the table needs for its replicas.
        content: xxh3-128 of the bytes of a block of one value, to which later commits into the table may refer; else
            empty. With extent 0 the block is such a reference: no bytes were written. The request is then refused
            unless the table has a block of this content and layout. None of its existing rows may have the field in a
            newer block beside other fields.
        members: None: the block has a value for each row of the request. Else the column lies in up to `CONTENTS_MAX`
            blocks of one value, each with its content, and these rows of the request, counted from 0 (int32), have this
            value. Each row is in one of the blocks.
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
    """The location of a committed block: shard, extent, bytes [offset, offset + nbytes) of the arena, layout.

    Args:
        ticket: a session that reads over the bulk endpoint presents it there; else empty.
        copies: further places of the same bytes. A session that needs tickets gets only the one to read.
        content: as in `WrittenBlock`; a reader that received the bytes once may keep them.
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
    """Notice: blocks that are no longer viewed; block ids and the number of pins of each. No answer."""

    blocks: I64
    counts: I64


def unpin(blocks: Iterable[int]) -> list[Unpin]:
    """The notices that return one pin of each of `blocks`; none for no blocks."""
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
"""The purpose of granted bytes."""


class Granted(Message):
    """The session may write bytes [offset, offset + nbytes) of the shard's arena. `ticket` is as in `BlockLocation`."""

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

    Args:
        apart: shards that it must not be in, since they have the other copies. `Impossible` if there is no further one.
        use: new rows leave room for the results of existing ones (`RESULTS_SHARE`). Weights, without which no worker
            goes on, lie with the coordinator while it has room.
    """

    nbytes: Annotated[int, Meta(ge=1)]
    wait_s: Seconds = 0.0
    apart: Annotated[list[Count], Meta(max_length=COPIES_MAX)] = []
    use: GrantPurpose = "results"


@request(reply=DoneReply, roles=WORKERS, verb="")
class ReturnGrant(Message):
    """The session writes no more into this extent; its committed blocks stay."""

    extent: int


MemoryRequests = Unpin | Grant | ReturnGrant
MemoryReplies = Granted
