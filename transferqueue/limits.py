"""Every bound of the system, in one place, each with its reason.

Two kinds: constants of the implementation (upper case), and `Limits`, what one table may hold.
Nothing is allocated for a count that a peer sent before it was compared with the bound here.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from transferqueue.errors import UsageError

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
TABLES_MAX: Final = 4096
SESSIONS_MAX: Final = 4096
PID_MAX: Final = (1 << 31) - 1
"""What a process number is in the kernel's interface: a positive C int."""
SNAPSHOTS_KEPT_MAX: Final = 1 << 20
"""Snapshots kept under one path: one a minute for two years."""
KEYS_MAX: Final = 4096
"""Clients that a server's key file may name: no more than may be connected at once."""
COORDINATORS_MAX: Final = 64
"""A client has a session, a thread and a mapping for each; one of them serves what a few machines do."""
PARTS_MAX: Final = 256
"""Distinct sets of fields written together, per table: each costs 12 bytes per resident row of a page."""
TAGS_MAX: Final = 64
"""Tags per row. More, or larger, belongs in a column."""
TAG_CHARS_MAX: Final = 1024
PREDICATES_MAX: Final = 16
"""Predicates of one `where`: each is evaluated for every row that becomes ready."""
VIEWS_MAX: Final = 8
"""Distinct `where` of a task that are kept indexed; past that the least recently used is built anew."""
REASONS_MAX: Final = 256
"""Distinct reasons for which rows of a table were dropped: each is counted for ever."""
REPLICAS_MAX: Final = 4096
"""Peers that share one batch: no more than sessions."""
COPIES_MAX: Final = 4
"""Shards that a table keeps each block in (`replicas`). Two outlive the loss of any one; each more costs its bytes again."""
LEASES_REMEMBERED_MAX: Final = 4096
"""Ended leases whose reason is kept, to tell a late worker what happened to its rows."""
HISTORY_EVENTS_MAX: Final = 4096
"""Events of a table kept for `inspect`: one a request, each naming its rows."""
HISTORY_ROWS_MAX: Final = 1 << 18
"""Row ids that these events may hold, 8 bytes each."""
ROWS_PER_REQUEST_MAX: Final = 1 << 20
"""One put or lease: at 1 Mi rows the ids alone are 8 MiB of control message."""
MESSAGE_BYTES_MAX: Final = 64 * MIB
"""One control message: a lease reply for 1 Mi rows with eight columns of metadata."""
ITEMS_MAX: Final = 1 << 16
"""Items of a list in a message that is about fields or tensors: far more than a table or a model has. What names rows has at
most `ROWS_PER_REQUEST_MAX`. A frame of many one-byte items decodes to a bounded multiple of its size."""
TEXT_CHARS_MAX: Final = 4096
"""A text in a message that is no name: a path, a label, a reason."""
VALUE_DEPTH_MAX: Final = 32
"""Nesting of a plain value (dicts and lists) stored as MessagePack."""
VALUE_NODES_MAX: Final = 1 << 22
"""Parts of one plain value: a few shared lists nested in each other would otherwise encode without end."""
PAGE_ROWS: Final = 4096
"""Rows of a ledger page: large enough to amortise numpy calls, small enough that stragglers pin little."""
ALIGNMENT: Final = 64
"""Bytes; Arrow's recommendation for buffers, and a cache line."""
PAGE_BYTES: Final = 4096
"""Extents begin and end on pages, so that one can be dropped from a private mapping without its neighbour."""
SMALL_EXTENT_BYTES: Final = 256 * KIB
"""Puts below this share an extent: a one-row put costs its bytes, not a page per put."""
ARENA_BYTES_DEFAULT: Final = 8 * GIB
"""Default ceiling of an arena; address space only, pages are taken as they are used. Clipped to what the file system has."""
ARENA_STEP_BYTES: Final = 64 * MIB
"""An arena has pages so far ahead of what is lent, so that writers seldom wait for fresh ones."""
ARENA_SLICE_BYTES: Final = 4 * MIB
"""Pages are taken ahead so many at a time, between two requests: about a millisecond, which is what a request may wait."""
FRAME_BYTES: Final = MIB
"""Bulk frames over TCP: what still is in the cache when its checksum is taken; a ZeroMQ stream is fastest near it, too."""
BULK_WINDOW_FRAMES: Final = 8
"""Bulk frames on their way before the receiver must have said that it took some: what a reader that stalls holds at
the server. At 2 GB/s eight frames last 4 ms, longer than a round trip."""
BULK_TRANSFERS_MAX: Final = 4
"""Transfers of one session that are under way at once over the bulk endpoint; a further one waits in its process."""
BULK_CONNECTIONS_MAX: Final = 4096
"""Connections to the bulk endpoint: those of a thousand sessions. The longest unheard of makes room."""
BULK_SILENCE_S: Final = 10.0
"""A bulk transfer of which nothing was heard this long is tried again, over a new connection."""
BULK_STALL_S: Final = 30.0
"""The server forgets a bulk transfer whose peer has not said a word for this long."""
BULK_TRIES: Final = 3
"""A bulk transfer is begun this often before its caller is told that it failed."""
OBJECT_BYTES: Final = 16 * MIB
"""A shard whose bytes lie in another store keeps them in objects of about this size: a call of a tenth of a millisecond is little
against it, and so is what a writer holds until its next object is full."""
OBJECTS_KEPT_BYTES: Final = 256 * MIB
"""What such a shard keeps of what was read last: ranks and tasks that read the same rows fetch them once."""
TICKET_BYTES: Final = 16
"""Of a keyed hash: nobody guesses 128 bits."""
RECEIVED_KEPT_BYTES: Final = 256 * MIB
"""Buffers of received columns kept for the next ones: writing into fresh pages costs several times a copy."""
HEARTBEAT_S: Final = 1.0
"""A client says that it lives this often when it has nothing else to say."""
SESSION_SILENCE_S: Final = 10.0
"""After this silence a session without a kernel-checked lock is taken for dead."""
LEASE_S_DEFAULT: Final = 60.0
"""A worker silent this long has lost its rows. The client of one that lives renews its leases in time."""
TIME_LIMIT_S_DEFAULT: Final = 1800.0
"""A worker that has held a batch this long hangs. The slowest rollouts of a step take less."""
TIMEOUT_S_DEFAULT: Final = 60.0
"""Every wait ends. One minute tells a stalled pipeline from a slow one in most jobs."""
ATTEMPTS_MAX_DEFAULT: Final = 5
"""A row that failed five workers will fail the sixth."""
REPLIES_KEPT_MAX: Final = 1024
"""Replies kept per session for retries; a client has far fewer requests in flight."""

RESEND_S: Final = 2.0
"""A request that is not answered this long after it should have been is sent again, with the same id."""
ANSWER_S: Final = 30.0
"""A caller that gave no deadline gives the server this long to answer; then it is told that nobody does."""
LATE_ANSWER_S: Final = 0.4
"""Past the deadline of a caller, answers may be this late, all together. The server's own refusal says what was missing, so it is worth a
moment; the caller has its thread back within half a second."""
STALLED_S: Final = 0.25
"""Past the deadline of a caller, bytes that cross the network go on while they move; standing still this long ends the call."""
SERVER_GONE_S: Final = 1.0
"""A server whose lock has been free this long does not come back under the sessions it had."""
SMALL_EXTENTS_BYTES: Final = 4 * SMALL_EXTENT_BYTES
"""The extent that small puts share: large enough that the last one which does not fit wastes at most a quarter."""

STRANGERS_MAX: Final = 256
"""Connections to one door of a server that have not said who they are. Past that, the oldest silent one makes room: so a stranger
who opens connections without end takes this many descriptors and no more."""
STRANGER_S: Final = 10.0
"""A connection that has not said who it is for this long is closed: a client says so with its first message."""
CALLS_PARKED_MAX: Final = 1024
"""Requests of one session that wait at the server at once: one for each thread of a large client."""
FRAMES_QUEUED_MAX: Final = 2 * CALLS_PARKED_MAX
"""Frames kept for a peer that does not read; one over it is dropped. Twice what may be answered in one burst, since ZeroMQ
credits what was read in halves of its mark."""
FRAMES_DRAINED_MAX: Final = 1024
"""Frames the server reads before it looks at the time and at its other sources again."""
SHARD_BYTES_MAX: Final = 1 << 47
"""Of one shard: the address space that a process has, so that somebody could map it."""
TURN_S_MAX: Final = 0.02
"""A turn of the server's loop for one request is late above this: everybody else waits for it. Late turns are counted."""
SAMPLE_S_MAX: Final = 0.001
"""The server's loop reads its processor clock at least this often while it handles frames: a turn's processor time is known that well."""
DEFECT_PAUSE_S: Final = 1.0
"""What failed by a defect when it was due is tried again after this, and not at every frame."""
LOCK_CHECK_FIRST_S: Final = 0.02
"""A client lets go of its lock a moment after its Goodbye: that soon its memory should be free again."""
LOCK_CHECK_S: Final = 1.0
"""How often, in the end, the lock of an ended session is tried while a forked child or a late view holds it."""
RESTARTS_MAX: Final = 30
"""Crashes of a supervised server after each of which it is started again, if they are within `RESTARTS_WITHIN_S`."""
RESTARTS_WITHIN_S: Final = 10.0
"""A server that crashes three times a second does no work; one that is killed now and then does."""
TAIL_RECORDS_MAX: Final = 6_000
"""Changes that a restarted server carries out again at most, in about a second; past that it makes a new image."""
TAIL_BYTES_MIN: Final = 32 * MIB
"""A tail of fewer bytes is not worth an image; past that, one of more than twice the last image."""
FAREWELL_S: Final = 0.2
"""A server that stops gives its last answers this long to leave."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/]*")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it may name a `kind` (table, field, task, ...), else raise `UsageError`.

    A name has 1 to 128 characters: letters, digits, ``_ . - /``, and begins with a letter or ``_``.
    """
    if not isinstance(name, str):
        raise UsageError(f"{kind} name {name!r} is {type(name).__name__}; names are strings")
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


SIZE_BYTES_MAX: Final = (1 << 62) - 1
"""Of anything: offsets and counts are signed integers of 64 bits, and sums of two of them must be, too."""
COUNT_MAX: Final = SIZE_BYTES_MAX
STEP_MAX: Final = 1 << 53
"""Of trainer steps and versions: whole numbers up to here survive every number format that they pass."""
SECONDS_MAX: Final = 1e9
"""Thirty years: of any wait, lease or deadline."""

_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": GIB << 10,
}  # fmt: skip


def parse_bytes(size: int | str) -> int:
    """Bytes of ``8``, ``"8GiB"``, ``"512 MB"``; `UsageError` otherwise."""
    if isinstance(size, int) and not isinstance(size, bool):
        if not 0 < size <= SIZE_BYTES_MAX:
            raise UsageError(
                f"size {short_number(size)} is not positive, or over {SIZE_BYTES_MAX}; give bytes as a number or text such as '8GiB'"
            )
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if not found or found[2].upper() not in _UNITS or float(found[1]) * _UNITS[found[2].upper()] < 1:
        raise UsageError(f"size {size!r} is not a size; give bytes as a number or text such as '8GiB' or '512MiB'")
    nbytes = float(found[1]) * _UNITS[found[2].upper()]
    if nbytes > SIZE_BYTES_MAX:
        raise UsageError(
            f"size {_cut(size)} is over {SIZE_BYTES_MAX} bytes; give what the machine could have, such as '8GiB'"
        )
    return int(nbytes)


def _cut(text: object) -> str:
    found = repr(text)
    return found if len(found) <= NAME_CHARS_MAX else f"{found[:40]}..."


def short_number(number: int) -> str:
    """An integer for a message: in full, unless it has more digits than anyone reads."""
    return str(number) if number.bit_length() <= NAME_CHARS_MAX else f"of {number.bit_length()} bits"


RESULTS_SHARE: Final = 8
"""One part in so many of each shard is never lent to new rows: were all full of them, no result could be written, and so
nothing ever be freed. Of each, so that what one says of its size gives no room in another."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one table may hold. Full means producers wait or are refused; nothing is evicted.

    `rows`: live rows. `bytes`: bytes of live blocks, as a number or text such as ``"8GiB"``
    (None: only the arena bounds them). Puts wait for it, results that come with an ack or update do not. An eighth of all memory is
    kept for these; where they are larger than that in proportion to what is put, bound the bytes lower.
    """

    rows: int = 65536
    bytes: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows <= 0:
            raise UsageError(f"limit rows={_cut(self.rows)} is not a positive number of rows")
        if self.rows > COUNT_MAX:
            raise UsageError(
                f"limit rows={short_number(self.rows)} is over {COUNT_MAX}; give rows that memory could hold"
            )
        if self.bytes is not None:
            parse_bytes(self.bytes)

    @property
    def bytes_max(self) -> int | None:
        """`bytes` as a number."""
        return None if self.bytes is None else parse_bytes(self.bytes)
