"""Opens, continues and ends the sessions of clients.

- A client that lost its connection, or whose server was restarted, sends Hello again, then all unanswered calls in
  order. A call counts only on the connection that brought the session's latest Hello.
- A session ends by Goodbye, by the death of its process, by silence where the server can observe nothing else, or
  because its peer does not read. Its waiting requests are removed, and its leases return. Its memory returns as soon as
  no process can see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from msgspec.structs import replace

from transferqueue.errors import Disconnected, Full, JournalFailed, TransferQueueError, UsageError
from transferqueue.server.answers import Answers, failed
from transferqueue.server.defects import Defects
from transferqueue.server.event_log import log_event
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.server.sessions import authorization
from transferqueue.server.sessions.exit_status import CUT
from transferqueue.server.sessions.liveness import ProcessHandle
from transferqueue.server.sessions.session_table import NOWHERE, OpenSession, Peer, encode_hello
from transferqueue.server.sessions.waiting import WaitingRequest
from transferqueue.server.state import ServerState
from transferqueue.wire import messages as m
from transferqueue.wire.codec import CallHead
from transferqueue.wire.roles import Role


class Watcher(Protocol):
    """Watches the processes of sessions, and calls `Coordinator.process_exited` for each that ends."""

    def watch(self, session: int, pidfd: int) -> None:
        """Watch the process of `session`. `pidfd` becomes readable when the process ends."""

    def unwatch(self, pidfd: int) -> None:
        """Stop watching. The caller is about to close `pidfd`."""


class Clients:
    """The clients of one coordinator.

    Args:
        watcher: watches the processes of sessions.
        open_process: finds the process of a client that says Hello.
    """

    def __init__(
        self,
        state: ServerState,
        answers: Answers,
        defects: Defects,
        watcher: Watcher,
        open_process: Callable[[m.Hello], ProcessHandle],
    ) -> None:
        self.on_hello: Callable[[Peer], object] = lambda _: None
        """Called with each peer that has a session: its connection no longer counts as unauthenticated."""
        self._state = state
        self._answers, self._defects = answers, defects
        self._watcher, self._open_process = watcher, open_process
        self._lock_directory: Final = state.identity.lock_directory

    def session_of(self, peer: Peer, number: int) -> OpenSession | None:
        """The open session of this number, if `peer` is its connection."""
        session = self._state.sessions.get(number)
        return session if session is not None and session.peer == peer else None

    def refuse_elsewhere(self, peer: Peer, call: m.CallFrame | CallHead) -> None:
        """Refuse or ignore a call that did not come over the connection of its session. It was sent before a Hello on a
        new connection or (ZeroMQ) before a restart of the server. The client sends an ignored call again after its
        Hello."""
        try:
            session = self._state.sessions.of_call(call.session)
            if session.peer != NOWHERE:
                authorization.check_owner(session, peer)
        except Disconnected as error:
            self._answers.send(peer, call.id, failed(error))

    # ------------------------------------------------------------ opening

    def hello(self, peer: Peer, role: Role, call: int, hello: m.Hello, now: float) -> None:
        """A client says Hello: open its session, or continue it."""
        try:
            session = self._state.sessions.of_client(hello.client) or self._open(peer, role, hello, now)
            authorization.check_owner(session, peer, by_client=True)
        except JournalFailed:
            raise
        except TransferQueueError as error:
            self._answers.send(peer, call, failed(error))
            return
        self.on_hello(peer)
        if session.confirm_hello(peer, call, now):
            session.remote |= hello.remote
            self._answers.send(peer, call, self._welcome(session))

    def _open(self, peer: Peer, role: Role, hello: m.Hello, now: float) -> OpenSession:
        state = self._state
        hello = self._admit(peer, role, hello)
        try:
            process = self._open_process(hello)
        except OSError as error:
            raise Full(
                f"session refused: the server may open no more files ({error.strerror}); raise its limit (ulimit -n), "
                "or close queues that are not used"
            ) from error
        session = state.sessions.open(hello, process, peer, now)
        try:
            origin = encode_hello(hello)
            state.ledger.open_session(session.number, hello.client, now, label=session.label, origin=origin)
            for part in state.parts:
                part.session_opened(session)
            self.watch(session)
        except OSError as error:
            self.end(session, now, "")
            raise Full(f"session refused: the kernel does not watch process {hello.pid}: {error.strerror}") from error
        except JournalFailed:
            raise
        except Exception:
            self.end(session, now, "")  # a session is open here and in the ledger, or in neither
            raise
        log_event("session_opened", session=session.number, label=session.label, pid=hello.pid)
        return session

    def _admit(self, peer: Peer, role: Role, hello: m.Hello) -> m.Hello:
        """The Hello of a client that may open a session."""
        if len(hello.client) != 16:
            raise UsageError(f"session refused: client id has {len(hello.client)} bytes; send 16 random ones")
        authorization.check_lock(peer, hello)
        authorization.check_offer(role, hello)
        self._state.sessions.check_room()
        offer = hello.shard
        for part in self._state.parts:
            hello = part.admit(hello, keyed=bool(authorization.key_of(peer)))
        if offer is not None and hello.shard is offer:
            raise UsageError(
                "shard refused: this server uses only its own memory: it was assembled without "
                "transferqueue.server.shards"
            )
        return hello

    def _welcome(self, session: OpenSession) -> m.Welcome:
        state = self._state
        arena = state.lending.own.arena
        welcome = m.Welcome(
            session=session.number,
            epoch=state.identity.epoch,
            server=state.identity.version,
            runtime=state.identity.runtime,
            arenas={} if session.remote else {SHARD: arena.path},
            arena_bytes=arena.capacity,
            seat=state.index,
        )
        return replace(welcome, **{name: fact for part in state.parts for name, fact in part.welcome().items()})

    def watch(self, session: OpenSession) -> None:
        """Watch the process of a session, so that its end ends the session."""
        if session.process.pidfd >= 0:
            self._watcher.watch(session.number, session.process.pidfd)

    # ------------------------------------------------------------ ending

    def end(self, session: OpenSession, now: float, reason: str, *, how: str = "") -> None:
        """End a session. `reason` answers its waiting requests ("": its client cannot be reached). `how` is the reason
        in reports ("": the same)."""
        state, defects, number = self._state, self._defects, session.number
        ending, pidfd = how or reason or CUT, session.process.pidfd
        log_event("session_ended", session=number, label=session.label, why=ending)
        defects.guard("note of a worker", partial(state.workers.record_end, number, session.label, ending, pidfd, now))
        removed = state.waiting.remove_session(number)
        for waiting in removed if reason else ():
            self._answers.send(session.peer, waiting.call, failed(Disconnected(f"session closed: {reason}")))
        if removed and state.parts:
            defects.guard("end of waits", partial(self._tell_waits_ended, removed, now))
        if session.process.pidfd >= 0:
            defects.guard("end of a watch", partial(self._watcher.unwatch, session.process.pidfd))
        for part in state.parts:
            defects.must("the end of a session", partial(part.session_ends, session, now))
        lingers = state.sessions.close(session, now)
        defects.must("the end of a session", partial(state.ledger.close_session, number, now, pins=not lingers))
        for part in state.parts:
            defects.must("the end of a session", partial(part.session_ended, session.hello, now))
        if not lingers:
            self._close_process(session)

    def _tell_waits_ended(self, removed: list[WaitingRequest], now: float) -> None:
        keys = {key for waiting in removed for key in waiting.keys}
        ended = {key for key in keys if not self._state.waiting.is_waited_for(key)}
        for part in self._state.parts:
            part.waits_ended(ended, now)

    def end_silent(self, now: float) -> None:
        """End the sessions that neither a message nor a process or lock shows to be alive."""
        for session in self._state.sessions.silent(now):
            self.end(session, now, f"silent for {now - session.last_message_at:.0f} s")

    def free_lingering(self, now: float) -> None:
        """Free the memory of ended sessions through which no process sees it any more."""
        for session in self._state.sessions.released_by_dead_process(now):
            self._defects.must("the end of pins", partial(self._state.ledger.end_pins, session.number))
            self._close_process(session)

    def _close_process(self, session: OpenSession) -> None:
        self._defects.guard("end of evidence", partial(session.process.close, self._lock_directory))

    def stop(self) -> None:
        """Stop watching processes."""
        self._state.workers.close()
        for session in [*self._state.sessions, *self._state.sessions.lingering]:
            session.process.close(self._lock_directory)
