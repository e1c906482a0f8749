"""A coordinator: takes frames and gives answers. It joins the ledger, the memory, the sessions and the requests that
wait.

It opens no socket, reads no clock and starts no thread. The loop brings events and the time (`receive`, `tick`,
`process_exited`, `peer_lost`), and sends the answers in `answers.outbox`.

- A peer whose key is unknown or withdrawn gets no answer. When a key is withdrawn, each of its open sessions is told.
- A request that its role may not send (`sessions.authorization`), or that belongs to another coordinator
  (`sessions.home_coordinator`), is refused before anything else happens.
- Of a frame over `SMALL_FRAME_BYTES` the coordinator reads only the envelope first. It refuses the frame undecoded,
  unless it is a call in an open session of its peer, of a kind and size that the peer's role may send
  (`authorization.check_size`).
- A frame that is no message is counted and answered with `ProtocolError`. It changes nothing.
- A call in a session that is not open is answered with `Disconnected`. A call counts only on the connection that
  brought the session's latest Hello (`clients`). ZeroMQ may deliver frames of a lost connection before that Hello: the
  coordinator ignores them.
- Each call is carried out once (`calls`). After every change the waiting requests are tried that it may concern.
- An unexpected exception ends one session, or the server if its state is not known any more (`defects`).
- `JournalFailed` and any other error of `commit` end the server: no client may be told of a change that is not durable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from transferqueue.errors import (
    Disconnected,
    DiskFailed,
    Full,
    ProtocolError,
    TransferQueueError,
)
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import COUNT_MAX, SMALL_FRAME_BYTES
from transferqueue.server import reports
from transferqueue.server.answers import Answers, failed
from transferqueue.server.calls import Calls
from transferqueue.server.clients import Clients, Watcher
from transferqueue.server.defects import Defects, Step
from transferqueue.server.loop_latency import Turns
from transferqueue.server.memory.lending import Lending
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.server.parts import Part, Parts
from transferqueue.server.server_requests import ServerRequests
from transferqueue.server.sessions import authorization, liveness
from transferqueue.server.sessions.exit_status import DIED, GOODBYE
from transferqueue.server.sessions.home_coordinator import wrong_coordinator
from transferqueue.server.sessions.session_table import NOWHERE, Peer, SessionTable, Workers
from transferqueue.server.sessions.waiting import WaitQueue
from transferqueue.server.state import Counters, ServerIdentity, ServerState
from transferqueue.transport.control.unix_socket import UnixPeer
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.messages.declarations import DECLARED, Declaration
from transferqueue.wire.roles import Role
from transferqueue.wire.versions import refusal_of

_WITHDRAWN: Final = (
    "session closed: the key of this client was withdrawn; get another key from the server's operator (transferqueue "
    "keys)"
)


class Coordinator:
    """One coordinator. Used by one thread. Blocks only while the system provides pages for a growing arena.

    Args:
        memory: its own arena.
        watcher: watches the processes of sessions.
        open_process: finds the process of a client that says Hello.
        authorizer: maps keys to roles; None: a server without keys.
        index: of this coordinator in its deployment.
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
        index: CoordinatorIndex = CoordinatorIndex(),  # noqa: B008  (frozen)
    ) -> None:
        self.ledger: Final = ledger
        self.index: Final = index
        self.memory: Final = memory
        self.identity: Final = identity
        self.sessions: Final = SessionTable(identity.epoch)
        self.waiting: Final = WaitQueue()
        self.counters: Final = Counters()
        self.parts: Final = Parts()
        self.workers: Final = Workers()
        self.turns: Final = Turns()
        self.waiters_at_once = COUNT_MAX
        """`receive` serves at most this many waiting requests before it returns. The loop lowers it, to send their
        answers before the others are served."""
        self.handled = ""
        """The tag of the request that the last frame carried."""
        self.lending: Final = Lending(memory, self.parts, self.waiting.wake)
        state = ServerState(
            identity=identity,
            index=index,
            ledger=ledger,
            lending=self.lending,
            sessions=self.sessions,
            waiting=self.waiting,
            workers=self.workers,
            counters=self.counters,
            turns=self.turns,
            parts=self.parts,
        )
        self._authorizer = authorizer or authorization.Authorizer()
        self.operations: Final = ServerRequests(state)
        self.answers: Final = Answers(state)
        self._defects = Defects(state)
        self.clients: Final = Clients(state, self.answers, self._defects, watcher, open_process)
        self._calls = Calls(state, self.answers, self._defects, self.clients, self.operations)
        self._last_steps: list[Step] = [
            ("shortage", lambda now: self._follow_shortage()),
            ("ledger", self._tick_ledger),
            ("end_silent", self.clients.end_silent),
            ("free_lingering", self.clients.free_lingering),
            ("expire", self._calls.expire),
        ]
        ledger.explain_absence_with(partial(reports.absence, state))

    def attach(self, part: Part) -> None:
        """Add an optional part (see `parts`). Call it before the first frame."""
        self.parts.attach(part)
        self.operations.attach(part)

    # ------------------------------------------------------------ frames

    def receive(self, peer: Peer, frame: bytes, now: float) -> None:
        """Handle a frame from `peer`."""
        if len(frame) > SMALL_FRAME_BYTES and self._refused_unread(peer, frame):
            return
        try:
            self._receive(peer, frame, now)
        except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the client)
            session, call = codec.call_of(frame)
            self.answers.send(
                peer, call, self._defects.caught(self.handled, error, self.clients.session_of(peer, session))
            )
        self._calls.run(now, self.waiters_at_once, after=self.handled)

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
            self.answers.send(peer, head.id, failed(error))
            return True
        if self.clients.session_of(peer, head.session) is None:
            self.clients.refuse_elsewhere(peer, head)
            return True
        return False

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
            self.answers.send(peer, codec.call_of(frame)[1], failed(no_room))
            return
        except ProtocolError as error:
            self.counters.garbage += 1
            if (refusal := self._refusal_of_version(frame)) is not None:
                self.answers.outbox.append((peer, refusal))
            else:
                number, id_ = codec.call_of(frame)
                session = self.clients.session_of(peer, number)
                package = session.hello.version if session is not None else ""
                self.answers.send(peer, id_, failed(codec.explain_call(frame, error, client_package=package)))
            return
        self.counters.calls += 1
        declared = DECLARED[type(call.request)]
        self.handled = declared.tag
        if type(call.request) is m.Hello:
            self.clients.hello(peer, role, call.id, call.request, now)
        else:
            self._call(peer, role, call, declared, now)

    def _refusal_of_version(self, frame: bytes) -> bytes | None:
        """The answer to a call of another protocol. Its Hello is small, and was refused before any larger frame."""
        if len(frame) > SMALL_FRAME_BYTES:
            return None
        return refusal_of(frame, epoch=self.identity.epoch, package=self.identity.version)

    def _call(self, peer: Peer, role: Role, call: m.CallFrame, declared: Declaration, now: float) -> None:
        session = self.sessions.by_number.get(call.session)
        if session is None or session.peer != peer:
            self.clients.refuse_elsewhere(peer, call)
            return
        if call.seen > session.seen:
            self.ledger.forget_replies(session.number, call.seen)
            session.answers_received(call.seen)
        session.last_message_at = now
        request = call.request
        if type(request) is m.Heartbeat:
            self.ledger.message_received(session.number, now)  # it has no answer
        elif call.id <= session.seen or (self.waiting.requests and self.waiting.holds(session.number, call.id)):
            self._calls.repeated(session, call.id, request, now)
        elif (role not in declared.roles or declared.home is not None or self.parts.refusing) and (
            refused := self._refused(role, request, declared)
        ) is not None:
            self.ledger.message_received(session.number, now)
            self.answers.send(peer, call.id, failed(refused))
        elif type(request) is m.Goodbye:
            self.answers.send(peer, call.id, m.DoneReply())
            self.clients.end(session, now, "by Goodbye", how=GOODBYE)
        else:
            self._calls.accept(session, call.id, request, declared, now)

    def _refused(self, role: Role, request: m.Request, declared: Declaration) -> TransferQueueError | None:
        """Why a request is refused before it is tried; None if it is not."""
        for part in self.parts.refusing:
            if (refused := part.refuse(request)) is not None:
                return refused
        if role not in declared.roles:
            return authorization.not_allowed(role, declared)
        return None if declared.home is None else wrong_coordinator(self.index, request)

    # ------------------------------------------------------------ waiting requests

    @property
    def unfinished(self) -> bool:
        """Whether `go_on` has something to do."""
        return self._calls.unfinished

    def go_on(self, now: float) -> None:
        """Serve the next due requests that waited. Call it while `unfinished`, before the next frame is handled."""
        self._calls.run(now, self.waiters_at_once, after=self.handled)

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Do everything that is due at `now`."""
        due = self.memory.due_at
        if due is not None and due <= now:
            self.commit()  # a free must be durable before its pages are given back
        parts = [(type(part).__name__, part.tick) for part in self.parts]
        self._defects.tick([("trim", self._trim), *parts, *self._last_steps], now)

    def _trim(self, now: float) -> None:
        due = self.memory.due_at
        if due is not None and due <= now:
            self.memory.trim(now)

    def _tick_ledger(self, now: float) -> None:
        due = self.ledger.next_deadline()
        if due is not None and due <= now:
            self.ledger.tick(now)

    def next_deadline(self) -> float | None:
        """When `tick` must be called next; None: nothing is due."""
        at = self.ledger.next_deadline()
        for due in (
            self.sessions.next_deadline(),
            self.memory.due_at,
            self.waiting.next_deadline() if self.waiting.requests else None,
            *[part.next_deadline() for part in self.parts],
        ):
            if due is not None and (at is None or due < at):
                at = due
        return self._defects.next_tick(at)

    # ------------------------------------------------------------ sessions that end

    def process_exited(self, number: int, now: float) -> None:
        """The process of a session ended: end the session."""
        session = self.sessions.get(number)
        if session is not None:
            self.clients.end(session, now, "", how=DIED)
            self._calls.run(now, after=self.handled)

    def peer_lost(self, peer: Peer, now: float) -> None:
        """End the sessions of `peer`: it does not read its answers, or closed its channel without Goodbye."""
        self.handled = "lost"
        for session in self.sessions.of_peer(peer):
            self.counters.sessions_dropped += 1
            self.clients.end(session, now, "")
        self._calls.run(now, after=self.handled)

    def keys_changed(self, now: float) -> None:
        """End the sessions whose key was withdrawn. Each is told once."""
        for session in [session for session in self.sessions if self._authorizer.role(session.peer) is None]:
            self.counters.sessions_dropped += 1
            self.answers.send(session.peer, 0, failed(Disconnected(_WITHDRAWN)))
            self.clients.end(session, now, "", how="its key was withdrawn")
        self._calls.run(now, after=self.handled)

    # ------------------------------------------------------------ durability

    def commit(self) -> None:
        """Make all changes so far durable, as the level requires. Blocks. Call it before sending the outbox."""
        for part in self.parts.durable:
            part.commit()
        self._follow_shortage()

    def _follow_shortage(self) -> None:
        """If a part lacks room from now on, refuse waiting requests that add work as new ones are; if it has room
        again, try them."""
        shortage = self.parts.shortage
        if self.memory.grows_ahead == (not shortage):
            return
        self.memory.grows_ahead = not shortage
        if shortage:
            self._calls.refuse_all(Full(shortage), work_only=True)
        self.waiting.wake(("memory",))
        self._calls.unfinished = True

    def refuse_work(self, table: str, error: TransferQueueError) -> None:
        """Refuse the waiting requests that add work to this table."""
        self._calls.refuse_all(error, work_only=True, table=table)

    # ------------------------------------------------------------ the end

    def disk_failed(self, why: str) -> list[tuple[Peer, bytes]]:
        """End the server because its disk is full or fails: drop all answers, which are not durable. Returns the
        messages that tell its clients."""
        self.answers.outbox, self._calls.unfinished = [], False
        answer = m.AnswerFrame(self.identity.epoch, 0, failed(DiskFailed(why)))
        return [(session.peer, codec.encode_answer(answer)) for session in self.sessions if session.peer != NOWHERE]

    def stop(self, why: str = "the server was stopped") -> None:
        """Stop watching processes. Unless sessions outlive the server, tell each that it stops, and why."""
        if not self.parts.durable:
            self._calls.refuse_all(Disconnected(why))
            for session in self.sessions:
                self.answers.send(session.peer, 0, failed(Disconnected(why)))
        self.clients.stop()
