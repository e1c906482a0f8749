"""Every message between a client and the control plane, as typed values. Pure data: no I/O, no code.

A request is answered by exactly one reply, an error (`Failed`), or, if the request may wait, by one of
these later. Requests carry an id that the client chose, ascending within its session; a request sent
again with the same id gets the same answer and changes nothing twice.

Arrays travel as little-endian bytes: `Rows` are int64 row ids, `I64`/`I32`/`F64` what they say.
Everything here is validated for type by the decoder and for meaning by the ledger. Each list, text and map has a bound
that the decoder compares with its count before it makes anything; the ledger's own bounds, which say what to do, are lower.
"""

from __future__ import annotations

from typing import Annotated, Literal, dataclass_transform

import msgspec
from msgspec import Meta

from transferqueue.limits import (
    COPIES_MAX,
    FIELDS_MAX,
    ITEMS_MAX,
    KEY_CHARS_MAX,
    MESSAGE_BYTES_MAX,
    PID_MAX,
    PREDICATES_MAX,
    ROWS_PER_REQUEST_MAX,
    SESSIONS_MAX,
    SNAPSHOTS_KEPT_MAX,
    TAGS_MAX,
    TASKS_MAX,
    TEXT_CHARS_MAX,
    Limits,
)
from transferqueue.policies import Pacing, Predicate, Retention, Task
from transferqueue.schema import Field
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.versions import PROTOCOL

Bytes = Annotated[bytes, Meta(max_length=MESSAGE_BYTES_MAX)]
Rows = Bytes
I64 = Bytes
I32 = Bytes
F64 = Bytes
Name = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Key = Annotated[str, Meta(max_length=KEY_CHARS_MAX)]
WireTags = Annotated[
    dict[
        Annotated[str, Meta(max_length=TEXT_CHARS_MAX)],
        Annotated[str, Meta(max_length=TEXT_CHARS_MAX)] | int | float | bool,
    ],
    Meta(max_length=2 * TAGS_MAX),
]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Checksum = Annotated[int, Meta(ge=0)]
"""xxh3-64: any unsigned integer that a message can hold."""
Path = Annotated[str, Meta(max_length=4096)]
FullPath = Annotated[str, Meta(max_length=2 * 4096)]
"""A `Path` that a client gave, under a directory of the server."""
Pid = Annotated[int, Meta(ge=0, le=PID_MAX)]
"""The number of a process; 0: not told."""
Secret = Annotated[bytes, Meta(min_length=32, max_length=32)]
Step = Annotated[int, Meta(ge=0, le=1 << 53)]
StepOrNone = Annotated[int, Meta(ge=-1, le=1 << 53)]


Fields = Annotated[list[Field], Meta(max_length=ITEMS_MAX)]
TableFields = Annotated[list[Field], Meta(max_length=2 * FIELDS_MAX)]
"""Fields of a table. The ledger's own bound is lower, and says so."""
TableNames = Annotated[list[Name], Meta(max_length=2 * FIELDS_MAX)]
Names = Annotated[list[Name], Meta(max_length=ITEMS_MAX)]
Counts = Annotated[list[Count], Meta(max_length=ITEMS_MAX)]
Tasks = Annotated[list[Task], Meta(max_length=2 * TASKS_MAX)]
Where = Annotated[list[Predicate], Meta(max_length=2 * PREDICATES_MAX)]
Keys = Annotated[list[Key], Meta(max_length=ROWS_PER_REQUEST_MAX)]
RowTags = Annotated[list[WireTags], Meta(max_length=ROWS_PER_REQUEST_MAX)]


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: a tagged array, unknown fields refused."""


# ---------------------------------------------------------------- parts of messages


def tag_of(message: Message | type[Message]) -> str:
    """The name of a message, or of its class, on the wire, in logs, in errors and in statistics: it stays when a class is renamed."""
    return str(message.__struct_config__.tag)


class Inline(Message):
    """Values of one inline scalar field, in the order of the request's rows. `data`: n x item bytes."""

    field: Name
    data: Bytes


class RowFacts(Message):
    """Per-row facts, each None or an array over the request's rows. They are set, never merged."""

    group_id: I64 | None = None
    group_size: I32 | None = None
    ordinal: I64 | None = None
    policy_version: I64 | None = None
    policy_version_max: I64 | None = None
    tokens: I64 | None = None
    priority: F64 | None = None
    keys: Keys | None = None
    tags: RowTags | None = None


class WrittenCopy(Message, tag="CopyAt"):
    """Where else a block was written, in a grant of the sender's: the same bytes, in another shard."""

    extent: Count
    offset: Count


class WrittenBlock(Message, tag="Placed"):
    """A block that the sender has written into an extent granted to it.

    offset: Bytes from the start of the arena, inside the extent. rows: rows of the block. fields: the
    columns in it. counts: one per field (`schema.layout`). slots: for each row of the request the row
    of the block that holds it (int32; None: the same order, one to one); several rows may share one.
    checksum: xxh3-64 of the bytes, by whoever wrote them; 0 where `Welcome` asks for none. copies: as many more as the table has replicas.
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


class Columns(Message):
    """Columns and facts for some rows: what put, update and ack carry."""

    fields: TableFields = []
    """Definitions of the fields used, for the ledger to add or to compare."""
    blocks: Annotated[list[WrittenBlock], Meta(max_length=ITEMS_MAX)] = []
    inline: Annotated[list[Inline], Meta(max_length=ITEMS_MAX)] = []
    facts: RowFacts = RowFacts()


class CopyLocation(Message, tag="Copy"):
    """A further place of a block."""

    shard: int
    extent: int
    offset: int


class BlockLocation(Message, tag="BlockAt"):
    """Where a committed block lies: shard, extent, bytes [offset, offset + nbytes) of the arena, layout.

    ticket: for a session that reads over the bulk endpoint, what it shows there; else empty. copies: where the same bytes lie too; who
    needs tickets is told only the one to read.
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


class ReplyColumns(Message, tag="Part"):
    """Fields that lie together, and where each row of the reply is: index into `blocks` (`short.alike`), row in block
    (`short.ascending`)."""

    fields: Names
    blocks: Annotated[list[BlockLocation], Meta(max_length=ROWS_PER_REQUEST_MAX)]
    block_of_row: I32
    slot_of_row: I32


class ReplyRows(Message, tag="Content"):
    """Rows with their facts (as `short.alike`), inline values and the places of their columns.

    definitions: of all fields in `inline` and `parts`, as `codec.encode_fields`: step after step the same bytes, so that
    who has read them once need not again.

    Naming a block in a reply pins it for the session, once per reply, until `Unpin`.
    """

    rows: Rows
    policy_version: I64
    policy_version_max: I64
    group_id: I64
    group_size: I32
    ordinal: I64
    tokens: I64
    priority: F64
    keys: Annotated[list[Text], Meta(max_length=ROWS_PER_REQUEST_MAX)] | None
    tags: RowTags | None
    inline: Annotated[list[Inline], Meta(max_length=ITEMS_MAX)]
    parts: Annotated[list[ReplyColumns], Meta(max_length=ITEMS_MAX)]
    definitions: Bytes


# ---------------------------------------------------------------- session


class ShardOffer(Message, tag="Offer"):
    """The memory that a session brings: it is a shard. path: of its arena, for processes of its host. capacity: bytes.

    endpoint: tcp address of its bulk endpoint, as others reach it. key: public key of CURVE to expect there; "": none.
    secret: 32 bytes that tickets for it are made with. number: of the shard; the coordinator gives it.
    """

    path: Path
    capacity: Annotated[int, Meta(ge=1, lt=1 << 62)]
    endpoint: Text
    key: Text
    secret: Secret
    number: Count = 0


class Hello(Message):
    """Opens a session. client: 16 random bytes. lock: path of a file the client holds an flock on, or "".

    remote: the client cannot map the arena, or was told not to: its bytes go over the bulk endpoint.
    shard: of a process that joins with memory of its own.
    """

    client: Bytes
    pid: Pid = 0
    host: Text = ""
    lock: Text = ""
    version: Text = ""
    label: Text = ""
    remote: bool = False
    shard: ShardOffer | None = None


class Welcome(Message):
    """A session is open. epoch: this life of the coordinator. arenas: shard -> path of its memory.

    bulk_port: of the bulk endpoint, on the host that the client dialled; 0: the server has none. bulk_plain: it asks for no
    keys and encrypts nothing, whatever the control port does.
    durable: the session outlives the server: when it is gone, wait for the next one at the same address.
    checksums: each block is committed with the checksum of its bytes, since after a reboot that tells whether the device has them.
    seat: which of the coordinators of its deployment this is.
    """

    session: int
    epoch: int
    server: Text
    runtime: Text
    arenas: Annotated[dict[int, Text], Meta(max_length=SESSIONS_MAX)]
    arena_bytes: int
    bulk_port: int = 0
    durable: bool = False
    bulk_plain: bool = False
    seat: CoordinatorIndex = CoordinatorIndex()
    checksums: bool = False


class Heartbeat(Message):
    """Notice: the client lives. No answer."""


class Goodbye(Message):
    """Closes the session: its leases, reservations, grants and pins return at once."""


class Unpin(Message):
    """Notice: blocks no longer viewed; block ids and how many pins of each. No answer."""

    blocks: I64
    counts: I64


# ---------------------------------------------------------------- tables


class CreateTable(Message):
    """A table and its terms. exist_ok: an existing table with the same terms is no error. replicas: shards that have each block.

    extra_fields: whether rows may add fields that the terms do not name; None: if the terms declare no fields.
    """

    name: Name
    fields: TableFields = []
    tasks: Tasks = []
    limits: Limits = Limits()
    pacing: Pacing | None = None
    retention: Retention | None = None
    exist_ok: bool = False
    replicas: Annotated[int, Meta(ge=1)] = 1
    extra_fields: bool | None = None


class OpenTable(Message):
    """The terms of a table, waiting up to `wait_s` for it to be created."""

    name: Name
    wait_s: Seconds = 0.0


class TableTerms(Message):
    """A table as it is: answer to CreateTable, OpenTable, AddTask, AddFields.

    extra_fields: whether rows may add fields that the terms do not name; None: yes, but clients refuse near misses.
    """

    name: Text
    fields: TableFields
    tasks: Tasks
    limits: Limits
    pacing: Pacing | None
    retention: Retention
    sealed: bool
    version: int
    replicas: int = 1
    extra_fields: bool | None = None


class AddTask(Message):
    """One more consumer of an existing table. Answer: TableTerms."""

    table: Name
    task: Task


class AddFields(Message):
    """More fields of an existing table, before any row has them. Answer: TableTerms."""

    table: Name
    fields: TableFields


class DropTable(Message):
    """Removes a table: its rows are dropped (reason ``table_dropped``), its waiters told. empty: refused while it has rows."""

    name: Name
    empty: bool = False


class ListTables(Message):
    """Which tables there are."""


class Tables(Message):
    """Names of the tables, sorted."""

    names: Annotated[list[Text], Meta(max_length=ROWS_PER_REQUEST_MAX)]


class Seal(Message):
    """No more rows will enter."""

    table: Name


class AdvanceClock(Message, tag="Advance"):
    """The table's clock (the trainer's version) is now `version`; it never goes back."""

    table: Name
    version: int
    wait_s: Seconds = 0.0


# ---------------------------------------------------------------- bytes


GrantPurpose = Literal["rows", "results", "weights"]
"""What bytes are for."""


class Grant(Message):
    """An extent of at least `nbytes` in the arena of a near shard, else of another, for this session to write.

    apart: shards that it must not be in, since they have the other copies. `Impossible` if there is no further one.
    use: new rows leave room for what is made of those that are there (`RESULTS_SHARE`); weights, without which nothing goes on, lie
    with the coordinator while it has room.
    """

    nbytes: Annotated[int, Meta(ge=1)]
    wait_s: Seconds = 0.0
    apart: Annotated[list[Count], Meta(max_length=COPIES_MAX)] = []
    use: GrantPurpose = "results"


class Granted(Message):
    """Bytes [offset, offset + nbytes) of the shard's arena are this session's to write. ticket: as of `BlockLocation`."""

    extent: int
    shard: int
    offset: int
    nbytes: int
    ticket: Bytes = b""


class ReturnGrant(Message):
    """The session writes no more into this extent; what it committed there stays."""

    extent: int


# ---------------------------------------------------------------- shards


class ListShards(Message):
    """Which further shards there are. Answer: Shards."""


class ShardEndpoint(Message, tag="ShardAt"):
    """A further shard. path: of its arena, where this session maps it; else "": its bytes cross from `endpoint`.

    key: public key of CURVE to expect there; "": none.
    """

    number: Count
    path: Path
    capacity: Count
    endpoint: Text
    key: Text


class ShardList(Message, tag="Shards"):
    """Answer to ListShards, by number. Not among them: the coordinator's own, which `Welcome` names."""

    shards: Annotated[list[ShardEndpoint], Meta(max_length=SESSIONS_MAX)]


class Drain(Message):
    """Nothing more is granted in this shard, and when nothing is left in it, it ends. Answer: Done, at once."""

    shard: Count


class PollCommands(Message, tag="TakeOrders"):
    """A shard has carried out its orders up to `done` of this `epoch`, but for `failed`; it waits for the next. Answer: Orders."""

    epoch: Count
    done: Count
    failed: Counts = []
    wait_s: Seconds = 0.0


class AllocatePages(Message, tag="Grow"):
    """Give these bytes of the arena pages."""

    offset: Count
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 62)]


class FreePages(Message, tag="Punch"):
    """Nobody needs these bytes of the arena: give their pages back."""

    offset: Count
    nbytes: Annotated[int, Meta(ge=1, lt=1 << 62)]


class Revoke(Message):
    """Nothing of this extent is read or written from now on."""

    extent: Count


class CloseTransfers(Message):
    """This session is over, and so are its transfers."""

    ended: Count


class LiveSet(Message, tag="Stand"):
    """Of all extents numbered below `extents_to` only `extents` stand, of all sessions below `sessions_to` only `sessions`."""

    extents_to: Count
    extents: I64
    sessions_to: Count
    sessions: I64


class ShutDownShard(Message, tag="Leave"):
    """Nothing is left in the shard: it ends."""


Order = AllocatePages | FreePages | Revoke | CloseTransfers | LiveSet | ShutDownShard


class ShardCommands(Message, tag="Orders"):
    """What a shard is to do next, in order, numbered from `first` in this `epoch`."""

    epoch: int
    first: int
    orders: Annotated[list[Order], Meta(max_length=ITEMS_MAX)]


# ---------------------------------------------------------------- rows


class PutRequest(Message, tag="Put"):
    """New rows, columns and facts, in one commit. reservation: 0, or what `Reserve` gave."""

    table: Name
    rows: Annotated[int, Meta(ge=1)]
    columns: Columns
    reservation: int = 0
    wait_s: Seconds = 0.0


class PutRows(Message):
    """The rows of a put: ids ascend from `first`."""

    first: int
    rows: int


class Update(Message):
    """More columns or facts for existing rows, in one commit."""

    table: Name
    rows: Rows
    columns: Columns
    overwrite: bool = False


class LeaseRequest(Message, tag="Lease"):
    """Ready rows of a task. Exactly one of rows, tokens, groups is set (the others 0).

    at_least: fewer may be given once this many (rows, tokens or groups) are ready; 0: the full number.
    When the table is sealed, or the request names a `world` and it is sealed, what is left is given.
    rank, world: this rank's share of one agreed batch of `rows` rows (tokens, groups). replica,
    replicas: this is peer `replica` of `replicas` that get the identical batch of the rank; the lease is
    done when all have acked. fields: None for the task's needs, or the fields wanted.
    """

    table: Name
    task: Name
    rows: Count = 0
    tokens: Count = 0
    groups: Count = 0
    at_least: Count = 0
    wait_s: Seconds = 0.0
    lease_s: Seconds = 0.0
    where: Where = []
    fields: TableNames | None = None
    rank: Count = 0
    world: Annotated[int, Meta(ge=1)] = 1
    replica: Count = 0
    replicas: Annotated[int, Meta(ge=1)] = 1


class Leased(Message):
    """Rows lent until `lease_s` from now. token: fences acks of an earlier holder. version: the clock."""

    lease: int
    token: int
    lease_s: float
    version: int
    content: ReplyRows


class Ack(Message):
    """The rows of a lease are done (rows None: all; else these, the rest stay leased).

    columns: results for the acked rows, in the order of `rows` (or of the lease), committed with the ack.
    drop: instead of done, the rows end as dropped with this reason.
    step: the trainer's; the rows are done for good when `CommitCheckpoint` covers it. -1: they are at once.
    """

    table: Name
    lease: int
    token: int
    rows: Rows | None = None
    columns: Columns | None = None
    drop: Text = ""
    step: StepOrNone = -1


class CommitCheckpoint(Message, tag="Checkpointed"):
    """The model is safe up to `step`: rows acked with it, or one before, are done. Answer: Done, with how many.

    task: "" for the one that sets the pace, or the only one.
    """

    table: Name
    step: Step
    task: Name = ""


class Rollback(Message):
    """The model is again as it was at `step` (-1: at the start): rows acked with a later one are ready again. Answer: Done.

    Leases of the task end. task: as of `CommitCheckpoint`. version: the clock goes back to it; -1: it stays.
    """

    table: Name
    step: StepOrNone
    task: Name = ""
    version: StepOrNone = -1


class Cursor(Message):
    """The lowest ordinal, from `start` on, that was not put yet or of which a row is live. Answer: CursorAt."""

    table: Name
    start: Count = 0


class CursorValue(Message, tag="CursorAt"):
    """Every ordinal from the start of a `Cursor` up to here, exclusive, has its final fate."""

    ordinal: int


class ReleaseRequest(Message, tag="Release"):
    """Rows of a lease go back to ready. failed: counts as an attempt (an exception), with its text.

    columns: what was made of the rows so far, in the order of `rows` (or of the lease); it replaces what they had, and
    commits with the release.
    """

    table: Name
    lease: int
    token: int
    rows: Rows | None = None
    failed: bool = False
    reason: Annotated[str, Meta(max_length=4096)] = ""
    columns: Columns | None = None


class Renew(Message):
    """The lease now ends `lease_s` from now (0: the task's own term). Answer: Renewed."""

    table: Name
    lease: int
    token: int
    lease_s: Seconds = 0.0


class Renewed(Message):
    """Seconds until the renewed lease ends."""

    lease_s: float


class Reserve(Message):
    """Permission to start producing `rows` rows with weights of `policy_version` (-1: the clock)."""

    table: Name
    rows: Annotated[int, Meta(ge=1)]
    policy_version: int = -1
    wait_s: Seconds = 0.0


class Reserved(Message):
    """reservation: names it in `PutRequest`. refills: (group_id, missing members) asked for again; part of rows."""

    reservation: int
    rows: int
    version: int
    refills: Annotated[list[tuple[int, int]], Meta(max_length=ROWS_PER_REQUEST_MAX)]


class Unreserve(Message):
    """Rows of a reservation that will not be produced (rows 0: all that are left)."""

    table: Name
    reservation: int
    rows: Count = 0


class Drop(Message):
    """Rows end as dropped(reason) for every task. Leased rows too: their acks will be refused."""

    table: Name
    rows: Rows
    reason: Name


class Delete(Message):
    """Frees rows of a `Manual` table that are finished (done or dropped) or never will be needed."""

    table: Name
    rows: Rows


class Find(Message):
    """Row ids of keys; -1 where there is none."""

    table: Name
    keys: Keys


class Found(Message):
    """Answer to Find: row ids in the order of its keys."""

    rows: Rows


class ReadRequest(Message, tag="Read"):
    """Rows without a lease: these ids, or all live rows that match `where` (at most `limit`)."""

    table: Name
    rows: Rows | None = None
    fields: TableNames | None = None
    where: Where = []
    limit: Count = 0


class ReadRows(Message):
    """Answer to Read. The rows are not leased; their blocks are pinned."""

    content: ReplyRows


# ---------------------------------------------------------------- weights


class Publish(Message):
    """Version `version` of a channel: blocks of one row, a field per tensor, in one commit.

    keep: versions kept. base, kept: the version is these new blocks and `kept`, blocks of version `base` (-1: of none), whose
    fields are known. Tables whose pacing names the channel advance their clock to `version`.
    """

    channel: Name
    version: Count
    fields: Fields
    blocks: Annotated[list[WrittenBlock], Meta(max_length=ITEMS_MAX)]
    keep: Annotated[int, Meta(ge=1)] = 2
    wait_s: Seconds = 0.0
    base: Annotated[int, Meta(ge=-1)] = -1
    kept: Counts = []


class GetLatestVersion(Message, tag="Basis"):
    """What the next version of a channel may be made of: the blocks of its newest. Answer: BasisAt."""

    channel: Name


class LatestVersion(Message, tag="BasisAt"):
    """The newest version (-1: none yet) with its blocks, which are not pinned.

    extents: size in bytes of each extent they lie in, 0 while more may be written there. lost: how the newest version was
    lost, if it was: then it has no blocks, and the next is published with all its tensors.
    """

    version: int
    fields: Fields
    blocks: Annotated[list[BlockLocation], Meta(max_length=ROWS_PER_REQUEST_MAX)]
    extents: Annotated[dict[int, int], Meta(max_length=ITEMS_MAX)]
    lost: Text = ""


class Pull(Message):
    """The newest version above `above` (or exactly `version` if >= 0), waiting for it."""

    channel: Name
    above: int = -1
    version: int = -1
    wait_s: Seconds = 0.0


class WeightsReply(Message, tag="Weights"):
    """A published version; pins its blocks like `ReplyRows`."""

    version: int
    fields: Fields
    blocks: Annotated[list[BlockLocation], Meta(max_length=ROWS_PER_REQUEST_MAX)]


class ReportApplied(Message, tag="Applied"):
    """This session generates with `version` of a channel from now on."""

    channel: Name
    version: Count


class AcquireUpdateSlot(Message, tag="Turn"):
    """Let this session change its weights, once fewer than `at_once` others do; the turn expires after `length_s`."""

    channel: Name
    at_once: Annotated[int, Meta(ge=1)] = 1
    length_s: Annotated[float, Meta(gt=0, le=1e9)] = 30.0
    wait_s: Seconds = 0.0


class ReleaseUpdateSlot(Message, tag="EndTurn"):
    """The turn of this session is over; none, or one that expired: no error."""

    channel: Name


# ---------------------------------------------------------------- snapshots


class SnapshotRequest(Message, tag="Snapshot"):
    """Write all there is now to `path` under the server's root, and keep the newest `keep` there. Answer: Working, at once."""

    path: Path
    keep: Annotated[int, Meta(ge=1, le=SNAPSHOTS_KEPT_MAX)] = 2


class Restore(Message):
    """An empty deployment becomes what the snapshot at `path` (the newest under it) is of. Answer: Working, at once."""

    path: Path


class WatchJob(Message, tag="Follow"):
    """How far a work is, once it is past `done` bytes or has ended. Answer: Working; `Failed` with what ended it."""

    work: Count
    done: Count = 0
    wait_s: Seconds = 0.0


class JobProgress(Message, tag="Working"):
    """A snapshot or restore that was begun. done of total: bytes, about. path: where, under the server's root; ended: all of it is there."""

    work: int
    path: FullPath
    done: int
    total: int
    ended: bool


# ---------------------------------------------------------------- observation


class Observe(Message):
    """A snapshot for people and metrics. what: "stats", "audit", "row", "doctor", "sessions"."""

    what: Name
    table: Text = ""
    row: int = -1


class Observed(Message):
    """Plain values, MessagePack-encoded: the keys are documented in docs/OBSERVING.md."""

    value: msgspec.Raw


# ---------------------------------------------------------------- outcome and envelope


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
