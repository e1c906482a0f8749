"""All bounds of the system, in one place, each with its reason.

There are two kinds: constants of the implementation (upper case), and `Limits`, which bounds one table. A count that a
peer sent is compared with its bound here before anything is allocated for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from transferqueue.errors import UsageError
from transferqueue.errors.text import shown

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

NAME_CHARS_MAX: Final = 128
"""A name is printed in every error and metric; longer ones are data, not names."""
KEY_CHARS_MAX: Final = 512
"""User keys (uids, paths) are longer than names, but are held in memory for every live row."""
FIELDS_MAX: Final = 1024
"""Sixteen words of ready mask per row; wider tables want several tables."""
TASKS_MAX: Final = 64
"""Each task costs a byte of state and 18 of lease, order and attempts per resident row."""
NEEDS_MAX: Final = 4 * FIELDS_MAX
"""Fields that the tasks of one request need and give together: each costs about 2 microseconds."""
TABLES_MAX: Final = 4096
SESSIONS_MAX: Final = 1 << 15
"""Of one coordinator: twice the processes of 1,024 nodes. An idle one takes about 4 KiB of it, and up to three
descriptors."""
SHARDS_MAX: Final = 4096
"""Of one coordinator; each shard's list of the others is a message."""
PID_MAX: Final = (1 << 31) - 1
"""The largest process number of the kernel's interface, a C int."""
SNAPSHOTS_KEPT_MAX: Final = 1 << 20
"""Snapshots under one path: one a minute for two years."""
KEYS_MAX: Final = 4096
"""Clients in a server's key file: no more than may be connected at once."""
COORDINATORS_MAX: Final = 64
"""A client has a session, a thread and a mapping for each coordinator, and one coordinator serves a few machines."""
PARTS_MAX: Final = 256
"""Distinct sets of fields written together, per table: each costs 12 bytes per resident row of a page."""
TAGS_MAX: Final = 64
"""Tags per row. More, or larger, belongs in a column."""
TAG_CHARS_MAX: Final = 1024
PREDICATES_MAX: Final = 16
"""Predicates of one `where`: each is evaluated for every row that becomes ready."""
VIEWS_MAX: Final = 8
"""Distinct `where` of a task that have an index. Beyond that, the least recently used index is dropped and rebuilt when
needed."""
REASONS_MAX: Final = 256
"""Distinct reasons of dropped rows, per table: each has a counter for ever."""
REPLICAS_MAX: Final = 4096
"""Peers that share one batch: no more than sessions."""
MEMORY_MARGIN_BYTES: Final = 2 * MIB
"""Memory that an operation of the ledger reserves, beside that of its rows, before its first write: a small one needs
kilobytes, and its reply and its record are encoded after it. From 4 MiB on, reserving costs a system call."""
ROW_MEMORY_BYTES: Final = 256
"""Of the server's memory for each row that an operation touches: arrays of ids and places, entries of queues. 142 were
measured."""
NEW_ROW_MEMORY_BYTES: Final = 512
"""More for each put row, beside the growth of the table's columns: its key and tags. 384 were measured."""
KEY_MEMORY_BYTES: Final = 80
"""More for each key that a table has, when rows are put: its dictionaries are made anew as they grow."""
COPIES_MAX: Final = 4
"""Shards that store each block of a table (`replicas`). Two survive the loss of any one; each further copy costs the
bytes again."""
LEASES_REMEMBERED_MAX: Final = 4096
"""Ended leases whose reason is remembered, so that the error of a late worker can name it."""
HISTORY_EVENTS_MAX: Final = 4096
"""Events of a table that `inspect` can show: one for each request, with its row ids."""
HISTORY_ROWS_MAX: Final = 1 << 18
"""Row ids in these events, 8 bytes each."""
RECORDED_EVENTS_MAX: Final = 1 << 16
"""As `HISTORY_EVENTS_MAX`, of a table that records its rows: their lineage is taken from the events when they end."""
RECORDED_EVENT_ROWS_MAX: Final = 1 << 20
"""As `HISTORY_ROWS_MAX`, of such a table."""
EVENT_TEXT_CHARS_MAX: Final = 1024
"""Of the detail of one event; a longer one is cut. An update of 1,024 fields would name 128 KiB of them, and an answer
of 1,024 events 128 MiB."""
RECORDED_WORKERS_MAX: Final = 1 << 14
"""Names of ended sessions that a table keeps for the lineage of its rows: 100 bytes each."""
EVENTS_TOLD_MAX: Final = 1024
"""Events in one answer to `ListEvents`: a millisecond of the server's time. Page for more."""
EVENT_ROWS_TOLD_MAX: Final = 1 << 16
"""Row ids that one such answer looks at, unless its first event alone has more; and those that it tells of one
event."""
TURN_S_MAX: Final = 0.02
"""The most processor time that one request may take of the server, since all others wait for it: the bounds of requests
below follow from it. A turn above it counts as late."""
ROW_NS: Final = 30
"""Estimated costs of a request, in nanoseconds of an AMD EPYC of a cloud; `check_work` bounds their sum. This: a row
that is put, changed, leased, read or dropped."""
VALUE_NS: Final = 8
"""A fact or column of a row."""
SPACE_NS: Final = 2
"""The place of a new row in each inline column of its table."""
TASK_NS: Final = 12
"""A row in a task that takes rows as they come."""
RANKED_NS: Final = 140
"""A row in a task with another selector, which sorts it."""
RERANKED_NS: Final = 500
"""A row that is sorted again there, since a fact of it changed."""
VERSION_NS: Final = 800
"""A policy version of the rows of a put, in a table with pacing."""
LEASE_NS: Final = 15_000
"""A lease that ends since its rows are dropped."""
GROUP_NS: Final = 1_000
"""A group that is put, and again for each task that takes groups when it is dropped."""
UNIT_NS: Final = 1_400
"""A group, or a row without one, in a task that takes groups."""
MEMBER_NS: Final = 80
"""A row that has a group."""
KEY_NS: Final = 230
"""The key of a row that is put or changed."""
READ_KEY_NS: Final = 120
"""The key of a row that is read, or asked for."""
TAGGED_NS: Final = 100
"""A row with tags; and `TAG_NS` for each of them."""
TAG_NS: Final = 130
READ_TAG_NS: Final = 30
"""A tag of a row that is read."""
SHARED_NS: Final = 400
"""A row of a batch that ranks share."""
RANK_NS: Final = 6_000
"""A rank's share of such a batch."""
CONTINUED_NS: Final = 500
"""A field of a row that is put and continues another."""
CONTINUED_ROWS: Final = 64
"""As many more rows is the cost of each such field: its parents' values may lie in a block of their own."""
FEW_ROWS: Final = 1 << 8
"""The cost of so few rows, each in `TASKS_MAX` tasks, is not estimated."""
ROWS_PER_REQUEST_MAX: Final = 1 << 16
"""Rows of one request. A put of so many with plain values takes 3 milliseconds; other contents may bound them further
(`check_work`)."""
ROWS_DESCRIBED_MAX: Final = 1 << 14
"""Rows with keys or tags of one put or update: with one each, together 8 milliseconds."""
GROUPS_PER_REQUEST_MAX: Final = 1 << 12
"""Groups of one lease: each costs up to 3 microseconds when it is leased, acked or released."""
LEASES_PER_REQUEST_MAX: Final = 256
"""Leases that one request acknowledges: each takes up to 40 microseconds."""
BLOCK_ROWS_MAX: Final = 1 << 20
"""Rows of one block. Stored blocks of earlier versions have more rows than a request may have now."""
CONTINUED_MAX: Final = 256
"""Rows that one row continues, one after another: more turns than an episode has."""
NODES_MAX: Final = 1 << 15
"""Stored values that a reply names since rows continue others: 256 rows of 128 turns. It takes 13 milliseconds if they
were put together, and up to 80 if each has a block of its own, more than `TURN_S_MAX`, so that groups come whole."""
ENDS_MAX: Final = 1 << 11
"""Values before others that one turn lets go of, each at 3.5 microseconds; the rest follow in later turns."""
END_INTERVAL_S: Final = 0.001
"""Between such turns."""
SPANS_AWAITED_MAX: Final = 1 << 16
"""Spans of ordinals that one waiting lease names, 16 bytes each: more than the prompts of a step and of those generated
ahead."""
MESSAGE_BYTES_MAX: Final = 64 * MIB
"""One answer of a server, or one message between shards. Requests are smaller: `REQUEST_BYTES_MAX`."""
SMALL_FRAME_BYTES: Final = 16 * KIB
"""A request of this size is decoded before its sender's role is asked: it takes at most a millisecond. Most kinds of
requests may not be larger, and so may no request of an observer, nor the first message of a connection."""
REQUEST_BYTES_MAX: Final = 2 * MIB
"""The largest request about rows: 16,384 (`ROWS_DESCRIBED_MAX`) with a key of 30 characters, all numeric facts and a
tag, or 65,536 with their ids and three numbers of 8 bytes. As many small items take up to 20 ms to decode."""
PUBLISH_BYTES_MAX: Final = 4 * MIB
"""A publication of weights, the only larger request: about 115 bytes a tensor, for models of experts with 30,000
tensors. It takes 5 microseconds a tensor, so more than `TURN_S_MAX` above 4,000; a version can be published in
parts."""
TERMS_BYTES_MAX: Final = 256 * KIB
"""A request with the terms of a table: 1,024 fields (`FIELDS_MAX`) with names of 128 characters are 150 KB, and 64
tasks name some."""
ITEMS_MAX: Final = 1 << 16
"""Items of a list of fields or tensors in a message: far more than a table or a model has. A list of rows has at most
`ROWS_PER_REQUEST_MAX` items. So a frame of many one-byte items decodes to a bounded multiple of its size."""
VERSION_PARTS_MAX: Final = 1024
"""Parts of one version of weights, each published by a process of its own: more than the ranks of one copy of a
model."""
DELTAS_MAX: Final = 32
"""Differences of a tensor in a version: more would save little of what a whole tensor costs once in so many versions,
and a late reader applies all of them."""
DELTA_SECTIONS_MAX: Final = 16
"""Sections of a difference, which a reader of a part fetches apart from each other: as many as engines of one model are
parallel by tensors."""
DELTA_BYTES_MIN: Final = 4096
"""A smaller tensor is published whole: its difference would be described by more bytes than it saves."""
DELTA_TENSORS_MAX: Final = 6144
"""Of more tensors at once none is published as a difference: the request has two fields for each, and its bound is
`PUBLISH_BYTES_MAX`."""
RELAY_PART_BYTES: Final = 4 * MIB
"""Bytes that a relay forwards at once: about one link's bandwidth-delay product (200 Mbit/s pass it in 0.17 s), and
large against the two requests that each part costs."""
RELAY_PARTS_GROWTH: Final = 128
"""A part of a relay has at least this share of what came before it: 1,023 parts then hold 500 GB, and none delays a
version by 1 %."""
NOTE_BYTES_MAX: Final = 16 * KIB
"""The note of a server that ended, which is the text of an error."""
TEXT_CHARS_MAX: Final = 4096
"""A text in a message that is not a name: a path, a label, a reason."""
VALUE_DEPTH_MAX: Final = 32
"""Nesting of a plain value (dicts and lists) stored as MessagePack."""
VALUE_NODES_MAX: Final = 1 << 22
"""Parts of one plain value: a few shared lists nested in each other would otherwise encode to huge sizes."""
PAGE_ROWS: Final = 4096
"""Rows of a ledger page: large enough to amortise numpy calls, small enough that stragglers pin little."""
ALIGNMENT: Final = 64
"""Bytes; Arrow's recommendation for buffers, and a cache line."""
PAGE_BYTES: Final = 4096
"""Extents begin and end on pages, so that a private mapping can drop the pages of one extent without its neighbour."""
SMALL_EXTENT_BYTES: Final = 256 * KIB
"""Puts below this share an extent: a one-row put costs its bytes, not a page per put."""
COLUMN_APART_BYTES: Final = SMALL_EXTENT_BYTES
"""A column of a put of this many bytes gets memory of its own in a table with `ManualColumns`: the round trip for it
costs less than the copy."""
BY_CONTENT_BYTES_MIN: Final = 4 * KIB
"""Bytes of a value, in the mean of a column, from which `Repeat` stores values by their content: for smaller ones a
block of their own, and its entry in the ledger, cost more."""
CONTENTS_MAX: Final = 64
"""Values by content in one column of a request, a block each: each costs a digest, an entry in the ledger and, if it is
new, a grant."""
CONTENTS_KNOWN: Final = 4096
"""Contents of values of a table that a client remembers to have committed, the latest ones: 16 bytes each."""
RECEIVED_BYTES_MAX: Final = 256 * MIB
"""Values by content that a client of a remote shard keeps after it received them, the latest ones: for several batches
of images."""
ARENA_BYTES_DEFAULT: Final = 8 * GIB
"""Default capacity of an arena, cut to the free space of its file system. It is address space only: pages are allocated
as they are used."""
ARENA_STEP_BYTES: Final = 64 * MIB
"""Pages are allocated this far ahead of use, so that writers seldom wait for fresh pages."""
ARENA_SLICE_BYTES: Final = 4 * MIB
"""Pages are allocated ahead in steps of this size, between two requests: about a millisecond, which a request may
wait."""
BULK_HEAD_BYTES_MAX: Final = 4 * MIB
"""Head of a bulk message. One for 65,536 rows (`ROWS_PER_REQUEST_MAX`), each in a block of its own, takes up to 4 MiB
for a set of columns."""
FRAME_BYTES: Final = MIB
"""Size of bulk frames: small enough to be in the cache when the checksum is computed; a ZeroMQ stream is fastest near
it, too."""
BULK_WINDOW_FRAMES: Final = 8
"""Bulk frames that may be sent before the receiver acknowledges some: the memory of a stalled reader at the server. At
2 GB/s eight frames last 4 ms, longer than a round trip."""
BULK_TRANSFERS_MAX: Final = 4
"""Concurrent bulk transfers of one session; a further transfer waits in the client."""
BULK_CONNECTIONS_MAX: Final = 4096
"""Connections to a bulk endpoint: those of a thousand sessions. A new one closes the one that was silent longest."""
BULK_SILENCE_S: Final = 10.0
"""A client retries a bulk transfer that was silent this long, over a new connection."""
BULK_STALL_S: Final = 30.0
"""The server ends a bulk transfer whose peer was silent this long."""
BULK_TRIES: Final = 3
"""Attempts of a bulk transfer before its caller gets an error."""
OBJECT_BYTES: Final = 16 * MIB
"""About the size of the objects that a shard writes into another store: large against a call of a tenth of a
millisecond, small as the buffer of a writer."""
OBJECTS_KEPT_BYTES: Final = 256 * MIB
"""Cache of such a shard for the blocks read last, so that ranks and tasks that read the same rows fetch them once."""
COPY_ORDER_BYTES: Final = 16 * MIB
"""Bytes that one shard copies at a time to replace lost copies; a larger block is copied alone, in pieces of this size.
About 16 ms at 1 GB/s: so a shard soon looks whether clients use its connections."""
COPY_ORDER_BLOCKS: Final = PARTS_MAX
"""Blocks of one such order: each is a part of one bulk read."""
COPIES_IN_FLIGHT_BYTES: Final = 256 * MIB
"""Bytes that all shards together copy at a time. Sixteen shards copy at once; more would leave little to clients of the
shards that they all read from."""
COPY_ORDER_S: Final = 15.0
"""After this time another shard may copy an order's blocks. It takes a fraction of a second, or the time of one large
block."""
COPY_RETRY_S: Final = 1.0
"""A shard that could copy nothing of an order, such as from a shard that does not answer, asks for the next one after
this pause."""
SNAPSHOT_FETCH_BYTES: Final = 64 * MIB
"""Bytes that shards have in the coordinator's memory at a time for a snapshot: four orders, so that shards copy while a
thread writes."""
SNAPSHOT_FETCH_S: Final = 30.0
"""A snapshot gives up a shard that copied nothing for this time. One order takes a fraction of a second, or the time of
one large block."""
FETCH_TRIES: Final = 3
"""Orders in which a shard may fail to copy a block of a snapshot: the first may meet a connection that just broke."""
COPY_POSTPONED_S: Final = 300.0
"""The longest that a block waits after copies from all its places failed: damaged bytes cost one read in five
minutes."""
TICKET_BYTES: Final = 16
"""Size of a keyed hash: 128 bits cannot be guessed."""
RECEIVED_KEPT_BYTES: Final = 256 * MIB
"""Free receive buffers that a client keeps for the next columns: a write into fresh pages costs several times a
copy."""
HEARTBEAT_S: Final = 3.0
"""A client sends a heartbeat at least this often if it sends nothing else: three within the silence after which a
session without a lock counts as dead. Sessions take from three quarters of it to all of it, so that those that
connected together do not stay together."""
SERVER_CHECK_S: Final = 1.0
"""A client that has lost its connection looks this often whether the server is gone."""
UNPINNED_MAX: Final = 1000
"""Blocks of one notice of returned pins, 16 bytes each: a small frame."""
UNPIN_S: Final = 0.02
"""Pins that a client returns wait this long for others, so that a notice returns many."""
SESSION_SILENCE_S: Final = 10.0
"""A session that was silent this long, and has no file lock that the server can check, counts as dead."""
LEASE_S_DEFAULT: Final = 60.0
"""A worker that was silent this long loses its rows. The client of a live worker renews its leases in time."""
TIME_LIMIT_S_DEFAULT: Final = 1800.0
"""A worker that has held a batch this long counts as hanging. The slowest rollouts of a step take less."""
TIMEOUT_S_DEFAULT: Final = 60.0
"""How long a shard waits for the answer of its coordinator, and a bulk transfer for a free connection. Waits of a flow
have no limit by default."""
REPORT_S: Final = 10.0
"""How long a caller of `stats`, `audit` and the like waits for the server: about as long as a person looks at a prompt.
A durable server that was killed is back within it."""
WAIT_TOLD_S: Final = 60.0
"""A client logs this often why a call still waits: seldom enough for a log, and soon enough for a person who looks at a
job that stands still."""
OUTAGE_LEASES: Final = 3
"""So many leases of a task that fail in a row, without a row in common between two of them, mean that the cause is no
row: the task is paused. Three, since the chance that two rows fail by themselves side by side is small, and a worker
should not spend the tries of many."""
OUTAGE_S_MAX: Final = 3600.0
"""A task that was paused for so long counts failures again. Services return in minutes; rows that cannot be done must
end."""
TASK_ERRORS_MAX: Final = 8
"""Kinds of errors that the ledger keeps of each task: more would not be read."""
ERROR_TEXT_CHARS_MAX: Final = 300
"""Of the text of each, so that a task's errors take a few kilobytes."""
DROPPED_ROWS_MAX: Final = 4096
"""Rows of a table that were dropped for failing and can be taken again: more than a person looks at. The oldest are
freed first."""
SPENT_BLOCKS_MAX: Final = 1 << 15
"""Blocks with what such rows continue, that one request may look at."""
DROPPED_PAGES_MAX: Final = 64
"""Pages of row state that they keep in memory, each of `PAGE_ROWS` rows and about half a MiB."""
DROPPED_BYTES_MAX: Final = 64 * MIB
"""Bytes of the extents that they keep, and at most an eighth of what the table may hold: failed rows must not crowd out
others."""
REPLIES_KEPT_MAX: Final = 1024
"""Replies that the server keeps per session for retries; a client has far fewer requests in flight."""

RESEND_S: Final = 2.0
"""A client resends a request, with the same id, if its reply is this late."""
ANSWER_S: Final = 30.0
"""How long a call without a deadline waits for the server's answer, before it raises an error."""
LATE_ANSWER_S: Final = 0.4
"""How long past a caller's deadline the client still waits for answers, in total. The server's own error says why, so
it is worth the wait; the call returns within half a second."""
STALLED_S: Final = 0.25
"""Past a caller's deadline, a bulk transfer goes on while bytes move. If none move for this long, the call ends."""
SERVER_GONE_S: Final = 1.0
"""Clients consider an in-memory server dead when its lock file has been free (local), or its host has refused
connections (TCP), for this long."""
COPIED_BYTES_MAX: Final = 16 * KIB
"""Rows of one reply up to this size are copied out of the arena, so that small views, which a program may keep for
long, hold no memory of it. No time is saved: without, groups of 8 short rows over ipc took 1.00 of the time (0.99 to
1.19 in five runs)."""
DEVICE_REGISTERED_BYTES: Final = 16 * GIB
"""Pages of one arena that a process registers for copies to devices. Registering takes 0.1 ms a MiB and costs no memory
beside the arena's own."""
DEVICE_IDLE_S: Final = 30.0
"""A process that copied nothing to devices for this long gives its registered pages up, so that the arena's owner may
return free ones."""
SMALL_EXTENTS_BYTES: Final = 4 * SMALL_EXTENT_BYTES
"""The extent that small puts share: large enough that the last one which does not fit wastes at most a quarter."""
SMALL_EXTENTS_SHARE: Final = 16
"""In a small arena, at most one part in this many of it: an idle producer keeps the extent open, and others want
memory, too."""

UNAUTHENTICATED_PEERS_MAX: Final = 256
"""Connections to one listening socket of a server that have not identified themselves. A further one closes the oldest
silent one, so a peer that only opens connections takes at most this many descriptors."""
UNAUTHENTICATED_S: Final = 10.0
"""A connection that has not identified itself for this long is closed; a client does so with its first message."""
PIPELINE_CALLS_MAX: Final = 512
"""Requests of one pipeline that may be in flight: fewer than the replies that the server keeps for retries."""
PIPELINE_CALLS: Final = 64
"""The default of `Table.pipeline`."""
PIPELINE_BYTES: Final = 16 * MIB
"""Bytes of these requests, with the columns that they commit."""
CALLS_PARKED_MAX: Final = 1024
"""Waiting requests of one session at the server: one for each thread of a large client."""
FRAMES_QUEUED_MAX: Final = 2 * CALLS_PARKED_MAX
"""Queued frames of a peer that does not read; a further frame is dropped. Twice the replies of one burst, because
ZeroMQ credits read frames in halves of its mark."""
BYTES_QUEUED_MAX: Final = GIB
"""Bytes of these frames, over the socket file: sixteen of the largest."""
WAITERS_AT_ONCE: Final = 4
"""Waiting requests that the server serves before it sends their answers, where no commit to a disk comes before: when a
put serves many, the first clients work while the others are served."""
FRAMES_DRAINED_MAX: Final = 1024
"""Frames the server reads before it looks at the time and at its other sources again."""
SHARD_BYTES_MAX: Final = 1 << 47
"""The most bytes of one shard: the address space of a process, so that clients can map it."""
GAP_S: Final = 0.5
"""A server's loop that wakes later than planned by more than this, or is busy with one turn for so long, counts that as
time that has not passed: its clients could not renew their leases. Leases of a second and more, which are renewed at
each third, outlive shorter delays."""
SAMPLE_S_MAX: Final = 0.001
"""The server's loop reads its CPU clock at least this often while it handles frames: the precision of a turn's CPU
time."""
DEFECT_PAUSE_S: Final = 1.0
"""Pause before a due action that failed by a defect is tried again."""
LOCK_CHECK_FIRST_S: Final = 0.02
"""First check of the lock of an ended session: a client releases it a moment after its Goodbye, and its memory should
soon be free."""
LOCK_CHECK_S: Final = 1.0
"""Interval of later checks of the lock of an ended session, while a forked child or a late view holds it."""
RESTARTS_MAX: Final = 30
"""Crashes within `RESTARTS_WITHIN_S` after which a supervised server is still restarted."""
RESTARTS_WITHIN_S: Final = 10.0
"""A server that crashes three times a second does no work; a server that is killed now and then does."""
DISK_RETRY_S: Final = 1.0
"""Pause of a supervisor before it starts a server again whose disk failed. Each further one is twice as long, until a
server ran for longer than the pause before it."""
DISK_RETRY_S_MAX: Final = 30.0
"""The longest such pause: a disk that has room again is used within half a minute, and a full one costs little
meanwhile."""
DISK_CHECK_S: Final = 1.0
"""A server that is short of disk looks this often whether there is room: no system tells of that. It takes
microseconds."""
DISK_RESERVE_BYTES: Final = 64 * MIB
"""Reserve of a server on the disk of its state: at 8 KiB a commit, where each ack is one, it lasts for 8,000 of
them."""
DISK_RESERVE_SHARE: Final = 16
"""At most one part in this many of the disk. It is also at most a quarter of the arena, whose rows bound what may still
be acknowledged."""
DISK_SLICES: Final = 16
"""Parts in which the reserve is released, so that other writers to the same disk do not take all of it at once."""
TAIL_RECORDS_MAX: Final = 6_000
"""The most journal records after an image: a restarted server replays them in about a second. Beyond that the server
writes a new image."""
TAIL_BYTES_MIN: Final = 32 * MIB
"""Fewer bytes of journal records are not worth a new image. Above this, an image is written when the records exceed
twice the last image."""
FAREWELL_S: Final = 0.2
"""How long a server that stops waits for its last replies to leave."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/]*")
_NAMES: Final = re.compile(rf"(?:[A-Za-z_][A-Za-z0-9_.\-/]{{0,{NAME_CHARS_MAX - 1}}}\0)*")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it is a valid name of a `kind` (table, field, task, ...), else raise `UsageError`.

    A name has 1 to 128 characters: letters, digits, ``_ . - /``, and begins with a letter or ``_``.
    """
    if not isinstance(name, str):
        raise UsageError(f"{kind} name {shown(name)} is {type(name).__name__}; names are strings")
    if len(name) > NAME_CHARS_MAX:
        raise UsageError(
            f"{kind} name {name[:40]!r}... has {len(name)} characters; at most {NAME_CHARS_MAX} are allowed"
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{kind} name {name!r} has characters that names may not have; use letters, digits, _ . - / "
            "and begin with a letter or _"
        )
    return name


def check_names(kind: str, names: Sequence[object]) -> None:
    """`check_name` of each, in a twentieth of the time."""
    if all(type(name) is str for name in names):
        joined = "".join(f"{name}\0" for name in names)
        if joined.count("\0") == len(names) and _NAMES.fullmatch(joined):
            return
    for name in names:
        check_name(kind, name)


def check_rows(rows: int, *, described: bool = False) -> None:
    """`UsageError` if one request may not have so many rows; fewer if they are `described`: have keys or tags."""
    most, what = (ROWS_DESCRIBED_MAX, " with keys or tags") if described else (ROWS_PER_REQUEST_MAX, "")
    if rows > most:
        raise UsageError(
            f"one request has {rows:,} rows{what}; at most {most:,} are carried out at once, since all other clients "
            f"wait meanwhile: send them in pieces of {most:,}"
        )


def check_work(what: str, rows: int, ns: float, remedy: str = "send at most {rows} rows at a time") -> None:
    """`UsageError` if a request, which has so many rows and is expected to cost so many nanoseconds, would take more
    than `TURN_S_MAX`."""
    most_ns = TURN_S_MAX * 1e9
    if ns > most_ns:
        raise UsageError(
            f"{what} takes the server about {ns / 1e6:,.0f} ms; one request may take {most_ns / 1e6:.0f}, since all "
            "other clients wait meanwhile: " + remedy.format(rows=f"{int(rows * most_ns / ns):,}")
        )


def check_text(kind: str, text: object) -> str:
    """Return `text` if it is text that a message carries, else raise `UsageError`."""
    if not isinstance(text, str):
        raise UsageError(f"{kind}={shown(text)} is {type(text).__name__}; give text")
    if len(text) > TEXT_CHARS_MAX:
        raise UsageError(f"{kind} {text[:40]!r}... has {len(text)} characters; at most {TEXT_CHARS_MAX} are allowed")
    return text


def check_path(kind: str, path: object) -> str:
    """Return `path` as text, else raise `UsageError`. Nothing is no path, though pathlib takes it for the present
    directory."""
    text = path if isinstance(path, str) else path.__fspath__() if hasattr(path, "__fspath__") else None
    if not isinstance(text, str):
        raise UsageError(f"{kind}={shown(path)} is {type(path).__name__}; give a path: text, or a pathlib.Path")
    check_text(kind, text)
    if not text:
        raise UsageError(f"{kind} is empty, which names no directory; name one: the present one is '.'")
    return text


def parse_switch(variable: str, value: str | None, *, default: bool) -> bool:
    """The value of an environment variable that turns something on (1) or off (0); `default` if it is unset or empty.
    `UsageError` for any other value."""
    if not value:
        return default
    if value not in ("0", "1"):
        raise UsageError(f"{variable}={shown(value)} is neither 0 nor 1; set it to one of them, or unset it")
    return value == "1"


SIZE_BYTES_MAX: Final = (1 << 62) - 1
"""The largest size of anything: offsets and counts are signed 64-bit integers, and so must be the sum of two."""
COUNT_MAX: Final = SIZE_BYTES_MAX
STEP_MAX: Final = 1 << 53
"""The largest trainer step or version: integers up to here are exact in every number format that they pass."""
INTEGER_BITS: Final = 63
"""Of an integer in a message, beside its sign."""
SECONDS_MAX: Final = 1e9
"""The longest wait, lease or deadline: thirty years."""

_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": KIB, "MIB": MIB, "GIB": GIB,
    "TIB": GIB << 10,
}  # fmt: skip


def parse_bytes(size: int | str) -> int:
    """Bytes of ``8``, ``"8GiB"``, ``"512 MB"``; `UsageError` otherwise."""
    if isinstance(size, int) and not isinstance(size, bool):
        if not 0 < size <= SIZE_BYTES_MAX:
            raise UsageError(
                f"size {shown(size)} is not positive, or over {SIZE_BYTES_MAX}; give bytes as a number or text such as "
                "'8GiB'"
            )
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if not match or match[2].upper() not in _UNITS or float(match[1]) * _UNITS[match[2].upper()] < 1:
        raise UsageError(f"size {shown(size)} is not a size; give bytes as a number or text such as '8GiB' or '512MiB'")
    nbytes = float(match[1]) * _UNITS[match[2].upper()]
    if nbytes > SIZE_BYTES_MAX:
        raise UsageError(f"size {shown(size)} is over {SIZE_BYTES_MAX} bytes; give a size below that, such as '8GiB'")
    return int(nbytes)


SPILL_ABOVE: Final = 0.625
"""Cold blocks go to the disk when more than this share of the arena is in use: below the share that new rows may have,
so that puts seldom wait."""
SPILL_TO: Final = 0.5
"""Down to this share: in steps of an eighth of the arena, so that a disk gets long writes."""
LOADS_SHARE: Final = 8
"""One part in this many of an arena that spills is not for new rows: otherwise rows on the disk could seldom come back
without others leaving first."""
SPILL_BATCH_BYTES: Final = 16 * MIB
"""Bytes that are written, or loaded, between two checks for the most urgent work."""
SPILL_PAUSE_S: Final = 5.0
"""After a block could not be written to the disk, the next one is tried so much later."""
SPILL_BYTES_MIN: Final = SPILL_BATCH_BYTES
"""The least that may be allowed on the disk: one step of writing."""
SPILL_SILENT_S: Final = 5.0
"""After a disk has not answered for so long, nothing is kept for requests that need blocks on it."""
LOAD_STUCK_S: Final = 1.0
"""A request that finds no memory for its blocks this long lets those behind it go first."""
LOAD_ORDERS_MAX: Final = 4096
"""Requests that wait for blocks on the disk."""
LOAD_TRIES: Final = 3
"""How often a block is read that the disk does not give. Then it is lost."""
LOAD_WAIT_S: Final = 30.0
"""How long a read waits for blocks on the disk."""
RESULTS_SHARE: Final = 8
"""One part in this many of each shard is reserved for results: if new rows filled all memory, no result could be
written and no row could ever be freed. The share is taken of each shard, so a shard's claim about its size gives no
room in another."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The most that one table may hold. When it is full, producers wait or are refused; nothing is evicted.

    A put waits for room. Results that come with an ack or an update do not wait: an eighth of all memory is reserved
    for them. If results are a larger share of the data, set a lower bound for `bytes`.

    Args:
        rows: live rows, at least 1; default 65536.
        bytes: bytes of live blocks, as a number or text such as ``"8GiB"``; default None: only the arena bounds them.

    Raises:
        UsageError: a value that is no positive number of rows or bytes.

    Example:
        >>> Limits(rows=1024, bytes="2GiB").bytes_max
        2147483648
    """

    rows: int = 65536
    bytes: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows <= 0:
            raise UsageError(f"limit rows={shown(self.rows)} is not a positive number of rows")
        if self.rows > COUNT_MAX:
            raise UsageError(f"limit rows={shown(self.rows)} is over {COUNT_MAX}; give rows that memory could hold")
        if self.bytes is not None:
            parse_bytes(self.bytes)

    @property
    def bytes_max(self) -> int | None:
        """`bytes` as a number."""
        return None if self.bytes is None else parse_bytes(self.bytes)
