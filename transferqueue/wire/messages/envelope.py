"""Frames: any request or any reply, with its envelope."""

from __future__ import annotations

import msgspec

from transferqueue.wire.messages.base import DoneReply, Failed
from transferqueue.wire.messages.memory import MemoryReplies, MemoryRequests
from transferqueue.wire.messages.observe import ObserveReplies, ObserveRequests
from transferqueue.wire.messages.rows import RowReplies, RowRequests
from transferqueue.wire.messages.session import SessionReplies, SessionRequests
from transferqueue.wire.messages.shards import ShardReplies, ShardRequests
from transferqueue.wire.messages.snapshots import SnapshotReplies, SnapshotRequests
from transferqueue.wire.messages.tables import TableReplies, TableRequests
from transferqueue.wire.messages.weights import WeightReplies, WeightRequests
from transferqueue.wire.versions import PROTOCOL

Request = (
    SessionRequests
    | MemoryRequests
    | TableRequests
    | RowRequests
    | WeightRequests
    | ShardRequests
    | SnapshotRequests
    | ObserveRequests
)
Reply = (
    SessionReplies
    | MemoryReplies
    | TableReplies
    | RowReplies
    | WeightReplies
    | ShardReplies
    | SnapshotReplies
    | ObserveReplies
    | DoneReply
    | Failed
)


class CallFrame(msgspec.Struct, frozen=True, tag=PROTOCOL, array_like=True, forbid_unknown_fields=True):
    """Client to server, behind the number of the protocol. `session`: 0 in Hello. `id`: ascending. `seen`: the client
    has all replies up to this id."""

    session: int
    id: int
    seen: int
    request: Request


class AnswerFrame(msgspec.Struct, frozen=True, tag=PROTOCOL, array_like=True, forbid_unknown_fields=True):
    """Server to client, behind the number of the protocol: the reply to call `id`, by coordinator life `epoch`."""

    epoch: int
    id: int
    reply: Reply
