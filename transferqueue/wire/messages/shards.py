"""Messages between the coordinator and shards that joined, and about those shards."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transferqueue.limits import COPY_ORDER_BLOCKS, ITEMS_MAX, REQUEST_BYTES_MAX, SHARDS_MAX
from transferqueue.wire.messages.base import I64, Count, Counts, DoneReply, Message, Path, Seconds, Text
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.messages.memory import BlockLocation, Granted
from transferqueue.wire.roles import ADMINS, SHARDS, WORKERS


class ShardList(Message, tag="Shards"):
    """Answer to ListShards, by number, without the coordinator's own, which `Welcome` names."""

    shards: Annotated[list[ShardEndpoint], Meta(max_length=SHARDS_MAX)]


@request(reply=ShardList, roles=WORKERS | SHARDS, repeat="again", reads=True, verb="")
class ListShards(Message):
    """Asks for the remote shards. Answer: Shards."""


class ShardEndpoint(Message, tag="ShardAt"):
    """A remote shard.

    Args:
        path: of its arena, if this session maps it; else "", and its bytes cross from `endpoint`.
        certificate: fingerprint of the certificate to expect there; "": it does not encrypt.
    """

    number: Count
    path: Path
    capacity: Count
    endpoint: Text
    certificate: Text


@request(reply=DoneReply, roles=ADMINS, repeat="again", verb="Queue.drain_shard")
class Drain(Message):
    """The shard grants nothing more, and ends when it is empty. Answer: Done, at once."""

    shard: Count


class ShardCommands(Message, tag="Orders"):
    """The next commands of a shard, in order, numbered from `first` in this `epoch`."""

    epoch: int
    first: int
    orders: Annotated[list[Order], Meta(max_length=ITEMS_MAX)]


@request(reply=ShardCommands, roles=SHARDS, repeat="again", verb="", bytes_max=REQUEST_BYTES_MAX)
class PollCommands(Message, tag="TakeOrders"):
    """A shard has carried out its orders up to `done` of this `epoch`, but for `failed`, and waits for the next.
    Answer: Orders.

    `sent` and `received` are the bytes that clients have read from it and written to it since it started: over its
    stream, and one-sided.
    """

    epoch: Count
    done: Count
    failed: Counts = []
    wait_s: Seconds = 0.0
    sent: tuple[Count, Count] = (0, 0)
    received: tuple[Count, Count] = (0, 0)


class AllocatePages(Message, tag="Grow"):
    """Give these bytes of the arena pages."""

    offset: Count
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 62)]


class FreePages(Message, tag="Punch"):
    """These bytes of the arena are unused: give their pages back."""

    offset: Count
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 62)]


class Revoke(Message):
    """No byte of this extent is read or written from now on."""

    extent: Count


class CloseTransfers(Message):
    """This session is over, and so are its transfers."""

    ended: Count


class LiveSet(Message, tag="Stand"):
    """Below `extents_to` only these `extents` are live, and below `sessions_to` only these `sessions`."""

    extents_to: Count
    extents: I64
    sessions_to: Count
    sessions: I64


class ShutDownShard(Message, tag="Leave"):
    """The shard is empty: it ends."""


Order = AllocatePages | FreePages | Revoke | CloseTransfers | LiveSet | ShutDownShard


class CopyOrder(Message):
    """Blocks that this shard, number `shard`, copies into the extent `target`, each to the byte of the arena in
    `offsets`.

    Each block names its source, without fields. A block that is read or written in another shard, or here, has a
    ticket.
    """

    shard: Count
    target: Granted
    blocks: Annotated[list[BlockLocation], Meta(max_length=COPY_ORDER_BLOCKS)]
    offsets: Annotated[list[Count], Meta(max_length=COPY_ORDER_BLOCKS)]


@request(reply=CopyOrder, roles=SHARDS, repeat="again", verb="")
class TakeCopies(Message):
    """A shard has written the blocks `written` into the extent of its copy order (0: it had none), and waits for the
    next. Answer: CopyOrder; the same one again if another extent is named than that of the order."""

    extent: Count = 0
    written: Annotated[list[Count], Meta(max_length=COPY_ORDER_BLOCKS)] = []
    wait_s: Seconds = 0.0


ShardRequests = ListShards | Drain | PollCommands | TakeCopies
ShardReplies = ShardList | ShardCommands | CopyOrder
