"""The one thread of a server: sleeps until something happens, lets the node act, sends what it answers.

It wakes for a frame, for a dead client (pidfd), for `stop`, and at the node's next deadline; never to look
whether something might have happened. `turns` counts how often it woke: it stands still while nothing does. How long each frame,
each tick and each commit kept everybody else waiting is kept in `Coordinator.turns`.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Container
from typing import Final, Protocol

import zmq

from transferqueue.limits import FRAMES_DRAINED_MAX
from transferqueue.server.node import Coordinator
from transferqueue.server.sessions.sessions import Peer
from transferqueue.server.turn_times import Meter
from transferqueue.transport import Wakeup
from transferqueue.transport.control.inproc import InprocServer
from transferqueue.transport.control.send_result import SendResult
from transferqueue.transport.control.unix_socket import UnixPeer, UnixServer
from transferqueue.transport.control.zeromq import ZmqServer

POLL_MS_MAX: Final = 1 << 30
"""The longest sleep that poll can be asked for; a later deadline is slept for twice."""


class Descriptor(Protocol):
    """Anything that poll can wait for."""

    def fileno(self) -> int:
        """Its number."""


class ProcessExits:
    """Pidfds of many sessions behind one descriptor, so that a poll costs the same for any number of them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sessions: dict[int, int] = {}

    def fileno(self) -> int:
        """Readable when a watched process is gone."""
        return self._epoll.fileno()

    def watch(self, session: int, pidfd: int) -> None:
        """Watch the process of `session`."""
        self._sessions[pidfd] = session
        self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)

    def unwatch(self, pidfd: int) -> None:
        """Watch it no more. Closing alone would not do: a forked child of an embedded server has it open too."""
        if self._sessions.pop(pidfd, None) is not None:
            self._epoll.unregister(pidfd)

    def take(self) -> list[int]:
        """Sessions whose processes are gone."""
        return [self._sessions[fd] for fd, _ in self._epoll.poll(0) if fd in self._sessions]

    def close(self) -> None:
        """Watch nobody any more."""
        self._epoll.close()


class Loop:
    """Runs a node until `stop`. Whoever calls `run` lends it the thread, and closes ports, hub and the rest afterwards.

    port: of the network; None: nobody comes from there. processor: seconds for which the thread that runs was busy. together: one commit, and then the answers, for all frames of a turn: where a commit costs more than a short wait.
    """

    def __init__(
        self,
        node: Coordinator,
        local: UnixServer,
        port: ZmqServer | None,
        hub: InprocServer,
        wakeup: Wakeup,
        deaths: ProcessExits,
        clock: Callable[[], float] = time.monotonic,
        *,
        together: bool = False,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self.turns = 0
        self._node = node
        self._local = local
        self._port = port
        self._hub = hub
        self._wakeup = wakeup
        self._deaths = deaths
        self._clock = clock
        self._meter = Meter(clock, processor)
        self._together = together
        node.on_hello = self._admit
        self._stopping = False
        self._more = False

    def stop(self) -> None:
        """Have `run` return soon. From any thread, from a signal, and more than once."""
        self._stopping = True
        self._wakeup.set()

    def run(self, woken_by: Descriptor | None = None) -> None:
        """Serve until stopped; then, or if the node fails, tell all clients that nobody answers any more.

        woken_by: becomes readable when a signal came whose handler calls `stop`; nobody reads it.
        """
        poller = zmq.Poller()
        network = self._port.sources if self._port else []
        for source in (*network, self._local, self._wakeup, self._deaths, *([woken_by] if woken_by else [])):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._stopping:
                self._turn({source for source, _ in poller.poll(self._patience_ms())})
        finally:
            self._node.stop()
            self._send()

    def _patience_ms(self) -> int | None:
        if self._more:
            return 0
        deadline = self._node.next_deadline()
        waits = [self._local.patience_s()]
        if deadline is not None:
            waits.append(deadline - self._clock())
        if self._port is not None:
            waits.append(self._port.patience_s())
        patience_s = min((one for one in waits if one is not None), default=None)
        if patience_s is None:
            return None
        return min(max(math.ceil(patience_s * 1000), 0), POLL_MS_MAX)

    def _turn(self, ready: Container[object]) -> None:
        """ready: what poll found, a socket or the number of a descriptor. Looking in vain costs more than a frame."""
        self.turns += 1
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        now = self._clock()
        self._meter.start(now)
        if self._port is not None and self._port.decide():
            self._node.keys_changed(now)
        self._node.tick(now)
        self._local.tick()
        for session in self._deaths.take() if self._deaths.fileno() in ready else ():
            self._node.process_exited(session, now)
        self._meter.took(self._node.turns.ticks, now, "tick")
        self._send()
        drained = self._drain(self._local.recv_nowait) + self._drain(self._hub.recv_nowait)
        if self._port is not None:
            drained += self._drain(self._port.recv_nowait)
        self._send()
        self._more = drained >= FRAMES_DRAINED_MAX

    def _drain(self, receive: Callable[[], tuple[Peer, bytes | None] | None]) -> int:
        for drained in range(FRAMES_DRAINED_MAX):
            arrived = receive()
            if arrived is None:
                return drained
            peer, frame = arrived
            now = self._clock()  # each frame has its own: a wait must not be cut short by those before it
            if frame is None:
                self._node.peer_lost(peer, now)
            else:
                self._node.receive(peer, frame, now)
            self._meter.took(self._node.turns.requests, now, self._node.handled)
            if not self._together:
                self._send()  # at once: what this frame set free should not wait for the next ones
        return FRAMES_DRAINED_MAX

    def _admit(self, peer: Peer) -> None:
        if isinstance(peer, UnixPeer):
            self._local.admit(peer)
        elif self._port is not None and not isinstance(peer, int):
            self._port.admit(peer)

    def _send(self) -> None:
        while self._node.outbox:
            began = self._clock() if self._together else 0.0
            self._node.commit()
            if self._together:  # else there is nothing to commit
                self._meter.took(self._node.turns.commits, began, "commit")
            answers, self._node.outbox = self._node.outbox, []
            for peer, frame in answers:
                if not self._sent(peer, frame):
                    self._node.peer_lost(peer, self._clock())

    def _sent(self, peer: Peer, frame: bytes) -> bool:
        """False: the peer does not read. One that is gone may come back and ask again."""
        if isinstance(peer, int):
            return self._hub.send(peer, frame)
        if isinstance(peer, UnixPeer):
            return self._local.send(peer, frame) is not SendResult.UNREAD
        return self._port is None or self._port.send(peer, frame) is not SendResult.UNREAD
