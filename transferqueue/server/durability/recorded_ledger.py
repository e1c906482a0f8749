"""A ledger that records every change in a journal, and the replay of such a journal.

The ledger is deterministic, so its history is the sequence of the calls that changed it, each with its arguments, the
time, and its outcome. A call that was refused, that must wait, or that only reads changed nothing and is not recorded.
Nor is a call that tore the ledger: the server ends, and the next run continues as if the call had not come. Events that
were due before a call are recorded before it. A client may be told of a change only after `commit`.

A restart loads the image and replays the tail on it (`replay_journal`). It compares the outcome of each call (the ids
that it gave, the number of rows that it ended) with the record, and stops at the first that differs. `commit` writes a
new image when the tail has outgrown the last one, which bounds the time of a restart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Protocol, get_args
from zlib import crc32

import msgspec

from transferqueue.errors import Corruption, DiskFailed, LedgerTorn, OutOfMemory, TransferQueueError
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.persistence import image
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot
from transferqueue.ledger.tasks.selectors import PluginFactory
from transferqueue.limits import TAIL_BYTES_MIN, TAIL_RECORDS_MAX
from transferqueue.server.durability.journal import Journal
from transferqueue.wire import messages as m


class _Record(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """One change, with the arguments of its call."""


class _Begun(_Record):
    epoch: int


class _Opened(_Record):
    session: int
    client: bytes
    now: float
    label: str
    origin: bytes


class _Closed(_Record):
    session: int
    now: float
    pins: bool


class _PinsEnded(_Record):
    session: int


class _Granted(_Record):
    session: int
    shard: int
    offset: int
    nbytes: int
    now: float
    call: int
    extent: int


class _Seen(_Record):
    session: int
    call: int


class _Lost(_Record):
    blocks: list[int]
    now: float


class _ShardLost(_Record):
    shard: int
    now: float


class _Ticked(_Record):
    now: float
    due: int


class _Applied(_Record):
    session: int
    call: int
    now: float
    request: m.Request
    outcome: list[int]


class _CopiesOrdered(_Record):
    session: int
    shard: int
    offset: int
    nbytes: int
    blocks: list[int]
    now: float


class _CopiesFinished(_Record):
    session: int
    extent: int
    written: list[int]
    now: float
    added: int


class _RowsRecorded(_Record):
    table: str
    number: int
    rows: list[int]
    now: float
    freed: int


_Any = (
    _Begun
    | _Opened
    | _Closed
    | _PinsEnded
    | _Granted
    | _Seen
    | _Lost
    | _ShardLost
    | _Ticked
    | _Applied
    | _CopiesOrdered
    | _CopiesFinished
    | _RowsRecorded
)
_RECORDS: Final = repr([(one.__name__, one.__struct_fields__) for one in get_args(_Any)])
STATE: Final = blake2b(image.fingerprint() + _RECORDS.encode(), digest_size=16).digest()
"""Fingerprint of the classes in images and records. A journal with another fingerprint was written by another
version."""
_CHANGES: Final[dict[str, type[_Record]]] = {
    "opened": _Opened,
    "closed": _Closed,
    "pins_ended": _PinsEnded,
    "granted": _Granted,
    "seen": _Seen,
    "lost": _Lost,
    "shard_lost": _ShardLost,
    "ticked": _Ticked,
    "copies_ordered": _CopiesOrdered,
    "copies_finished": _CopiesFinished,
    "rows_recorded": _RowsRecorded,
}
"""The record of each change that `Ledger._note` names."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Any).decode


@dataclass(slots=True)
class Tail:
    """The length of the replay at a restart, and the size of the image before it."""

    records: int = 0
    nbytes: int = 0
    image_nbytes: int = 0
    patience: int = 1
    """Doubled when the disk had no room for a new image: the next try comes when the tail is twice as long."""

    def add(self, record: bytes) -> None:
        """Count a record."""
        self.records += 1
        self.nbytes += len(record)

    @property
    def outgrown(self) -> bool:
        """Whether a new image is due."""
        bytes_max = max(TAIL_BYTES_MIN, 2 * self.image_nbytes)
        return self.records > TAIL_RECORDS_MAX * self.patience or self.nbytes > bytes_max * self.patience


class RecordedLedger(Ledger):
    """Continues `ledger`, and appends each change to `journal`. Nothing else may change either.

    Args:
        ledger: the state at the last commit.
        journal: takes the records.
        tail: of the journal so far, from `replay_journal`.
        epoch: of the run that begins here.
    """

    def __init__(self, ledger: Ledger, journal: Journal, tail: Tail | None = None, *, epoch: int) -> None:
        self.epoch = epoch
        self.continue_from(ledger)
        self._journal = journal
        self._tail = tail or Tail()
        self._needs_image = False
        self._append(_Begun(epoch))

    def _note(self, change: str, *terms: Any) -> None:
        self._append(_CHANGES[change](*terms))

    def _note_applied(self, request: m.Request, session: int, call: int, reply: m.Reply) -> None:
        self._append(_Applied(session, call, self.state.now, request, outcome_of(reply)))

    def _append(self, record: _Record) -> None:
        data = _encode(record)
        self._tail.add(data)
        self._journal.append(data)

    def restore_snapshot(self, snapshot: LedgerSnapshot, now: float) -> None:
        """See `Ledger.restore_snapshot`. Writes no record: the next commit writes an image."""
        self._needs_image = True  # first: a restored state must have an image
        super().restore_snapshot(snapshot, now)

    # ------------------------------------------------------------ commits

    def commit(self) -> None:
        """Return when all changes so far are durable. After `JournalFailed` the server must end without sending
        answers."""
        if self._needs_image:
            self.checkpoint()
        elif self._tail.outgrown:
            try:
                self.checkpoint()
            except DiskFailed as error:
                if not error.is_full:
                    raise
                self._tail.patience *= 2
        self._journal.commit()

    def checkpoint(self) -> None:
        """Commit, and replace the tail by an image, so that the next start is quick. Takes as long as `image`."""
        with _without_garbage_collection():
            state = self.image()
        self._journal.checkpoint(state)
        self._tail, self._needs_image = Tail(image_nbytes=len(state)), False


class LoadableJournal(Protocol):
    """A journal that can be read: see `Journal.load`."""

    def load(self) -> tuple[bytes | None, Iterable[bytes]]:
        """The image and the records after it."""


def replay_journal(
    journal: LoadableJournal, selectors: Mapping[str, PluginFactory] | None = None
) -> tuple[Ledger, Tail]:
    """The ledger as of the last commit, and the replayed tail. Its epoch is 0 if the journal is empty.

    `Corruption` if a record cannot be replayed; otherwise raises as `Ledger.from_image`.
    """
    state, records = journal.load()
    with _without_garbage_collection():
        ledger = (
            Ledger(epoch=0, selectors=selectors) if state is None else Ledger.from_image(state, selectors=selectors)
        )
        tail = Tail(image_nbytes=len(state or b""))
        for record in records:
            _replay(ledger, tail.records, record)
            tail.add(record)
    ledger.take_effects()  # their sessions are gone, and the allocator is built from the state
    return ledger, tail


_OUTCOMES: Final[dict[type, Callable[[Any], list[int]]]] = {
    m.PutRows: lambda reply: [reply.first, reply.rows],
    m.DoneReply: lambda reply: [reply.rows],
    m.Leased: lambda reply: [reply.lease, reply.token, len(reply.content.rows) // 8, crc32(reply.content.rows)],
    m.Reserved: lambda reply: [reply.reservation, reply.rows],
}


def outcome_of(reply: m.Reply | Blocked) -> list[int]:
    """The outcome of a request, to compare its replay with its record: the ids that it gave, or the number of rows."""
    outcome = _OUTCOMES.get(type(reply))
    return [crc32(type(reply).__name__.encode())] if outcome is None else outcome(reply)


def _replay(ledger: Ledger, number: int, data: bytes) -> None:
    try:
        record = _decode(data)
    except msgspec.MsgspecError as error:
        raise Corruption(f"record {number} of the journal is invalid: {error}; restore a snapshot") from error
    try:
        recorded, replayed = _replay_record(ledger, record)
    except (TransferQueueError, LedgerTorn) as error:
        if isinstance(error.__cause__, SystemExit | KeyboardInterrupt):  # told to stop while it replays
            raise error.__cause__ from None
        if isinstance(error.__cause__, MemoryError):
            raise OutOfMemory(
                f"record {number} of the journal cannot be replayed: {error}. The journal is unchanged: start the "
                "server with more memory"
            ) from error
        raise _differs(number, record, "an acceptance", f"{type(error).__name__}: {error}") from error
    if recorded != replayed:
        raise _differs(number, record, recorded, replayed)


def _differs(number: int, record: _Any, recorded: object, replayed: object) -> Corruption:
    change = m.tag_of(record.request) if isinstance(record, _Applied) else type(record).__name__.strip("_")
    return Corruption(
        f"record {number} of the journal ({change}) has another outcome now: the journal recorded {recorded}, the "
        f"replay gave {replayed}; another version wrote it, or it is damaged: start the version that wrote it, or "
        "restore a snapshot"
    )


def _replay_record(ledger: Ledger, record: _Any) -> tuple[object, object]:
    """Make the change of a record. Returns the recorded outcome and the outcome now."""
    match record:
        case _Begun(epoch=epoch):
            ledger.epoch = epoch
        case _Opened(session=session, client=client, now=now, label=label, origin=origin):
            ledger.open_session(session, client, now, label=label, origin=origin)
        case _Closed(session=session, now=now, pins=pins):
            ledger.close_session(session, now, pins=pins)
        case _PinsEnded(session=session):
            ledger.end_pins(session)
        case _Granted():
            granted = ledger.grant(
                record.session, record.shard, record.offset, record.nbytes, record.now, call=record.call
            )
            return record.extent, granted.extent
        case _Seen(session=session, call=call):
            ledger.forget_replies(session, call)
        case _Lost(blocks=blocks, now=now):
            ledger.blocks_lost(blocks, now)
        case _ShardLost(shard=shard, now=now):
            ledger.shard_lost(shard, now)
        case _Ticked(now=now, due=due):
            return due, ledger.tick(now)
        case _CopiesOrdered():
            ledger.order_copies(record.session, record.shard, record.offset, record.nbytes, record.blocks, record.now)
        case _CopiesFinished(session=session, extent=extent, written=written, now=now, added=added):
            return added, ledger.finish_copies(session, extent, written, now)
        case _RowsRecorded(table=table, number=number, rows=rows, now=now, freed=freed):
            return freed, ledger.rows_recorded(table, number, rows, now)
        case _Applied():
            reply = ledger.apply(record.request, session=record.session, call=record.call, now=record.now)
            return record.outcome, "a wait" if isinstance(reply, Blocked) else outcome_of(reply)
    return None, None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A million new objects that all stay alive would start many useless collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
