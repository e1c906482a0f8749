"""A ledger that records every change in a journal, and the replay of such a journal.

The ledger is deterministic, so its history is the sequence of the calls that changed it, each with its arguments and the time. A call
that was refused, that must wait, or that only reads changed nothing and is not recorded. A call that failed by a defect may have changed
something, and is recorded. Events that were due before a call are recorded before it. Nothing may be told to a client before `commit`.

A restart loads the image and replays the tail on it (`replay_journal`). To bound its duration, `commit` writes a new image when the
tail has outgrown the last one.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol, get_args

import msgspec

from transferqueue.errors import (
    Corruption,
    DiskFailed,
    FlowSignal,
    InternalError,
    JournalFailed,
    PeerError,
    TransferQueueError,
    UsageError,
)
from transferqueue.ledger.effects import MustWait
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.persistence import image
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot
from transferqueue.ledger.tasks.selectors import PluginFactory
from transferqueue.limits import TAIL_BYTES_MIN, TAIL_RECORDS_MAX
from transferqueue.server.durability.journal import Journal
from transferqueue.wire import messages as m
from transferqueue.wire.requests import declaration


class _Record(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """One change, with the arguments of the call that made it."""


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


class _Applied(_Record):
    session: int
    call: int
    now: float
    request: m.Request
    failed: bool


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


class _Unfinished(_Record):
    """A change that a defect interrupted. Its replay stops at the same place, since the ledger is deterministic."""

    change: bytes


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
    | _Unfinished
    | _CopiesOrdered
    | _CopiesFinished
)
STATE: Final = blake2b(
    image.FINGERPRINT + repr([(one.__name__, one.__struct_fields__) for one in get_args(_Any)]).encode(), digest_size=16
).digest()
"""Fingerprint of the classes in images and records. A journal with another fingerprint was written by another version."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Any).decode


@dataclass(slots=True)
class Tail:
    """How much a restart would replay, and the size of the image before it."""

    records: int = 0
    nbytes: int = 0
    image_nbytes: int = 0
    patience: int = 1
    """Doubled when the disk had no room for a new image: the next one is tried when the tail is twice as long."""

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

    tail: of the journal so far, as `replay_journal` returned it. epoch: of the run that begins here.
    """

    def __init__(self, ledger: Ledger, journal: Journal, tail: Tail | None = None, *, epoch: int) -> None:
        self.epoch = epoch
        self.continue_from(ledger)
        self._journal = journal
        self._tail = tail or Tail()
        self._needs_image = False
        self._append(_Begun(epoch))

    # ------------------------------------------------------------ recorded calls

    def open_session(self, session: int, client: bytes, now: float, *, label: str = "", origin: bytes = b"") -> None:
        """See `Ledger.open_session`."""
        self.tick(now)
        with self._unfinished(_Opened(session, client, self.state.now, label, origin)):
            super().open_session(session, client, now, label=label, origin=origin)
        self._append(_Opened(session, client, self.state.now, label, origin))

    def close_session(self, session: int, now: float, *, pins: bool = True) -> None:
        """See `Ledger.close_session`."""
        self.tick(now)
        with self._unfinished(_Closed(session, self.state.now, pins)):
            super().close_session(session, now, pins=pins)
        self._append(_Closed(session, self.state.now, pins))

    def end_pins(self, session: int) -> None:
        """See `Ledger.end_pins`."""
        self.check_closed(session)
        with self._unfinished(_PinsEnded(session)):
            super().end_pins(session)
        self._append(_PinsEnded(session))

    def grant(self, session: int, shard: int, offset: int, nbytes: int, now: float, *, call: int = 0) -> m.Granted:
        """See `Ledger.grant`."""
        self.tick(now)
        record = _Granted(session, shard, offset, nbytes, self.state.now, call)
        with self._unfinished(record):
            reply = super().grant(session, shard, offset, nbytes, now, call=call)
        self._append(record)
        return reply

    def seen(self, session: int, call: int) -> None:
        """See `Ledger.seen`."""
        super().seen(session, call)
        self._append(_Seen(session, call))

    def blocks_lost(self, blocks: Collection[int], now: float) -> dict[str, list[int]]:
        """See `Ledger.blocks_lost`."""
        self.tick(now)
        with self._unfinished(_Lost(list(blocks), self.state.now)):
            lost = super().blocks_lost(blocks, now)
        self._append(_Lost(list(blocks), self.state.now))
        return lost

    def shard_lost(self, shard: int, now: float) -> dict[str, list[int]]:
        """See `Ledger.shard_lost`."""
        self.tick(now)
        with self._unfinished(_ShardLost(shard, self.state.now)):
            lost = super().shard_lost(shard, now)
        self._append(_ShardLost(shard, self.state.now))
        return lost

    def order_copies(
        self, session: int, shard: int, offset: int, nbytes: int, blocks: Collection[int], now: float
    ) -> None:
        """See `Ledger.order_copies`."""
        self.tick(now)
        record = _CopiesOrdered(session, shard, offset, nbytes, list(blocks), self.state.now)
        with self._unfinished(record):
            super().order_copies(session, shard, offset, nbytes, blocks, now)
        self._append(record)

    def finish_copies(self, session: int, extent: int, written: Collection[int], now: float) -> int:
        """See `Ledger.finish_copies`. Recorded only if the session has this order."""
        self.tick(now)
        if self.ordered_extent(session) != extent:
            return 0
        record = _CopiesFinished(session, extent, list(written), self.state.now)
        with self._unfinished(record):
            added = super().finish_copies(session, extent, written, now)
        self._append(record)
        return added

    def tick(self, now: float) -> None:
        """See `Ledger.tick`. Every recorded call calls it first. Recorded only if something is due."""
        due = self.next_deadline()
        if due is None or due > now:
            super().tick(now)
            return
        with self._unfinished(_Ticked(now)):
            super().tick(now)
        self._append(_Ticked(now))

    def apply(self, request: m.Request, *, session: int, call: int, now: float) -> m.Reply | MustWait:
        """See `Ledger.apply`."""
        self.tick(now)  # here, so that a defect in a due event is not recorded as one of this request
        try:
            reply = super().apply(request, session=session, call=call, now=now)
        except (UsageError, FlowSignal, PeerError):
            raise
        except Exception:
            self._append(_Applied(session, call, self.state.now, request, True))
            raise
        if not isinstance(reply, MustWait) and declaration(request).repeat != "again":
            self._append(_Applied(session, call, self.state.now, request, False))
        return reply

    @contextmanager
    def _unfinished(self, record: _Any) -> Iterator[None]:
        """Around the change of `record`: a typed refusal changed nothing; a change that a defect interrupts is recorded as such."""
        try:
            yield
        except (UsageError, FlowSignal, PeerError):
            raise
        except Exception:
            self._append(_Unfinished(_encode(record)))
            raise

    def _append(self, record: _Any) -> None:
        try:
            data = _encode(record)
            self._tail.add(data)
            self._journal.append(data)
        except Exception as error:
            raise JournalFailed(
                f"a change cannot be written down ({type(error).__name__}: {error}); nothing since the last commit was told to "
                "anybody. Start the server again"
            ) from error

    def restore_snapshot(self, snapshot: LedgerSnapshot, now: float) -> None:
        """See `Ledger.restore_snapshot`. No record: the next commit leaves an image of what there is then."""
        self._needs_image = True  # first: so a restored state is never without an image
        super().restore_snapshot(snapshot, now)

    # ------------------------------------------------------------ commits

    def commit(self) -> None:
        """Return when all changes so far are durable. After `JournalFailed` the server must end without sending answers."""
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
    """The ledger as at the last commit, and the tail that was replayed for it. Its epoch is 0 if the journal is empty.

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
    ledger.take_effects()  # the sessions that they concern are gone, and the allocator is built from the state
    return ledger, tail


def _replay(ledger: Ledger, number: int, data: bytes) -> None:
    try:
        record = _decode(data)
        unfinished = isinstance(record, _Unfinished) or (isinstance(record, _Applied) and record.failed)
        with suppress(Exception) if unfinished else _refusal_is_corruption(number):
            _replay_record(ledger, _decode(record.change) if isinstance(record, _Unfinished) else record)
    except msgspec.MsgspecError as error:
        raise Corruption(f"record {number} of the journal is none: {error}; restore a snapshot") from error


@contextmanager
def _refusal_is_corruption(number: int) -> Iterator[None]:
    try:
        yield
    except TransferQueueError as error:
        raise Corruption(
            f"record {number} of the journal was accepted once and is refused now: {error}; another version wrote it, or "
            "it is damaged: start the version that wrote it, or restore a snapshot"
        ) from error


def _replay_record(ledger: Ledger, record: _Any) -> None:
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
            ledger.grant(record.session, record.shard, record.offset, record.nbytes, record.now, call=record.call)
        case _Seen(session=session, call=call):
            ledger.seen(session, call)
        case _Lost(blocks=blocks, now=now):
            ledger.blocks_lost(blocks, now)
        case _ShardLost(shard=shard, now=now):
            ledger.shard_lost(shard, now)
        case _Ticked(now=now):
            ledger.tick(now)
        case _CopiesOrdered():
            ledger.order_copies(record.session, record.shard, record.offset, record.nbytes, record.blocks, record.now)
        case _CopiesFinished(session=session, extent=extent, written=written, now=now):
            ledger.finish_copies(session, extent, written, now)
        case _Applied():
            if isinstance(
                ledger.apply(record.request, session=record.session, call=record.call, now=record.now), MustWait
            ):
                raise InternalError(f"{m.tag_of(record.request)} waits, but was carried out once")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Making a million objects that all stay alive would start many useless collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
