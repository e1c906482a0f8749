"""A coordinator: takes frames and gives answers. It joins the ledger, the memory, the sessions and the requests that
wait.

It opens no socket, reads no clock and starts no thread. The loop brings events and the time (`receive`, `tick`,
`process_exited`, `peer_lost`), and sends the answers in `outbox`.

- A peer whose key is unknown or withdrawn gets no answer. When a key is withdrawn, each of its open sessions is told.
- A request that its role may not send (`sessions.authorization`), or that belongs to another coordinator
  (`sessions.home_coordinator`), is refused before anything else happens.
- Of a frame over `SMALL_FRAME_BYTES` the coordinator reads only the envelope first. It refuses the frame undecoded,
  unless it is a call in an open session of its peer, of a kind and size that the peer's role may send
  (`authorization.check_size`).
- A frame that is no message is counted and answered with `ProtocolError`. It changes nothing.
- A call in a session that is not open is answered with `Disconnected`.
- A call counts only on the connection that brought the session's latest Hello. A client that lost its connection, or
  whose server was restarted, sends Hello again, then all unanswered calls in order. ZeroMQ may deliver frames of the
  lost connection before that Hello: the coordinator ignores them.
- A call that arrives twice is carried out once. While it waits, it keeps its place, and its deadline can only become
  earlier. Once answered, it gets the same answer until the client says that it has `seen` it. After that it is ignored.
- After every change the coordinator tries the waiting requests that the change may concern (`sessions.waiting`), before
  it reads the next frame. The loop sends the answers of a few before the next few are tried.
- An unexpected exception before the ledger writes is logged once, with a number and its traceback. The sender gets
  `InternalError` with that number, and its session ends.
- An unexpected exception in a part of `tick` is logged and counted. Only that part is tried again, after
  `DEFECT_PAUSE_S`.
- An exception ends the server (`LedgerTorn`) if it tears the ledger, or leaves undone an order of the ledger or the end
  of a session. `JournalFailed` and any other error of `commit` end it too: no client may be told of a change that is
  not durable.
- A session ends by Goodbye, by the death of its process, by silence where the server can observe nothing else, or
  because its peer does not read. Its waiting requests are removed, and its leases return. Its memory returns as soon as
  no process can see it. If it brought a shard, that shard is lost (`shards.registry`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from transferqueue.errors import (
    DeadlineExceeded,
    Disconnected,
    DiskFailed,
    FlowSignal,
    Full,
    InternalError,
    JournalFailed,
    LedgerTorn,
    ProtocolError,
    TransferQueueError,
    UsageError,
)
from transferqueue.ledger.effects import Blocked, FreeExtent, LeaseEnded, WakeWaiters
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import CALLS_PARKED_MAX, COUNT_MAX, DEFECT_PAUSE_S, SMALL_FRAME_BYTES
from transferqueue.server import reports
from transferqueue.server.event_log import TABLE_EVENTS, log_event, log_table_event
from transferqueue.server.identity import ServerIdentity
from transferqueue.server.loop_latency import Turns
from transferqueue.server.parts import Durability, NoDurability, Part
from transferqueue.server.reports import Counters
from transferqueue.server.server_requests import ServerRequests
from transferqueue.server.sessions import authorization, liveness
from transferqueue.server.sessions.exit_status import CUT, DIED, GOODBYE
from transferqueue.server.sessions.home_coordinator import wrong_coordinator
from transferqueue.server.sessions.session_table import (
    NOWHERE,
    PRODUCERS,
    OpenSession,
    Peer,
    SessionTable,
    Workers,
    encode_hello,
)
from transferqueue.server.sessions.waiting import WaitingRequest, WaitQueue, wait_of
from transferqueue.server.shards.own_memory import SHARD, OwnShardMemory
from transferqueue.server.shards.registry import ShardRegistry, live_set
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.transport.control.unix_socket import UnixPeer
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.messages.declarations import DECLARED, Declaration
from transferqueue.wire.requests import undo
from transferqueue.wire.roles import Role
from transferqueue.wire.versions import refusal_of

_log: Final = logging.getLogger("transferqueue.server")
_NAMES_ROWS: Final = frozenset({m.LeaseRequest, m.ReadRequest})
"""Requests whose replies name many rows. Such a reply may be too large to send."""
_WITHDRAWN: Final = (
    "session closed: the key of this client was withdrawn; get another key from the server's operator (transferqueue "
    "keys)"
)
_ADD_WORK: Final = frozenset({m.PutRequest, m.CreateTable, m.AddTask, m.Reserve, m.Publish, m.BeginVersion, m.Restore})
"""A server whose state disk is full refuses these requests, and grants of memory for anything but results."""
_CAUSE_CHARS: Final = 300
"""A client gets this much of the text of an unexpected exception. The log has all of it."""


class Watcher(Protocol):
    """Watches the processes of sessions, and calls `Coordinator.process_exited` for each that ends."""

    def watch(self, session: int, pidfd: int) -> None:
        """Watch the process of `session`. `pidfd` becomes readable when the process ends."""

    def unwatch(self, pidfd: int) -> None:
        """Stop watching. The caller is about to close `pidfd`."""


class Coordinator:
    """One coordinator, with its own shard and the remote shards that joined. Used by one thread. Blocks only while the
    system provides pages for a growing arena.

    Args:
        watcher: watches the processes of sessions.
        open_process: finds the process of a client that says Hello.
        authorizer: maps keys to roles; None: a server without keys.
        durability: the journal and its disk; None: nothing outlives the process.
        tickets: of the own shard; None: new ones.
        index: of this coordinator in its deployment.

    `bulk_port` is the port of the own shard (0: it does not listen), and `bulk_plain` says whether its connections are
    unencrypted. `bulk_sent` and `bulk_received` count the bytes of reads and writes there, by carrier.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: OwnShardMemory,
        identity: ServerIdentity,
        *,
        watcher: Watcher,
        open_process: Callable[[m.Hello], liveness.ProcessHandle] = liveness.open_process,
        authorizer: authorization.Authorizer | None = None,
        durability: Durability | None = None,
        tickets: TicketIssuer | None = None,
        index: CoordinatorIndex = CoordinatorIndex(),  # noqa: B008  (frozen)
    ) -> None:
        self.ledger: Final = ledger
        self.index: Final = index
        self.memory: Final = memory
        self.identity: Final = identity
        self.sessions: Final = SessionTable(identity.epoch)
        self.waiting: Final = WaitQueue()
        self.counters: Final = Counters()
        self.parts: Final[list[Part]] = []
        self.workers: Final = Workers()
        self.tickets: Final = tickets or TicketIssuer()
        self._durability = durability or NoDurability()
        self.shards: Final = ShardRegistry(
            memory,
            self.tickets,
            identity.epoch,
            last=ledger.last_shard,
            own_first=self._durability.keeps_own_copy,
            wake=self.waiting.wake,
            live_set=self._live_set,
        )
        self.on_hello: Callable[[Peer], object] = lambda _: None
        """Called with each peer that has a session: its connection no longer counts as unauthenticated."""
        self.bulk_port = 0
        self.bulk_plain = False
        self.bulk_sent: Callable[[], dict[str, int]] = dict
        self.bulk_received: Callable[[], dict[str, int]] = dict
        self.outbox: list[tuple[Peer, bytes]] = []
        self.waiters_at_once = COUNT_MAX
        """`receive` serves at most this many waiting requests before it returns. The loop lowers it, to send their
        answers before the others are served."""
        self.unfinished = False
        """Whether `go_on` has something to do."""
        self.turns: Final = Turns()
        """Filled by the loop, which has the clock."""
        self.handled = ""
        """The tag of the request that the last frame carried."""
        self._failed_sessions: list[tuple[int, str]] = []
        """Sessions that a defect ends, and the reason for their waiting requests."""
        self._paused: dict[str, float] = {}
        """Parts of the tick in which a defect occurred, and the time of their next try."""
        self._watcher = watcher
        self._open_process = open_process
        self._authorizer = authorizer or authorization.Authorizer()
        self.has_journal: Final = durability is not None
        """Whether `commit` has something to do."""
        self._report_sources: Final = reports.ReportSources(
            identity=identity,
            index=index,
            ledger=ledger,
            sessions=self.sessions,
            waiting=self.waiting,
            workers=self.workers,
            shards=self.shards,
            counters=self.counters,
            turns=self.turns,
            explain=self.explain,
            bulk_port=lambda: self.bulk_port,
            bulk_sent=lambda: dict(self.bulk_sent()),
            bulk_received=lambda: dict(self.bulk_received()),
            parts=self.parts,
        )
        self.operations: Final = ServerRequests(self._report_sources)
        ledger.explain_absence_with(partial(reports.absence, self._report_sources))

    def attach(self, part: Part) -> None:
        """Add an optional part (see `parts`). Call it before the first frame."""
        self.parts.append(part)
        self.operations.attach(part)

    # ------------------------------------------------------------ what the loop calls

    def receive(self, peer: Peer, frame: bytes, now: float) -> None:
        """Handle a frame from `peer`."""
        if len(frame) > SMALL_FRAME_BYTES and self._refused_unread(peer, frame):
            return
        try:
            self._receive(peer, frame, now)
        except JournalFailed:
            raise
        except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the client)
            session, call = codec.call_of(frame)
            failed = self._defect(self.handled, error, self._session_of(peer, session))
            self._answer(peer, call, failed)
        self._run_until_idle(now, self.waiters_at_once)

    def _refused_unread(self, peer: Peer, frame: bytes) -> bool:
        """Whether a large frame was refused by its envelope, before its request is decoded."""
        role = self._authorizer.role(peer)
        if role is None:
            return False  # it gets no answer
        self.handled, head = "none", codec.head_of(frame)
        try:
            authorization.check_size(role, head, len(frame))
        except TransferQueueError as error:
            self.counters.garbage += 1
            self._answer(peer, head.id, _failed(error))
            return True
        if self._session_of(peer, head.session) is None:
            self._not_its_connection(peer, head)
            return True
        return False

    def go_on(self, now: float) -> None:
        """Serve the next due requests that waited. Call it while `unfinished`, before the next frame is handled."""
        self._run_until_idle(now, self.waiters_at_once)

    def _receive(self, peer: Peer, frame: bytes, now: float) -> None:
        self.handled = "none"
        role = "admin" if type(peer) is UnixPeer else self._authorizer.role(peer)
        if role is None:
            self.counters.unauthenticated_peers += 1
            return
        try:
            call = codec.decode_call(frame)
        except MemoryError:
            no_room = Full(
                f"the memory of the server process is exhausted: a message of {len(frame)} bytes cannot be read; send "
                "less at once"
            )
            self._answer(peer, codec.call_of(frame)[1], _failed(no_room))
            return
        except ProtocolError as error:
            self.counters.garbage += 1
            if (refusal := self._refusal_of_version(frame)) is not None:
                self.outbox.append((peer, refusal))
            else:
                number, id_ = codec.call_of(frame)
                session = self._session_of(peer, number)
                package = session.hello.version if session is not None else ""
                self._answer(peer, id_, _failed(codec.explain_call(frame, error, client_package=package)))
            return
        self.counters.calls += 1
        declared = DECLARED[type(call.request)]
        self.handled = declared.tag
        if type(call.request) is m.Hello:
            self._hello(peer, role, call.id, call.request, now)
        else:
            self._call(peer, role, call, declared, now)

    def _refusal_of_version(self, frame: bytes) -> bytes | None:
        """The answer to a call of another protocol. Its Hello is small, and was refused before any larger frame."""
        if len(frame) > SMALL_FRAME_BYTES:
            return None
        return refusal_of(frame, epoch=self.identity.epoch, package=self.identity.version)

    def tick(self, now: float) -> None:
        """Do everything that is due at `now`."""
        due = self.memory.due_at
        if due is not None and due <= now:
            self.commit()  # a free must be durable before its pages are given back
        for part in (
            self._look_at_disk,
            self._trim,
            self._run_jobs,
            self._tick_ledger,
            self._end_silent,
            self._free_lingering,
            self._expire,
        ):
            if self._paused and now < self._paused.get(part.__name__, now):
                continue
            try:
                part(now)
            except JournalFailed:
                raise
            except Exception as error:  # noqa: BLE001  (logged with its cause)
                self._paused[part.__name__] = now + DEFECT_PAUSE_S
                self._defect(f"tick ({part.__name__.strip('_')})", error)
        if self._paused:
            self._paused = {part: until for part, until in self._paused.items() if until > now}

    def _trim(self, now: float) -> None:
        due = self.memory.due_at
        if due is not None and due <= now:
            self.memory.trim(now)
        self.shards.trim(now)

    def _run_jobs(self, now: float) -> None:
        for part in self.parts:
            part.tick(now)

    def _tick_ledger(self, now: float) -> None:
        due = self.ledger.next_deadline()
        if due is not None and due <= now:
            self.ledger.tick(now)

    def _end_silent(self, now: float) -> None:
        for session in self.sessions.silent(now):
            self._end(session, now, f"silent for {now - session.last_message_at:.0f} s")

    def _free_lingering(self, now: float) -> None:
        for session in self.sessions.released_by_dead_process(now):
            self._must("the end of pins", partial(self.ledger.end_pins, session.number))
            self._guard("end of evidence", partial(session.process.close, self.identity.lock_directory))

    def _expire(self, now: float) -> None:
        self._run_until_idle(now)
        while (waiting := self.waiting.next_expired(now)) is not None:
            self._refuse(waiting, now)
            self._run_until_idle(now)

    def _refuse(self, waiting: WaitingRequest, now: float) -> None:
        """End a wait whose deadline has come. It is removed even after a defect: otherwise each tick would refuse it
        again."""
        try:
            reply = self._deadline_reply(waiting, now)
        except JournalFailed:
            raise
        except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the client)
            reply = self._defect(m.tag_of(waiting.request), error)
        self._complete_waiting(waiting, reply)

    def next_deadline(self) -> float | None:
        """When `tick` must be called next; None: nothing is due."""
        at = self.ledger.next_deadline()
        waits_until = self.waiting.next_deadline() if self.waiting.requests else None
        shards_due_at = self.shards.next_deadline() if self.shards.remote else None
        disk_due_at = self._durability.due_at
        for due in (
            self.sessions.next_deadline(),
            self.memory.due_at,
            waits_until,
            shards_due_at,
            disk_due_at,
            *[part.next_deadline() for part in self.parts],
        ):
            if due is not None and (at is None or due < at):
                at = due
        return at if at is None or not self._paused else max(at, min(self._paused.values()))

    def process_exited(self, number: int, now: float) -> None:
        """The process of a session ended: end the session."""
        session = self.sessions.get(number)
        if session is not None:
            self.end(session, now)

    def peer_lost(self, peer: Peer, now: float) -> None:
        """End the sessions of `peer`: it does not read its answers, or closed its channel without Goodbye."""
        self.handled = "lost"
        for session in self.sessions.of_peer(peer):
            self.counters.sessions_dropped += 1
            self._end(session, now, "")
        self._run_until_idle(now)

    def keys_changed(self, now: float) -> None:
        """End the sessions whose key was withdrawn. Each is told once."""
        for session in [session for session in self.sessions if self._authorizer.role(session.peer) is None]:
            self.counters.sessions_dropped += 1
            self._answer(session.peer, 0, _failed(Disconnected(_WITHDRAWN)))
            self._end(session, now, "", how="its key was withdrawn")
        self._run_until_idle(now)

    def commit(self) -> None:
        """Make all changes so far durable, as the level requires. Blocks. Call it before sending the outbox."""
        self._durability.commit()
        if self.memory.grows_ahead is not (not self._durability.shortage):
            self._shortage_changed()

    def _shortage_changed(self) -> None:
        """The disk of the state became full, or has room again. Waiting requests that add work are refused as new ones
        are."""
        shortage = self._durability.shortage
        self.memory.grows_ahead = not shortage
        for waiting in [waiting for waiting in self.waiting if shortage and self._adds_work(waiting.request)]:
            self._complete_waiting(waiting, _failed(Full(shortage)))
        self.waiting.wake(("memory",))
        self.unfinished = True

    @staticmethod
    def _adds_work(request: m.Request) -> bool:
        return request.use != "results" if type(request) is m.Grant else type(request) in _ADD_WORK

    def _look_at_disk(self, now: float) -> None:
        due = self._durability.due_at
        if due is not None and due <= now:
            self._durability.look(now)
            if not self._durability.shortage:
                self._shortage_changed()

    def disk_failed(self, why: str) -> list[tuple[Peer, bytes]]:
        """End the server because its disk is full or fails: drop all answers, which are not durable. Returns the
        messages that tell its clients."""
        self.outbox, self.unfinished = [], False
        answer = m.AnswerFrame(self.identity.epoch, 0, _failed(DiskFailed(why)))
        return [(session.peer, codec.encode_answer(answer)) for session in self.sessions if session.peer != NOWHERE]

    def stop(self, why: str = "the server was stopped") -> None:
        """Stop watching processes. Unless sessions outlive the server, tell each that it stops, and why."""
        if not self._durability.sessions_stay:
            self._fail_everyone(_failed(Disconnected(why)))
        self.workers.close()
        for session in self.sessions:
            session.process.close(self.identity.lock_directory)
        for session in self.sessions.lingering:
            session.process.close(self.identity.lock_directory)

    def _fail_everyone(self, stopped: m.Failed) -> None:
        for waiting in list(self.waiting):
            self._complete_waiting(waiting, stopped)
        for session in self.sessions:
            self._answer(session.peer, 0, stopped)

    # ------------------------------------------------------------ sessions

    def watch(self, session: OpenSession) -> None:
        """Watch the process of a session, so that its end ends the session."""
        if session.process.pidfd >= 0:
            self._watcher.watch(session.number, session.process.pidfd)

    def end(self, session: OpenSession, now: float) -> None:
        """End a session whose process has ended."""
        self._end(session, now, "", how=DIED)
        self._run_until_idle(now)

    def _hello(self, peer: Peer, role: Role, call: int, hello: m.Hello, now: float) -> None:
        try:
            session = self.sessions.of_client(hello.client) or self._open(peer, role, hello, now)
            authorization.check_owner(session, peer, by_client=True)
        except JournalFailed:
            raise
        except TransferQueueError as error:
            self._answer(peer, call, _failed(error))
            return
        self.on_hello(peer)
        if session.confirm_hello(peer, call, now):
            session.remote |= hello.remote
            self._answer(peer, call, self._welcome(session))

    def _open(self, peer: Peer, role: Role, hello: m.Hello, now: float) -> OpenSession:
        if len(hello.client) != 16:
            raise UsageError(f"session refused: client id has {len(hello.client)} bytes; send 16 random ones")
        authorization.check_lock(peer, hello)
        authorization.check_offer(role, hello)
        self.sessions.check_room()
        hello = self.shards.assign_number(hello, keyed=bool(authorization.key_of(peer)))
        try:
            process = self._open_process(hello)
        except OSError as error:
            raise Full(
                f"session refused: the server may open no more files ({error.strerror}); raise its limit (ulimit -n), "
                "or close queues that are not used"
            ) from error
        session = self.sessions.open(hello, process, peer, now)
        try:
            self.ledger.open_session(session.number, hello.client, now, label=session.label, origin=encode_hello(hello))
            self.shards.join(session)
            self.watch(session)
        except OSError as error:
            self._end(session, now, "")
            raise Full(f"session refused: the kernel does not watch process {hello.pid}: {error.strerror}") from error
        except JournalFailed:
            raise
        except Exception:
            self._end(session, now, "")  # a session is open here and in the ledger, or in neither
            raise
        log_event("session_opened", session=session.number, label=session.label, pid=hello.pid)
        return session

    def _welcome(self, session: OpenSession) -> m.Welcome:
        return m.Welcome(
            session=session.number,
            epoch=self.identity.epoch,
            server=self.identity.version,
            runtime=self.identity.runtime,
            arenas={} if session.remote else {SHARD: self.memory.arena.path},
            arena_bytes=self.memory.arena.capacity,
            bulk_port=self.bulk_port,
            durable=self._durability.sessions_stay,
            bulk_plain=self.bulk_plain,
            seat=self.index,
            checksums=self._durability.checksums,
        )

    def _end(self, session: OpenSession, now: float, reason: str, *, how: str = "") -> None:
        """End a session. `reason` answers its waiting requests ("": its client cannot be reached). `how` is the reason
        in reports ("": the same)."""
        number, shard = session.number, session.hello.shard
        ending, pidfd = how or reason or CUT, session.process.pidfd
        log_event("session_ended", session=number, label=session.label, why=ending)
        self._guard("note of a worker", partial(self.workers.record_end, number, session.label, ending, pidfd, now))
        removed = self.waiting.remove_session(number)
        for waiting in removed if reason else ():
            self._answer(session.peer, waiting.call, _failed(Disconnected(f"session closed: {reason}")))
        if removed and self.parts:
            self._guard("end of waits", partial(self._tell_waits_ended, removed, now))
        if session.process.pidfd >= 0:
            self._guard("end of a watch", partial(self._watcher.unwatch, session.process.pidfd))
        self._must("the end of a shard", partial(self.shards.close, session, now))
        lingers = self.sessions.close(session, now)
        self._must("the end of a session", partial(self.ledger.close_session, number, now, pins=not lingers))
        if shard is not None:
            self._must("the loss of a shard", partial(self.ledger.shard_lost, shard.number, now))
        if not lingers:
            self._guard("end of evidence", partial(session.process.close, self.identity.lock_directory))

    def _tell_waits_ended(self, removed: list[WaitingRequest], now: float) -> None:
        keys = {key for waiting in removed for key in waiting.keys}
        ended = {key for key in keys if not self.waiting.is_waited_for(key)}
        for part in self.parts:
            part.waits_ended(ended, now)

    # ------------------------------------------------------------ defects

    def _guard(self, what: str, act: Callable[[], object]) -> None:
        """Do one of several steps. The server works on without it: a defect is logged, and the other steps happen."""
        try:
            act()
        except JournalFailed:
            raise
        except Exception as error:  # noqa: BLE001  (logged with its cause)
            self._defect(what, error)

    def _must(self, what: str, act: Callable[[], object]) -> None:
        """Do a step that the ledger, or the end of a session, demands. A defect ends the server."""
        try:
            act()
        except JournalFailed:
            raise
        except Exception as error:
            raise _torn(what, error) from error

    def _defect(self, what: str, error: Exception, session: OpenSession | None = None) -> m.Failed:
        """Count and log an unexpected exception, and end its session. Returns the error for its client."""
        if self.ledger.torn:
            raise _torn(what, error) from error
        self.counters.internal_errors += 1
        number = f"{self.identity.epoch}-{self.counters.internal_errors}"
        _log.error("defect %s: %s failed%s", number, what, f" for {session.label}" if session else "", exc_info=error)
        if session is not None:
            self._failed_sessions.append((session.number, f"the server met defect {number}"))
        text = f"{type(error).__name__}: {str(error)[:_CAUSE_CHARS]}"
        over = "; this session is over, connect again" if session else ""
        return _failed(
            InternalError(f"{what} failed ({text}){over}; please report defect {number} with the server's log")
        )

    def _session_of(self, peer: Peer, number: int) -> OpenSession | None:
        """The open session of this number, if `peer` is its connection."""
        session = self.sessions.get(number)
        return session if session is not None and session.peer == peer else None

    def _live_set(self, shard: int) -> m.LiveSet:
        extents = [extent.id for extent in self.ledger.extents_of(shard)] + self.shards.freed_while_held(shard)
        sessions = [session.number for session in self.sessions]
        return live_set(extents, self.ledger.last_extent + 1, sessions, self.sessions.last + 1)

    # ------------------------------------------------------------ calls

    def _call(self, peer: Peer, role: Role, call: m.CallFrame, declared: Declaration, now: float) -> None:
        session = self.sessions.by_number.get(call.session)
        if session is None or session.peer != peer:
            self._not_its_connection(peer, call)
            return
        if call.seen > session.seen:
            self.ledger.forget_replies(session.number, call.seen)
            session.answers_received(call.seen)
        session.last_message_at = now
        request = call.request
        if type(request) is m.Heartbeat:
            self.ledger.message_received(session.number, now)
            return  # it has no answer
        if call.id <= session.seen or (self.waiting.requests and self.waiting.holds(session.number, call.id)):
            self.counters.repeated += 1
            self.ledger.message_received(session.number, now)
            self.waiting.shorten_wait(session.number, call.id, now + wait_of(request))
        elif (role not in declared.roles or declared.home is not None or self._durability.checksums) and (
            refused := self._refused(role, request, declared)
        ) is not None:
            self.ledger.message_received(session.number, now)
            self._answer(peer, call.id, _failed(refused))
        elif type(request) is m.Goodbye:
            self._answer(peer, call.id, m.DoneReply())
            self._end(session, now, "by Goodbye", how=GOODBYE)
        else:
            self._accept_call(session, call.id, request, declared, now)

    def _not_its_connection(self, peer: Peer, call: m.CallFrame | codec.CallHead) -> None:
        """Refuse or ignore a call that did not come over the connection of its session. It was sent before a Hello on a
        new connection or (ZeroMQ) before a restart of the server. The client sends an ignored call again after its
        Hello."""
        try:
            session = self.sessions.of_call(call.session)
            if session.peer != NOWHERE:
                authorization.check_owner(session, peer)
        except Disconnected as error:
            self._answer(peer, call.id, _failed(error))

    def _refused(self, role: Role, request: m.Request, declared: Declaration) -> TransferQueueError | None:
        """Why a request is refused before it is tried; None if it is not."""
        if self._durability.checksums:
            shard_of = self.ledger.shard_of_extent if self.shards.remote else None
            if (refused := self._durability.refuse(request, shard_of)) is not None:
                return refused
        if role not in declared.roles:
            return authorization.not_allowed(role, declared)
        return None if declared.home is None else wrong_coordinator(self.index, request)

    def _accept_call(
        self, session: OpenSession, call: int, request: m.Request, declared: Declaration, now: float
    ) -> None:
        if type(request) is m.LeaseRequest:
            if self.ledger.has_task(request.table, request.task):
                self.workers.record_request(session.number, request.table, request.task, now)
        elif (type(request) is m.PutRequest or type(request) is m.Reserve) and self.ledger.has_table(request.table):
            self.workers.record_request(session.number, request.table, PRODUCERS, now)
        ahead = self.waiting.count_ahead(request) if self.waiting.requests else 0
        if ahead and (call in session.refused or self.ledger.is_repeat(request, session.number, call)):
            ahead = 0  # the client lost the reply; the requests ahead may wait for the rows that it leased
        if ahead or type(request) in self.operations.by_type:
            self.ledger.message_received(session.number, now)  # `Ledger.apply` records the others
        outcome = (
            self._queue_or_refuse(session, request, ahead, now) if ahead else self._execute(session, call, request, now)
        )
        if isinstance(outcome, Blocked):
            if self.waiting.count(session.number) < CALLS_PARKED_MAX:
                waiting = self.waiting.join(session.number, call, request, now)
                self.waiting.wait_on(waiting, outcome.keys)
                return
            outcome = _failed(Full(f"{CALLS_PARKED_MAX} requests of this session wait already, which is the most"))
        if declared.reply is not None or isinstance(outcome, m.Failed):  # a notice is answered only if it is refused
            self._reply(session, call, request, outcome)

    def _queue_or_refuse(self, session: OpenSession, request: m.Request, ahead: int, now: float) -> Blocked | m.Failed:
        """The outcome of a new request with `ahead` others before it in its lane."""
        if wait_of(request) > 0:
            return Blocked(keys=())
        why = f"{_earlier(ahead)} for the same, and this one may not wait: {self.operations.explain(request, now)}"
        return _failed(DeadlineExceeded(why) if isinstance(request, m.LeaseRequest) else Full(why))

    def _execute(self, session: OpenSession, call: int, request: m.Request, now: float) -> m.Reply | Blocked:
        """Carry out a request. Returns its reply, which may be a refusal, or the keys on which it must wait."""
        if (refused := session.refused.get(call)) is not None:
            return refused
        if (
            self._durability.shortage
            and self._adds_work(request)
            and not self.ledger.is_repeat(request, session.number, call)
        ):
            return _failed(Full(self._durability.shortage))
        try:
            operation = self.operations.by_type.get(type(request))
            if operation is not None:
                reply = operation(session, call, request, now)
            else:
                reply = self.ledger.apply(request, session=session.number, call=call, now=now)
            if type(request) in TABLE_EVENTS:
                log_table_event(request, session.number)
            return reply
        except JournalFailed:
            raise
        except InternalError as error:
            return self._defect(m.tag_of(request), error, session)
        except TransferQueueError as error:
            return _failed(error)
        except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the client)
            return self._defect(m.tag_of(request), error, session)

    # ------------------------------------------------------------ waiting requests

    def _run_until_idle(self, now: float, most: int = COUNT_MAX) -> None:
        """Apply the ledger's effects and try due requests, until nothing is left or `most` were served."""
        self.unfinished = False
        try:
            while True:
                effects = self.ledger.take_effects()
                if effects and (self.waiting.requests or type(effects[0]) is not WakeWaiters):  # else: no request waits
                    self._apply_effects(effects, now)
                if self._failed_sessions:
                    number, reason = self._failed_sessions.pop()
                    if (session := self.sessions.get(number)) is not None:
                        self._end(session, now, reason)
                    continue  # it has effects
                waiting = self.waiting.next_due() if self.waiting.requests else None
                if waiting is None:
                    may_go_on = [part.go_on(now) for part in self.parts]
                    if not any(may_go_on) and not (self.waiting.requests and self.waiting.may_have_due):
                        return
                    continue
                most -= self._try_again(waiting, now)
                if not most:
                    self.unfinished = True
                    return
        except JournalFailed:
            raise
        except Exception as error:
            raise _torn(f"what follows {self.handled}", error) from error

    def _try_again(self, waiting: WaitingRequest, now: float) -> bool:
        """Whether the request was served or refused."""
        session = self.sessions.of_call(waiting.session)
        outcome = self._execute(session, waiting.call, waiting.request, now)
        if isinstance(outcome, Blocked):
            self.waiting.wait_on(waiting, outcome.keys)
            return False
        self._complete_waiting(waiting, outcome)
        return True

    def _apply_effects(self, effects: Iterable[WakeWaiters | FreeExtent | LeaseEnded], now: float) -> None:
        for effect in effects:
            if type(effect) is WakeWaiters:
                if self.waiting.requests:
                    self.waiting.wake(effect.key)
            elif type(effect) is FreeExtent:
                self._must("the return of memory", partial(self.shards.give_back, effect, now))
            elif type(effect) is LeaseEnded:
                self.counters.leases_ended += 1
                log_event("lease_lost", lease=effect.lease, session=effect.session, why=effect.why)

    def _complete_waiting(self, waiting: WaitingRequest, reply: m.Reply) -> None:
        self.waiting.remove(waiting)
        session = self.sessions.get(waiting.session)
        if session is None:
            return
        try:
            self._reply(session, waiting.call, waiting.request, reply)
        except JournalFailed:
            raise
        except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the client)
            self._answer(session.peer, waiting.call, self._defect(m.tag_of(waiting.request), error, session))

    def explain(self, waiting: WaitingRequest, now: float) -> str:
        """Why a request still waits: the missing thing, its holder, and the number of requests before it."""
        ahead = self.waiting.ahead_of(waiting)
        queue = f"; {_earlier(ahead)} before it" if ahead else ""
        return self.operations.explain(waiting.request, now) + queue

    def _deadline_reply(self, waiting: WaitingRequest, now: float) -> m.Failed:
        waited = f"{m.tag_of(waiting.request)} waited {now - waiting.since:.3g} s: "
        until = "until the table ends" if hasattr(waiting.request, "table") else "without a limit"
        return _failed(DeadlineExceeded(f"{waited}{self.explain(waiting, now)}; timeout_s=None waits {until}"))

    # ------------------------------------------------------------ answers

    def _reply(self, session: OpenSession, call: int, request: m.Request, reply: m.Reply) -> None:
        """Answer a call of a session. A reply that is too large to send is undone, and the call refused."""
        if type(reply) is m.Failed and DECLARED[type(request)].repeat != "again":
            session.refuse(call, reply)
        if session.remote or self.shards.remote:
            reply = self.shards.issue(session, reply)
        try:
            frame = codec.encode_answer(m.AnswerFrame(self.identity.epoch, call, reply))
        except UsageError as error:
            refused = _failed(error)
            returns = undo(request, reply, "the reply was too large to send") if type(request) in _NAMES_ROWS else ()
            for undoing in returns:
                with suppress(UsageError, FlowSignal):  # already undone, such as by a lease that expired
                    self.ledger.apply(undoing, session=session.number, call=0, now=session.last_message_at)
            session.refuse(call, refused)
            self._answer(session.peer, call, refused)
        else:
            self.outbox.append((session.peer, frame))

    def _answer(self, peer: Peer, call: int, reply: m.Reply) -> None:
        try:
            frame = codec.encode_answer(m.AnswerFrame(self.identity.epoch, call, reply))
        except UsageError as error:  # such as a text of the system that is no Unicode
            frame = codec.encode_answer(m.AnswerFrame(self.identity.epoch, call, _failed(error)))
        self.outbox.append((peer, frame))


def _earlier(ahead: int) -> str:
    return "1 earlier request waits" if ahead == 1 else f"{ahead} earlier requests wait"


def _torn(what: str, error: Exception) -> LedgerTorn:
    return LedgerTorn(
        f"{what} met {type(error).__name__} ({error}) and was not done, so the state of the server is not known and it "
        "ends. With durability process or disk the next run continues from the journal"
    )


def _failed(error: TransferQueueError) -> m.Failed:
    return m.Failed(error=type(error).__name__, text=str(error))
