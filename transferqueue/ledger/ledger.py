"""The ledger of one coordinator: a pure state machine. A request goes in; a reply and effects come out.

It opens no socket, reads no clock, draws no random number and starts no thread.

- `apply` first applies all events that are due by `now` (`tick`), then the request. A request that raises, or that must
  wait, changes nothing: all checks come before the first write.
- Each operation marks the end of its checks and the begin of its writes (`SharedState.begin`). Before that, any
  exception leaves the ledger unchanged; for want of memory, the operation is refused as `Full`. After it, an exception
  tears the ledger: it raises `LedgerTorn` from then on, and the server ends.
- Each change is noted (`_note`) before it counts as made, so that a journal has it or the ledger is torn.
- The same sequence of calls with the same arguments gives the same replies, effects and state.
- No call is executed twice. The ledger keeps each reply until the client has seen it, and recognises a put by (client,
  call) as long as the pages of its rows exist.
- `now` never goes back; an earlier value counts as the latest one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from transferqueue.errors import Full, InternalError, LedgerTorn, ProtocolError, UsageError
from transferqueue.ledger.data_loss import lose_blocks, values_in
from transferqueue.ledger.dispatch import HANDLERS
from transferqueue.ledger.effects import Blocked, Effect, Expiring
from transferqueue.ledger.persistence import image
from transferqueue.ledger.persistence.restore import check_empty, restore
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot, take_snapshot
from transferqueue.ledger.reports.answers import Observation, explained, observed, sessions
from transferqueue.ledger.reports.listed_events import listed_events
from transferqueue.ledger.requests import weight_channels
from transferqueue.ledger.requests.ack import expire_lease
from transferqueue.ledger.requests.lease import is_loading
from transferqueue.ledger.requests.pending_versions import PendingVersion
from transferqueue.ledger.rows import RowRecord
from transferqueue.ledger.rows.blocks import ExtentState, OwnerBytes
from transferqueue.ledger.rows.cold_blocks import ColdBlocks
from transferqueue.ledger.rows.copies import Copies, copies_of
from transferqueue.ledger.rows.missing_copies import CopyOrderState, MissingCopies, PostponedCopy
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules
from transferqueue.ledger.rules.recording import EndedBatch, next_batch, records_at_once, rows_recorded, terms_of
from transferqueue.ledger.rules.retry import resume_due, trial_due
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import Absence, SharedState, no_memory
from transferqueue.ledger.tasks.circuit import Circuit
from transferqueue.ledger.tasks.group_task import FormingGroup
from transferqueue.ledger.tasks.leases import LeaseState
from transferqueue.ledger.tasks.retries import RetryQueue
from transferqueue.ledger.tasks.selectors import PluginFactory
from transferqueue.ledger.tasks.task_state import LEASED
from transferqueue.limits import COPY_ORDER_S, END_INTERVAL_S, SESSIONS_MAX
from transferqueue.policies import Recorded
from transferqueue.wire import messages as m
from transferqueue.wire.answers.events import EventsAnswer
from transferqueue.wire.answers.sessions import Sessions
from transferqueue.wire.messages.declarations import DECLARED


class Ledger:
    """The control plane of one coordinator.

    Args:
        epoch: number of this run of the coordinator.
        selectors: factories of `policies.Plugin` selectors by name; default None: there are none.
    """

    _cold: ColdBlocks | None = None
    """None: no block is ever spilled."""

    def __init__(self, *, epoch: int = 1, selectors: Mapping[str, PluginFactory] | None = None) -> None:
        self.epoch = epoch
        self.state = LedgerState(SharedState(plugins={} if selectors is None else selectors))

    def continue_from(self, ledger: Ledger) -> None:
        """Take over the state of another ledger, which must not be used again."""
        self.state = ledger.state

    # ------------------------------------------------------------ whole, or torn

    @property
    def torn(self) -> bool:
        """Whether an operation ended between its first and its last write. Ask it between two calls."""
        return self.state.core.writing

    def _raise_torn(self, what: str, error: BaseException | None = None) -> NoReturn:
        """Raise `LedgerTorn` for the operation `what`. `error` interrupted it; None: an earlier one was interrupted."""
        why = "followed one that was interrupted" if error is None else f"met {type(error).__name__} ({error})"
        raise LedgerTorn(
            f"{what} {why} after its first write, so the state of the ledger is not known and the server ends. With "
            "durability process or disk the next run continues from the journal, as before that operation; its client "
            "sends it again"
        ) from error

    @contextmanager
    def _changes(self, what: str) -> Iterator[None]:
        """Around the writes of an operation that no caller can be refused: any exception tears the ledger."""
        core = self.state.core
        if core.writing:
            self._raise_torn(what)
        core.writing = True
        try:
            yield
            core.blocks.end_some()
        except GeneratorExit:  # interrupted before the block began
            raise
        except BaseException as error:  # noqa: BLE001  (raised with its cause)
            self._raise_torn(what, error)
        core.writing = False

    def _note(self, change: str, *terms: Any) -> None:
        """Record a change before this call makes it. `RecordedLedger` implements it."""

    def _note_applied(self, request: m.Request, session: int, call: int, reply: m.Reply) -> None:
        """Record a request that was carried out, as `_note` does."""

    # ------------------------------------------------------------ images

    def image(self) -> bytes:
        """The whole state as bytes, for `from_image`. The size grows with the resident rows; the cost is 3 to 15 ns per
        byte.
        """
        if self.torn:
            self._raise_torn("an image")
        return image.write(self.state, self.epoch)

    @classmethod
    def from_image(cls, data: bytes, *, selectors: Mapping[str, PluginFactory] | None = None) -> Ledger:
        """Make a ledger that continues exactly as the one that wrote the `image`.

        Args:
            data: the image.
            selectors: the same as for that ledger.

        Raises:
            Corruption: `data` is no image.
            UsageError: a version of the package with another state wrote it.
            NotFound: a table uses a selector that is not among `selectors`.
        """
        made = cls(selectors=selectors)
        made.state, made.epoch = image.read(data, made.state.core.plugins)
        return made

    # ------------------------------------------------------------ snapshots

    def take_snapshot(self, now: float) -> LedgerSnapshot:
        """Copy, at one moment, the state that a snapshot keeps (see `persistence.snapshot`)."""
        self.tick(now)
        return take_snapshot(self.state)

    def restore_snapshot(self, snapshot: LedgerSnapshot, now: float) -> None:
        """Replace the state by that of a snapshot, or change nothing. `UsageError` if a table or channel exists,
        `Corruption` if no ledger could have written the snapshot (`snapshot_checks.check` checks more). Takes as
        long as an `image` of the current state, and the snapshot.
        """
        self.tick(now)
        check_empty(self.state)
        state, _ = image.read(image.write(self.state, 0), self.state.core.plugins)
        state.core.absence = self.state.core.absence
        state.core.recorded_block_max = self.state.core.recorded_block_max
        restore(state, snapshot, self.state.now)
        with self._changes("a restore"):
            self.state = state
            if self._cold is not None:
                self._cold.attach(self.state.core.blocks)

    def spill(self, room: Callable[[], int]) -> ColdBlocks:
        """From now on, blocks may leave memory for a disk; the caller carries that out. No image may be taken: it would
        lack them. `room` returns the most bytes that the blocks of one request may take in memory now."""
        self._cold = ColdBlocks(self.state.core.blocks, self._usages, room)
        return self._cold

    def _usages(self) -> list[OwnerBytes]:
        """The accounts of the blocks, by table."""
        return [table.usage for table in self.state.tables.values()]

    # ------------------------------------------------------------ sessions

    def open_session(self, session: int, client: bytes, now: float, *, label: str = "", origin: bytes = b"") -> None:
        """Open the session of a client.

        Args:
            session: its number.
            client: the id of the client (16 bytes), the same after it reconnects.
            now: the time.
            label: its name in texts.
            origin: stored as `SessionState.origin`.
        """
        self.tick(now)
        sessions = self.state.sessions
        if session in sessions or session < 1:
            raise UsageError(f"session {session} is open already, or not a positive number")
        if len(sessions) >= SESSIONS_MAX:
            raise Full(f"{SESSIONS_MAX} sessions are open, which is the maximum; close some")
        with self._changes("the start of a session"):
            sessions[session] = SessionState(session, client, label, self.state.now, origin)
            self.state.core.labels[session] = label or f"session {session}"
            self.state.core.last_message_at[session] = self.state.now
            self._note("opened", session, client, self.state.now, label, origin)

    def message_received(self, session: int, now: float) -> None:
        """Record that a session sent a message that is no request (a heartbeat). Only texts for people use it ("silent
        for 9 s").
        """
        if session in self.state.sessions:
            self.state.core.last_message_at[session] = now

    def close_session(self, session: int, now: float, *, pins: bool = True) -> None:
        """Close the session of a client that left or died. Its leases end, and its reservations are released.

        pins=False: the client may still read its views or write into its grants (a paused or forked process), so those
        stay until `end_pins`. Closing a session that is not open is no error.
        """
        self.tick(now)
        with self._changes("the end of a session"):
            self.state.close_session(session)
            if pins:
                self.state.end_pins(session)
            self._note("closed", session, self.state.now, pins)

    def end_pins(self, session: int) -> None:
        """Return the pins and grants of a closed session, since none of its views and writers is left."""
        state = self.state.sessions.get(session)
        if state is not None and state.open:
            raise InternalError(f"session {session} is open; close it before its pins end")
        with self._changes("the end of pins"):
            self.state.end_pins(session)
            self._note("pins_ended", session)

    def grant(self, session: int, shard: int, offset: int, nbytes: int, now: float, *, call: int = 0) -> m.Granted:
        """Grant an extent, which the caller has allocated, to `session`. `call` answers a retry, as in `apply`.

        The extent closes by `ReturnGrant`, with its session, or by a commit that begins at its start and ends in its
        last page. The effect `FreeExtent` then frees it, once.
        """
        self.tick(now)
        holder = self.state.session(session)
        with self._changes("a grant"):
            extent = self.state.core.blocks.grant(session, shard, offset, nbytes)
            reply = m.Granted(extent.id, shard, offset, nbytes)
            holder.replies.keep(call, reply)
            self._note("granted", session, shard, offset, nbytes, self.state.now, call, extent.id)
            return reply

    def replied(self, session: int, call: int) -> m.Reply | None:
        """The cached reply to a call, or None. For requests that the caller answers itself (`Grant`)."""
        return self.state.session(session).replies.get(call)

    def forget_replies(self, session: int, call: int) -> None:
        """Remove cached replies up to `call`, which the client has received."""
        if (state := self.state.sessions.get(session)) is not None:
            if self.state.core.writing:
                self._raise_torn("the seen replies of a client")
            self.state.core.writing = True
            state.replies.forget(call)
            self._note("seen", session, call)
            self.state.core.writing = False

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> int:
        """Apply all events due by `now`: leases expire, deadlines of groups pass, unclaimed shares are returned.
        Returns their number."""
        state = self.state
        if now > state.now:
            state.now = now
        now = state.now
        if (at := self.next_deadline()) is None or at > now:
            return 0
        due = 0
        with self._changes("an event that was due"):
            if state.core.blocks.ending:
                state.core.blocks.ended_at = now
            for subject in state.core.deadlines.due(now):
                self._apply_due(subject, now)
                due += 1
            self._note("ticked", now, due)
        return due

    def _apply_due(self, subject: Expiring, now: float) -> None:
        if isinstance(subject, LeaseState):
            self._expire(subject)
        elif isinstance(subject, RetryQueue):
            table, task = self.state.task(subject.table, subject.task)
            resume_due(table, task, now)
            apply_group_and_stale_rules(table, now)
        elif isinstance(subject, Circuit):
            table, task = self.state.task(subject.table, subject.task)
            trial_due(table, task, now)
            apply_group_and_stale_rules(table, now)
        elif isinstance(subject, FormingGroup):
            self._end_forming(subject, now)
        elif isinstance(subject, weight_channels.UpdateSlot):
            weight_channels.end_turn(self.state.channels[subject.channel], subject.session, self.state.core.effects)
        elif isinstance(subject, CopyOrderState | PostponedCopy):
            self._copies.due(subject)
        elif isinstance(subject, PendingVersion):
            self.state.give_up_version(subject, f"{subject.length_s:g} s have passed")

    def _end_forming(self, group: FormingGroup, now: float) -> None:
        table = self.state.table(group.table)
        for task in table.group_tasks:
            if task.task.name == group.task:
                task.group_is_late(group)
        apply_group_and_stale_rules(table, now)

    def _expire(self, lease: LeaseState) -> None:
        if is_loading(self.state.tables[lease.table], lease):
            self.state.core.deadlines.add(lease, self.state.now + lease.length_s)
            return
        why = f"it expired after {lease.length_s:g} s without renewal" if lease.holders else "no rank claimed the share"
        expire_lease(self.state.tables[lease.table], lease, why, self.state.now)

    def next_deadline(self) -> float | None:
        """The earliest time at which `tick` would change something."""
        at, blocks = self.state.core.deadlines.next(), self.state.core.blocks
        if blocks.ending and (at is None or at > blocks.ended_at + END_INTERVAL_S):
            return blocks.ended_at + END_INTERVAL_S
        return at

    def take_effects(self) -> list[Effect]:
        """Effects since the last call, for the caller to apply. A torn ledger has none."""
        core = self.state.core
        if core.writing:
            return []
        core.writing = True
        taken = core.effects.take()
        core.writing = False
        return taken

    # ------------------------------------------------------------ rows that files contain

    def refuse_to_record_beyond(self, nbytes: int) -> None:
        """Tables that record their rows get no block of more bytes. Not part of the state."""
        self.state.core.recorded_block_max = nbytes

    def rows_to_record(self) -> Mapping[str, RowRecord]:
        """What each table that records its rows knows of its record. Callers change nothing."""
        return self.state.records

    def recorded_terms(self, table: str) -> Recorded:
        """The retention of a table that records its rows."""
        return terms_of(self.state.table(table))

    def records_at_once(self, table: str) -> bool:
        """See `recording.records_at_once`."""
        return records_at_once(self.state.table(table))

    def next_ended(self, table: str, most: int, now: float) -> EndedBatch | None:
        """See `recording.next_batch`."""
        return next_batch(self.state.table(table), most, max(now, self.state.now))

    def rows_recorded(self, table: str, number: int, rows: Sequence[int], now: float) -> int:
        """See `recording.rows_recorded`. Frees the rows; returns their number."""
        self.tick(now)
        with self._changes("a record of rows"):
            freed = rows_recorded(self.state.table(table), number, np.array(rows, np.int64))
            self._note("rows_recorded", table, number, list(rows), self.state.now, freed)
        return freed

    # ------------------------------------------------------------ losses

    def blocks_lost(self, blocks: Collection[int], now: float) -> dict[str, list[int]]:
        """Handle damaged blocks (see `data_loss`). Returns the rows that ended as lost, by table. Other rows are
        requeued to regenerate values.
        """
        self.tick(now)
        known = [number for number in blocks if number in self.state.core.blocks.blocks]
        with self._changes("the loss of blocks"):
            lost = lose_blocks(self.state, known, "damaged bytes")
            self._note("lost", known, self.state.now)
        return lost

    def values_in(self, blocks: Collection[int]) -> dict[str, dict[str, list[int]]]:
        """The rows that read a field from one of these blocks, by table and field. Changes nothing."""
        return values_in(self.state, blocks)

    def shard_lost(self, shard: int, now: float) -> dict[str, list[int]]:
        """Handle the loss of a shard with all its bytes (see `data_loss`). Returns as `blocks_lost`.

        No `FreeExtent` follows for this memory. Sessions may still return pins and grants in it, which is no error; a
        commit into such a grant is refused with `ShardLost`. The caller must not reuse the number, since cached replies
        name it (see `BlockRegistry.last_shard`).
        """
        self.tick(now)
        with self._changes("the loss of a shard"):
            lost = lose_blocks(self.state, self._copies.lose_shard(shard), f"lost with shard {shard}")
            self._note("shard_lost", shard, self.state.now)
        return lost

    # ------------------------------------------------------------ new copies

    @property
    def _copies(self) -> Copies:
        return copies_of(self.state.core.blocks)

    @property
    def missing_copies(self) -> MissingCopies:
        """The blocks that lie in fewer shards than their tables keep. Callers change nothing."""
        return self._copies.missing

    def order_copies(
        self, session: int, shard: int, offset: int, nbytes: int, blocks: Collection[int], now: float
    ) -> None:
        """Have the session of a shard process copy blocks that `MissingCopies.choose` chose into an extent, which the
        caller has allocated in `shard`. The extent closes by `finish_copies`, or with the session.
        """
        self.tick(now)
        self.state.session(session)
        with self._changes("an order of copies"):
            order = self._copies.begin(session, shard, offset, nbytes, blocks)
            self.state.core.deadlines.add(order, self.state.now + COPY_ORDER_S)
            self._note("copies_ordered", session, shard, offset, nbytes, list(blocks), self.state.now)

    def ordered_extent(self, session: int) -> int:
        """The extent of the copy order that a session has; 0 if it has none."""
        order = self._copies.of_session(session)
        return order.extent if order is not None else 0

    def copy_order(self, session: int, shard: int) -> m.CopyOrder | None:
        """The copy order of a session, which is that of `shard`; None if it has none. See `Copies.message`."""
        order = self._copies.of_session(session)
        return None if order is None else self._copies.message(order, shard)

    def finish_copies(self, session: int, extent: int, written: Collection[int], now: float) -> int:
        """The session reports which blocks of its copy order it wrote. Returns how many copies count from now on: see
        `Copies.finish`.
        """
        self.tick(now)
        if self.ordered_extent(session) != extent:
            return 0
        with self._changes("a report of copies"):
            added, postponed = self._copies.finish(session, extent, frozenset(written))
            for copy in postponed:
                self.state.core.deadlines.add(copy, self.state.now + copy.delay_s)
            self._note("copies_finished", session, extent, list(written), self.state.now, added)
        return added

    # ------------------------------------------------------------ queries of the server

    @property
    def now(self) -> float:
        """The latest time passed to any call; minus infinity before the first one."""
        return self.state.now

    @property
    def table_names(self) -> list[str]:
        """The tables that exist."""
        return list(self.state.tables)

    @property
    def channel_names(self) -> list[str]:
        """The weight channels that exist."""
        return list(self.state.channels)

    @property
    def channels_with_history(self) -> list[str]:
        """The weight channels with differences that no version needs to be read."""
        blocks = self.state.core.blocks
        return [name for name, channel in self.state.channels.items() if weight_channels.history(channel, blocks)]

    def has_table(self, name: str) -> bool:
        """Whether a table of this name exists."""
        return name in self.state.tables

    def has_task(self, table: str, task: str) -> bool:
        """Whether the table exists and has this task."""
        return table in self.state.tables and task in self.state.tables[table].tasks

    def times_ready(self, table: str, task: str) -> tuple[object, int] | None:
        """How often rows became ready to a task, returned to it or were ranked again; None if table or task do not
        exist. Returns an object that stands for the life of the table, and the number, which only grows. Another thread
        may call this while a request is applied.
        """
        state = self.state.tables.get(table)
        known = None if state is None else state.tasks.get(task)
        return None if state is None or known is None else (weakref.ref(state), known.times_ready)

    def has_leased(self, table: str, task: str) -> bool:
        """Whether rows of the task are leased."""
        return bool(self.state.task(table, task)[1].counts[LEASED])

    def live_rows(self) -> dict[str, int]:
        """The number of live rows of each table."""
        return {name: table.rows_live for name, table in self.state.tables.items()}

    def known_sessions(self) -> list[SessionState]:
        """All sessions: the open ones, and closed ones that still hold pins or grants."""
        return list(self.state.sessions.values())

    def knows_session(self, session: int) -> bool:
        """Whether a session is open, or closed and still holds pins or grants."""
        return session in self.state.sessions

    @property
    def extents(self) -> list[ExtentState]:
        """The extents that are neither freed nor lost, in the order in which they were granted."""
        return [extent for extent in self.state.core.blocks.extents.values() if not extent.lost]

    def extents_of(self, shard: int) -> list[ExtentState]:
        """The extents of a shard, as `extents`."""
        return [extent for extent in self.extents if extent.shard == shard]

    def shard_of_extent(self, extent: int) -> int | None:
        """The shard in which an extent is; None if it is freed, or was never granted."""
        state = self.state.core.blocks.extents.get(extent)
        return None if state is None else state.shard

    def blocks_of(self, shard: int) -> list[m.BlockLocation]:
        """The blocks whose first copy is in this shard."""
        blocks = self.state.core.blocks.blocks.values()
        return [block.at for block in blocks if block.at.shard == shard]

    @property
    def last_shard(self) -> int:
        """The highest number of a shard in which an extent was ever granted."""
        return self.state.core.blocks.last_shard

    @property
    def last_extent(self) -> int:
        """The number of the extent that was granted last; 0 if there was none."""
        return self.state.core.blocks.granted

    @property
    def blocks_committed(self) -> int:
        """How many blocks were ever committed."""
        return self.state.core.blocks.committed

    def check_empty(self) -> None:
        """`UsageError` if a table or a weight channel exists: a restore needs an empty ledger."""
        check_empty(self.state)

    def explain_absence_with(self, absence: Callable[[str, str, float], Absence | None]) -> None:
        """Set `absence(table, task, now)`, the time since when no session works on a task, for texts. Not part of the
        state."""
        self.state.core.absence = absence

    # ------------------------------------------------------------ requests

    def apply(self, request: m.Request, *, session: int, call: int, now: float) -> m.Reply | Blocked:
        """Execute a request of a session. Raises `TransferQueueError` if it is refused.

        `call` is the client's number of this request, ascending. A retry with the same number gets the same reply (0:
        the request is not recognised). On `Blocked`, apply the request again, with the same call, after a `WakeWaiters`
        for one of its keys.
        """
        state, core = self.state, self.state.core
        if core.writing:
            self._raise_torn(m.tag_of(request))
        if now > state.now:
            state.now = now
        if (due := self.next_deadline()) is not None and due <= state.now:
            self.tick(now)
        holder = state.sessions.get(session)
        if holder is None or not holder.open:
            holder = state.session(session)  # raises
        core.last_message_at[session] = state.now
        handler = HANDLERS.get(type(request))
        if handler is None:
            raise ProtocolError(f"{type(request).__name__} is not a request for the ledger")
        repeat = DECLARED[type(request)].repeat
        try:
            may_repeat = call <= holder.replies.last and repeat != "again"
            if may_repeat and (repeat != "by_put" or not self._is_known_put(request, holder, call)):
                answered = holder.replies.get(call)
                if answered is not None:
                    return answered
            reply = handler(state, request, holder, call)
            if repeat != "again" and not isinstance(reply, Blocked):
                core.writing = True
                core.blocks.end_some()
                holder.replies.keep(call, reply)
                self._note_applied(request, session, call, reply)
        except BaseException as error:
            if core.writing:
                self._raise_torn(m.tag_of(request), error)
            if isinstance(error, MemoryError):
                raise no_memory() from error
            raise
        core.writing = False
        return reply

    def is_repeat(self, request: m.Request, session: int, call: int) -> bool:
        """Whether `apply` answered this call before, and answers it so again."""
        holder = self.state.sessions.get(session)
        if holder is None or call > holder.replies.last:
            return False
        if DECLARED[type(request)].repeat == "by_put" and self._is_known_put(request, holder, call):
            return True
        return holder.replies.was_answered(call)

    def _is_known_put(self, request: Any, session: SessionState, call: int) -> bool:
        """Whether this is a retry of a put that the table recognises, even if its reply left the cache."""
        table = self.state.tables.get(request.table)
        return table is not None and table.known_puts.find(session.client, call) is not None

    def explain(self, request: m.Request, now: float) -> str:
        """Explain why a waiting request cannot proceed: the missing rows or memory, and their holder."""
        self.tick(now)
        return explained(self.state, request)

    def observe(self, request: m.Observe, now: float) -> Observation:
        """The ledger's part of `m.Observed`."""
        self.tick(now)
        return observed(self.state, request)

    def bytes_of_tables(self) -> dict[str, int]:
        """Bytes of the blocks of each table."""
        return {name: table.usage.bytes for name, table in self.state.tables.items()}

    def sessions(self, now: float) -> Sessions:
        """The holdings of each session."""
        self.tick(now)
        return sessions(self.state)

    def events(self, request: m.ListEvents, now: float) -> EventsAnswer:
        """The events of a table's rows since an earlier answer: the content of `m.Observed`."""
        self.tick(now)
        return listed_events(self.state.table(request.table), request, self.state.now)
