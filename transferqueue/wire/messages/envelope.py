"""What travels: any request or any reply, in its frame."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from transferqueue.limits import MESSAGE_BYTES_MAX
from transferqueue.wire.messages.base import Message, Text
from transferqueue.wire.messages.memory import Grant, Granted, ReturnGrant, Unpin
from transferqueue.wire.messages.observe import Observe, Observed
from transferqueue.wire.messages.rows import (
    Ack,
    CommitCheckpoint,
    Cursor,
    CursorValue,
    Delete,
    Drop,
    Find,
    Found,
    Leased,
    LeaseRequest,
    PutRequest,
    PutRows,
    ReadRequest,
    ReadRows,
    ReleaseRequest,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Rollback,
    Unreserve,
    Update,
)
from transferqueue.wire.messages.session import Goodbye, Heartbeat, Hello, Welcome
from transferqueue.wire.messages.shards import Drain, ListShards, PollCommands, ShardCommands, ShardList
from transferqueue.wire.messages.snapshots import JobProgress, Restore, SnapshotRequest, WatchJob
from transferqueue.wire.messages.tables import (
    AddFields,
    AddTask,
    AdvanceClock,
    CreateTable,
    DropTable,
    ListTables,
    OpenTable,
    Seal,
    Tables,
    TableTerms,
)
from transferqueue.wire.messages.weights import (
    AcquireUpdateSlot,
    GetLatestVersion,
    LatestVersion,
    Publish,
    Pull,
    ReleaseUpdateSlot,
    ReportApplied,
    WeightsReply,
)
from transferqueue.wire.versions import PROTOCOL


class DoneReply(Message, tag="Done"):
    """Accepted, nothing to say. rows: how many rows it concerned."""

    rows: int = 0


class Failed(Message):
    """Refused: nothing was changed. error: a class name of transferqueue.errors."""

    error: Text
    text: Annotated[str, Meta(max_length=MESSAGE_BYTES_MAX)]


Request = (
    Hello | Heartbeat | Goodbye | Unpin | CreateTable | OpenTable | AddTask | AddFields | DropTable | ListTables
    | Seal | AdvanceClock | Grant | ReturnGrant | PutRequest | Update | LeaseRequest | Ack | CommitCheckpoint | Rollback | Cursor | ReleaseRequest | Renew | Reserve | Unreserve
    | Drop | Delete | Find | ReadRequest | Publish | GetLatestVersion | Pull | ReportApplied | AcquireUpdateSlot | ReleaseUpdateSlot | Observe
    | SnapshotRequest | Restore | WatchJob | ListShards | Drain | PollCommands
)  # fmt: skip
Reply = (
    Welcome | TableTerms | Tables | Granted | PutRows | Leased | Renewed | Reserved | Found | ReadRows | WeightsReply
    | LatestVersion | Observed | CursorValue | JobProgress | ShardList | ShardCommands | DoneReply | Failed
)  # fmt: skip


class CallFrame(msgspec.Struct, frozen=True, tag=PROTOCOL, array_like=True, forbid_unknown_fields=True):
    """Client to server, behind the number of the protocol. session: 0 in Hello. id: ascending. seen: all replies up to this id arrived."""

    session: int
    id: int
    seen: int
    request: Request


class AnswerFrame(msgspec.Struct, frozen=True, tag=PROTOCOL, array_like=True, forbid_unknown_fields=True):
    """Server to client, behind the number of the protocol: the reply to call `id`, by coordinator life `epoch`."""

    epoch: int
    id: int
    reply: Reply
