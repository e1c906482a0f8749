"""The server's only thread: sleeps until something happens, calls the coordinator, and sends the answers.

The loop wakes for a frame, for the end of a client's process (pidfd), for `stop`, and at the coordinator's next
deadline. It never polls, so the number of wake-ups (`turns`) stands still while nothing happens. `Coordinator.turns`
records how long each frame, tick and commit kept all other clients waiting.

A live client cannot renew its lease while the server does not listen, so no deadline passes then. `ListeningClock`
leaves out the time in which the process was suspended, or busy with one turn. A frame that arrived before a deadline is
handled before that deadline, and as of a time before it. A client that died is ended first: its last frames may be
ignored.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Callable, Collection
from typing import Final

import zmq

from transferqueue.errors import DiskFailed, LedgerTorn
from transferqueue.limits import FRAMES_DRAINED_MAX, GAP_S, WAITERS_AT_ONCE
from transferqueue.server.coordinator import Coordinator
from transferqueue.server.loop_latency import Meter
from transferqueue.server.sessions.session_table import Peer
from transferqueue.transport import Wakeup
from transferqueue.transport.control.inproc import InprocServer
from transferqueue.transport.control.send_result import SendResult
from transferqueue.transport.control.unix_socket import Descriptor, UnixPeer, UnixServer
from transferqueue.transport.control.zeromq import KeyedPeer, ZmqServer

_log: Final = logging.getLogger("transferqueue.server")
POLL_S_MAX: Final = 1e6
"""The longest sleep that `poll` accepts. A later deadline takes several."""


class ProcessExits:
    """All sessions' pidfds behind one descriptor, so that the cost of a poll does not depend on their number."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sessions: dict[int, int] = {}

    def fileno(self) -> int:
        """Readable when a watched process has ended."""
        return self._epoll.fileno()

    def watch(self, session: int, pidfd: int) -> None:
        """Watch the process of `session`."""
        self._sessions[pidfd] = session
        self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)

    def unwatch(self, pidfd: int) -> None:
        """Stop watching. Closing the pidfd is not enough: a forked child of an embedded server has it open too."""
        if self._sessions.pop(pidfd, None) is not None:
            self._epoll.unregister(pidfd)

    def take(self) -> list[int]:
        """The sessions whose processes have ended."""
        return [self._sessions[fd] for fd, _ in self._epoll.poll(0) if fd in self._sessions]

    def close(self) -> None:
        """Stop watching all."""
        self._epoll.close()


class ListeningClock:
    """The seconds in which a loop could listen: those of `clock`, less its gaps.

    A gap is the time between two readings if it exceeds the announced sleep by more than `GAP_S`: the process was
    suspended, its machine was paused, or one turn took that long. The gap may have begun right after the first reading,
    so this clock stands still during it. Of two gaps in a row the second costs only the time after the announced sleep:
    so the clock advances even on a machine that is always late. `now` is the latest reading of this clock, and
    `read_at` that of `clock`.
    """

    __slots__ = ("_clock", "_planned_s", "_was_gap", "now", "read_at")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.read_at = self.now = clock()
        self._planned_s = 0.0
        self._was_gap = False

    def __call__(self) -> float:
        """The time now."""
        at = self._clock()
        passed, planned_s = at - self.read_at, self._planned_s
        is_gap = passed - planned_s > GAP_S
        if not is_gap:
            self.now += passed
        elif self._was_gap:
            self.now += planned_s
        if planned_s:
            self._was_gap = is_gap and not self._was_gap
        self.read_at, self._planned_s = at, 0.0
        return self.now

    def sleeps(self, patience_s: float | None) -> None:
        """The loop sleeps from the latest reading on, for at most `patience_s` (None: until an event)."""
        self._planned_s = math.inf if patience_s is None else patience_s


class Loop:
    """Runs a coordinator until `stop`, in the thread that calls `run`. The caller closes ports, hub and the rest
    afterwards.

    Args:
        port: the tcp port; None: the server has none.
        clock: seconds.
        batch: commit once for all frames of a turn, then send their answers. For a journal, whose commit costs more
            than this short wait.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        local: UnixServer,
        port: ZmqServer | None,
        hub: InprocServer,
        wakeup: Wakeup,
        exits: ProcessExits,
        clock: Callable[[], float] = time.monotonic,
        *,
        batch: bool = False,
    ) -> None:
        self.turns = 0
        self._coordinator = coordinator
        self._answers = coordinator.answers
        self._local = local
        self._port = port
        self._hub = hub
        self._wakeup = wakeup
        self._exits = exits
        self._clock = ListeningClock(clock)
        self._meter = Meter(time.thread_time)
        self._batch = batch
        coordinator.clients.on_hello = self._admit
        if not batch:
            coordinator.waiters_at_once = WAITERS_AT_ONCE
        self._poller = zmq.Poller()
        """Polls the sockets of the tcp port and the socket file together. Unused without a tcp port."""
        self._stopping = False
        self._more = False
        self._port_has_news = True
        """Whether the tcp port may have connections to accept or to refuse."""
        self._due: float | None = -math.inf
        """When the coordinator's tick has something to do; None: nothing is due. A thread that needs a tick sets the
        wake-up."""
        self._turned_at = self._clock()
        """When the latest turn began."""

    @property
    def now(self) -> float:
        """The coordinator's time, as of the latest reading."""
        return self._clock.now

    def stop(self) -> None:
        """Have `run` return soon. May be called from any thread, from a signal handler, and more than once."""
        self._stopping = True
        self._wakeup.set()

    def run(self, woken_by: Descriptor | None = None) -> None:
        """Serve until `stop`. Then, or if the coordinator fails, tell all clients that the server stops, and why.

        Args:
            woken_by: becomes readable when a signal arrives whose handler calls `stop`. The loop does not read it.
        """
        self._local.watch(self._wakeup)
        self._local.watch(self._exits)
        if woken_by is not None:
            self._local.watch(woken_by)
        for socket in (self._local, *(self._port.sources if self._port is not None else ())):
            self._poller.register(socket, zmq.POLLIN)
        why = "the server was stopped"
        try:
            while not self._stopping:
                self._turn(self._wait())
        except DiskFailed as error:
            self._deliver(self._coordinator.disk_failed(str(error)))
            raise
        except (LedgerTorn, MemoryError) as error:
            why = f"the server has ended: {str(error) or 'its memory is exhausted'}"
            _log.critical("%s", why, exc_info=error)
            raise
        finally:
            self._coordinator.stop(why)
            self._send()

    def _wait(self) -> Collection[int]:
        """Sleep until an event, and read the socket file. Returns the other descriptors that are readable."""
        if self._more:
            patience_s: float | None = 0.0
            self._due = -math.inf
        else:
            patience_s = self._patience_s()
        self._clock.sleeps(patience_s)
        if self._port is not None:
            self._port_has_news = True
            if patience_s != 0:
                readable = dict(self._poller.poll(None if patience_s is None else math.ceil(patience_s * 1000)))
                asks = any(source in readable for source in self._port.sources[1:])
                self._port_has_news = asks or self._port.patience_s() == 0.0
                patience_s = 0.0
        return self._local.poll(patience_s)

    def _patience_s(self) -> float | None:
        deadline = self._due = self._coordinator.next_deadline()
        patience_s = None if deadline is None else deadline - self._clock.now
        if self._local.unauthenticated:
            patience_s = _least(patience_s, self._local.patience_s())
        if self._port is not None:
            patience_s = _least(patience_s, self._port.patience_s())
        return None if patience_s is None else min(max(patience_s, 0.0), POLL_S_MAX)

    def _turn(self, ready: Collection[int]) -> None:
        """Handle the events of one wake-up. Reads only the descriptors in `ready` beside the sockets: a read in vain
        costs more than a frame."""
        self.turns += 1
        now = self._clock()
        due, settled, self._turned_at = self._due, self._turned_at, now
        self._meter.start(self._clock.read_at)
        if self._port is not None and self._port.decide(has_news=self._port_has_news):
            self._coordinator.keys_changed(now)
        woken = bool(ready) and self._wakeup.fileno() in ready
        if woken:
            self._wakeup.clear()
        if self._local.unauthenticated:
            self._local.tick()
        if ready and self._exits.fileno() in ready:
            for session in self._exits.take():
                self._coordinator.process_exited(session, now)
            self._clock()
        if self._answers.outbox:
            self._send()
        until = math.inf if due is None or due <= settled else math.nextafter(due, -math.inf)
        drained = self._drain(self._local.take, until)
        if woken or self._more:  # a frame of this process comes with a wake-up
            drained += self._drain(self._hub.recv_nowait, until)
        if self._port is not None:
            drained += self._drain(self._port.recv_nowait, until)
        if woken or (due is not None and due <= now):
            self._tick()
        if self._answers.outbox:
            self._send()
        self._more = drained >= FRAMES_DRAINED_MAX

    def _tick(self) -> None:
        began = self._clock.read_at
        self._coordinator.tick(self._clock.now)
        self._clock()
        self._meter.took(self._coordinator.turns.ticks, began, self._clock.read_at, "tick")

    def _drain(self, receive: Callable[[], tuple[Peer, bytes | None] | None], until: float) -> int:
        """Handle the frames of one source, up to `FRAMES_DRAINED_MAX`, as of no later time than `until`, unless that is
        `GAP_S` ago."""
        clock = self._clock
        for drained in range(FRAMES_DRAINED_MAX):
            arrived = receive()
            if arrived is None:
                return drained
            peer, frame = arrived
            now, began = clock.now, clock.read_at
            if until < now <= until + GAP_S:
                now = until
            if frame is None:
                self._coordinator.peer_lost(peer, now)
            else:
                self._coordinator.receive(peer, frame, now)
            subject = self._coordinator.handled
            if not self._batch and (self._answers.outbox or self._coordinator.unfinished):
                self._send()  # before the next frame: requests that this frame served have waited long enough
            clock()  # for the next frame: the time that this one took must not shorten its wait
            self._meter.took(self._coordinator.turns.requests, began, clock.read_at, subject)
        return FRAMES_DRAINED_MAX

    def _admit(self, peer: Peer) -> None:
        if isinstance(peer, UnixPeer):
            self._local.admit(peer)
        elif self._port is not None and not isinstance(peer, int):
            self._port.admit(peer)

    def _send(self) -> None:
        while self._answers.outbox or self._coordinator.unfinished:
            if self._coordinator.parts.durable:
                self._clock()
                began = self._clock.read_at
                self._coordinator.commit()
                self._clock()
                self._meter.took(self._coordinator.turns.commits, began, self._clock.read_at, "commit")
            answers, self._answers.outbox = self._answers.outbox, []
            for peer in self._deliver(answers if len(answers) == 1 else _waiters_first(answers)):
                self._coordinator.peer_lost(peer, self._clock())
            if self._coordinator.unfinished:
                self._coordinator.go_on(self._clock())

    def _deliver(self, answers: list[tuple[Peer, bytes]]) -> list[Peer]:
        """Send answers. Returns the peers that do not read theirs."""
        unread: list[Peer] = []
        for peer, frame in answers:
            if isinstance(peer, UnixPeer):
                is_read = self._local.send(peer, frame) is not SendResult.UNREAD
            else:
                is_read = self._send_elsewhere(peer, frame)
            if not is_read:
                unread.append(peer)
        return unread

    def _send_elsewhere(self, peer: int | bytes | KeyedPeer, frame: bytes) -> bool:
        """Send to a peer of the hub or of the tcp port. Returns False if it does not read. A lost peer is no failure:
        it may reconnect and send its call again."""
        if isinstance(peer, int):
            return self._hub.send(peer, frame)
        return self._port is None or self._port.send(peer, frame) is not SendResult.UNREAD


def _waiters_first(answers: list[tuple[Peer, bytes]]) -> list[tuple[Peer, bytes]]:
    """The answers in sending order: the few answers to requests that waited come before the answer to the request that
    served them. Answers to one peer keep their order."""
    first, *others = answers
    return answers if any(peer == first[0] for peer, _ in others) else [*others, first]


def _least(one: float | None, other: float | None) -> float | None:
    """The earlier of two times; None: never."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
