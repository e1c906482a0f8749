"""Messages about rows: put, update, lease, ack and release, checkpoints, reservations, reads."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from transferqueue.limits import (
    BLOCK_ROWS_MAX,
    DROPPED_ROWS_MAX,
    FIELDS_MAX,
    ITEMS_MAX,
    REQUEST_BYTES_MAX,
    ROWS_PER_REQUEST_MAX,
)
from transferqueue.wire.messages.base import (
    F64,
    I32,
    I64,
    Bytes,
    Count,
    DoneReply,
    Keys,
    Message,
    Name,
    Names,
    ReplyTags,
    Rows,
    RowTags,
    Seconds,
    Step,
    StepOrNone,
    TableFields,
    TableNames,
    Text,
    Where,
)
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.messages.memory import BlockLocation, Unpin, WrittenBlock, unpin
from transferqueue.wire.roles import CLIENTS, CONSUMERS, PRODUCERS, WORKERS


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


class Columns(Message):
    """Columns and facts for some rows, in put, update and ack."""

    fields: TableFields = []
    """Definitions of the fields used, which the ledger adds or compares."""
    blocks: Annotated[list[WrittenBlock], Meta(max_length=2 * FIELDS_MAX)] = []
    inline: Annotated[list[Inline], Meta(max_length=2 * FIELDS_MAX)] = []
    facts: RowFacts = RowFacts()


class BlocksRead(Message):
    """The block of these fields in each row when it was read (`codec.encode_constant`). A block number is used once."""

    fields: TableNames
    blocks: I64


class RowsRead(Message):
    """Facts and fields of rows when they were read, in the order of the request's rows. `tags`: None if they do not
    matter."""

    inline: Annotated[list[Inline], Meta(max_length=2 * FIELDS_MAX)] = []
    blocks: Annotated[list[BlocksRead], Meta(max_length=2 * FIELDS_MAX)] = []
    tags: RowTags | None = None


class ReplyColumns(Message, tag="Part"):
    """Fields that lie together, and the place of each row of the reply: its index into `blocks`
    (`codec.encode_constant`), and its row in the block (`codec.encode_ascending`)."""

    fields: Names
    blocks: Annotated[list[BlockLocation], Meta(max_length=BLOCK_ROWS_MAX)]
    block_of_row: I32
    slot_of_row: I32

    @property
    def tree(self) -> ReplyTree | None:
        """This part, if some of its rows continue others."""
        return self if isinstance(self, ReplyTree) else None

    def values(self, rows: int) -> int:
        """The number of values that this part of a reply of `rows` rows places: of its nodes, if it has any."""
        return rows if self.tree is None else len(self.tree.parents) // 4


class ReplyTree(ReplyColumns, tag="Tree"):
    """Fields of which some rows continue others (`ContinueRequest`), the same ones in each. `block_of_row` and
    `slot_of_row` place the nodes of a forest, each stored value once; a row's value is that of its node after those of
    the nodes above it.

    Args:
        parents: the node above each node, as int32, which is before it; -1: none.
        node_of_row: of each row of the reply, as int32.
    """

    parents: I32
    node_of_row: I32


class ReplyRows(Message, tag="Content"):
    """Rows with their facts (as `codec.encode_constant` shortens them), inline values and the places of their columns.

    `definitions` describes all fields in `inline` and `parts`, by `codec.encode_fields`. They are the same bytes step
    after step, so a reader decodes them once.

    A reply that names a block pins it for the session, once per reply, until `Unpin`.
    """

    rows: Rows
    policy_version: I64
    policy_version_max: I64
    group_id: I64
    group_size: I32
    ordinal: I64
    tokens: I64
    priority: F64
    keys: Annotated[list[Text], Meta(max_length=BLOCK_ROWS_MAX)] | None
    tags: ReplyTags | None
    inline: Annotated[list[Inline], Meta(max_length=ITEMS_MAX)]
    parts: Annotated[list[ReplyColumns | ReplyTree], Meta(max_length=ITEMS_MAX)]
    definitions: Bytes


def _unpin(rows: ReplyRows) -> list[Unpin]:
    """The notices that return the pins of a reply: one for each block that it names."""
    return unpin(dict.fromkeys(block.block for part in rows.parts for block in part.blocks))


class PutRows(Message):
    """The rows of a put: ids ascend from `first`. `stale`: the number of rows over the staleness bound already, which
    are older than `fresh_from`."""

    first: int
    rows: int
    stale: Count = 0
    fresh_from: int = 0


_PUT_UNANSWERED: Final = (
    "if they were, the same put again adds them twice: give rows keys (key=), and the second is AlreadyExists, or "
    "look first (find, audit)"
)


@request(
    reply=PutRows,
    roles=PRODUCERS,
    repeat="by_put",
    verb="Table.put",
    unanswered=_PUT_UNANSWERED,
    bytes_max=REQUEST_BYTES_MAX,
)
class PutRequest(Message, tag="Put"):
    """New rows, columns and facts, in one commit. `reservation`: of `Reserve`; 0: none."""

    table: Name
    rows: Annotated[int, Meta(ge=1)]
    columns: Columns
    reservation: int = 0
    wait_s: Seconds = 0.0


@request(
    reply=PutRows,
    roles=PRODUCERS,
    repeat="by_put",
    verb="Table.put",
    unanswered=_PUT_UNANSWERED,
    bytes_max=REQUEST_BYTES_MAX,
)
class ContinueRequest(PutRequest, tag="Continue"):
    """New rows that continue others of the table: their values of some fields are stored without what comes before.

    Args:
        parents: the row that each row continues; -1: none.
        fields: those whose values continue the parent's. Others are whole.
    """

    parents: I64 = b""
    fields: TableNames = []


@request(reply=DoneReply, roles=WORKERS, verb="Table.update", bytes_max=REQUEST_BYTES_MAX)
class Update(Message):
    """More columns or facts for existing rows, in one commit.

    With `if_unchanged`, the answer is the error RowsChanged, and nothing is changed, unless all rows are as they were
    then.
    """

    table: Name
    rows: Rows
    columns: Columns
    overwrite: bool = False
    if_unchanged: RowsRead | None = None


class Leased(Message):
    """Rows lent until `lease_s` from now. `token` fences acks of an earlier holder. `version`: the clock."""

    lease: int
    token: int
    lease_s: float
    version: int
    content: ReplyRows


def _release_lease(request: LeaseRequest, reply: Leased, reason: str) -> list[Message]:
    release = ReleaseRequest(table=request.table, lease=reply.lease, token=reply.token, reason=reason)
    return [release, *_unpin(reply.content)]


@request(reply=Leased, roles=CONSUMERS, undo=_release_lease, verb="Table.lease", bytes_max=REQUEST_BYTES_MAX)
class LeaseRequest(Message, tag="Lease"):
    """Ready rows of a task. Exactly one of rows, tokens, groups is set (the others 0).

    Args:
        at_least: fewer may be given once this many (rows, tokens or groups) are ready; 0: the full number. When the
            table is sealed, the rest is given, also to a request with a `world`.
        rank: of the caller; with `world`, it gets its share of one agreed batch of `rows` rows (tokens, groups).
        world: the number of ranks.
        replica: of the caller among `replicas` peers that get the identical batch of the rank.
        replicas: their number; the lease is done when all have acked.
        fields: the wanted fields; None: the task's needs.
        awaited: first and last ordinal of each span that the caller expects, ascending. If no row can be given and all
            rows of a span have ended, the answer is OrdinalsEnded.
        but_held: rows that this session has on lease do not come again, so the table has ended if only they are left.
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
    awaited: I64 = b""
    but_held: bool = False


class OrdinalsEnded(Message):
    """Answer to a Lease that gave no row: these of its awaited spans will bring none any more."""

    awaited: I64


@request(reply=DoneReply, roles=CONSUMERS, verb="Batch.ack", bytes_max=REQUEST_BYTES_MAX)
class Ack(Message):
    """The rows of a lease are done (rows None: all; else these, the rest stay leased).

    Args:
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


@request(reply=DoneReply, roles=CONSUMERS, verb="Table.ack")
class AckLeases(Message):
    """All rows that these leases of one task still hold are done, in one commit: all of the leases, or none.

    `leases` and `tokens` have one item for every lease. `step` is as in `Ack`.
    """

    table: Name
    leases: I64
    tokens: I64
    step: StepOrNone = -1


@request(reply=DoneReply, roles=CONSUMERS, verb="Table.checkpointed")
class CommitCheckpoint(Message, tag="Checkpointed"):
    """The model is safe up to `step`: rows acked with it, or an earlier one, are done. Answer: Done, with their number.

    `task`: "" for the one that sets the pace, or the only one.
    """

    table: Name
    step: Step
    task: Name = ""


@request(reply=DoneReply, roles=CONSUMERS, verb="Table.rollback")
class Rollback(Message):
    """The model is back at `step` (-1: at the start): rows acked with a later step are ready again. Answer: Done.

    Leases of the task end. `task` is as in `CommitCheckpoint`. `version`: the clock goes back to it; -1: it stays.
    """

    table: Name
    step: StepOrNone
    task: Name = ""
    version: StepOrNone = -1


class CursorValue(Message, tag="CursorAt"):
    """Every ordinal from the start of a `Cursor` up to here, exclusive, has its final fate."""

    ordinal: int


@request(reply=CursorValue, roles=CLIENTS, repeat="again", reads=True, verb="Table.cursor")
class Cursor(Message):
    """The lowest ordinal, from `start` on, that was not put yet or of which a row is live. Answer: CursorAt."""

    table: Name
    start: Count = 0


@request(reply=DoneReply, roles=CONSUMERS, verb="Batch.release", bytes_max=REQUEST_BYTES_MAX)
class ReleaseRequest(Message, tag="Release"):
    """Rows of a lease go back to ready. `failed`: counts as an attempt (an exception), with its text.

    `columns` are partial results, in the order of `rows` (or of the lease). They replace earlier values and commit with
    the release.
    """

    table: Name
    lease: int
    token: int
    rows: Rows | None = None
    failed: bool = False
    reason: Annotated[str, Meta(max_length=4096)] = ""
    columns: Columns | None = None


class Renewed(Message):
    """Seconds until the renewed lease ends."""

    lease_s: float


@request(reply=Renewed, roles=CONSUMERS, verb="Batch.renew")
class Renew(Message):
    """The lease now ends `lease_s` from now (0: the task's own term). Answer: Renewed."""

    table: Name
    lease: int
    token: int
    lease_s: Seconds = 0.0


class Reserved(Message):
    """`reservation` names it in `PutRequest`. `refills`: (group_id, missing members) asked for again; part of rows."""

    reservation: int
    rows: int
    version: int
    refills: Annotated[list[tuple[int, int]], Meta(max_length=ROWS_PER_REQUEST_MAX)]


def _return_reservation(request: Reserve, reply: Reserved, reason: str) -> list[Unreserve]:
    return [Unreserve(table=request.table, reservation=reply.reservation)]


@request(reply=Reserved, roles=PRODUCERS, undo=_return_reservation, verb="Table.reserve")
class Reserve(Message):
    """Permission to start producing `rows` rows with weights of `policy_version` (-1: the clock)."""

    table: Name
    rows: Annotated[int, Meta(ge=1)]
    policy_version: int = -1
    wait_s: Seconds = 0.0


@request(reply=DoneReply, roles=PRODUCERS, verb="Reservation.release")
class Unreserve(Message):
    """Rows of a reservation that will not be produced (rows 0: all that are left)."""

    table: Name
    reservation: int
    rows: Count = 0


@request(reply=DoneReply, roles=WORKERS, verb="Table.drop", bytes_max=REQUEST_BYTES_MAX)
class Drop(Message):
    """Rows end as dropped(reason) for every task. Leased rows too: their acks will be refused."""

    table: Name
    rows: Rows
    reason: Name


class DroppedRow(Message):
    """A row that was dropped for failing too often, and can be taken again. `error` is its last failure, in `task`, by
    `worker`. `age_s`: since it was dropped."""

    row: int
    key: Text
    task: Name
    reason: Name
    error: Text
    worker: Text
    age_s: float


class DroppedRows(Message):
    """The latest first."""

    rows: Annotated[list[DroppedRow], Meta(max_length=DROPPED_ROWS_MAX)]


@request(reply=DroppedRows, roles=WORKERS, repeat="again", reads=True, verb="Table.dropped")
class ListDropped(Message):
    """Rows that were dropped for failing too often and can be taken again, at most `limit` (0: all)."""

    table: Name
    limit: Count = 0


@request(reply=DoneReply, roles=WORKERS, verb="Table.retry", bytes_max=REQUEST_BYTES_MAX)
class RetryRows(Message):
    """Rows that `ListDropped` lists are live again, as if they had never failed."""

    table: Name
    rows: Rows


@request(reply=DoneReply, roles=CONSUMERS, verb="Table.delete", bytes_max=REQUEST_BYTES_MAX)
class Delete(Message):
    """Frees rows of a `Manual` table that are finished (done or dropped) or never will be needed."""

    table: Name
    rows: Rows


class Found(Message):
    """Answer to Find: row ids in the order of its keys."""

    rows: Rows


@request(reply=Found, roles=WORKERS, repeat="again", reads=True, verb="Table.find", bytes_max=REQUEST_BYTES_MAX)
class Find(Message):
    """Row ids of keys; -1 where there is none."""

    table: Name
    keys: Keys


class ReadRows(Message):
    """Answer to Read. The rows are not leased; their blocks are pinned."""

    content: ReplyRows


def _unpin_rows(request: ReadRequest, reply: ReadRows, reason: str) -> list[Unpin]:
    return _unpin(reply.content)


@request(reply=ReadRows, roles=CONSUMERS, undo=_unpin_rows, verb="Table.read", bytes_max=REQUEST_BYTES_MAX)
class ReadRequest(Message, tag="Read"):
    """Rows without a lease: these ids, or all live rows that match `where` (at most `limit`)."""

    table: Name
    rows: Rows | None = None
    fields: TableNames | None = None
    where: Where = []
    limit: Count = 0


@request(reply=DoneReply, roles=CONSUMERS, verb="Table.free_columns", bytes_max=REQUEST_BYTES_MAX)
class FreeColumns(Message):
    """Frees these columns of rows, which live on. With `again`, tasks that need one of them wait until it is written
    again; else the request is refused while such a task has work with a row. Answer: the number of freed values."""

    table: Name
    rows: Rows
    fields: TableNames
    again: bool = False


RowRequests = (
    PutRequest
    | ContinueRequest
    | Update
    | LeaseRequest
    | Ack
    | AckLeases
    | CommitCheckpoint
    | Rollback
    | Cursor
    | ReleaseRequest
    | Renew
    | Reserve
    | Unreserve
    | Drop
    | ListDropped
    | RetryRows
    | Delete
    | Find
    | ReadRequest
    | FreeColumns
)
RowReplies = PutRows | Leased | OrdinalsEnded | CursorValue | Renewed | Reserved | Found | ReadRows | DroppedRows
