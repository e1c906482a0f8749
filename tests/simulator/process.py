"""A simulated client process: the production `PendingCalls` and codec, driven by one role, which is a generator of
requests.

A role yields requests and receives their replies, or the error that refused them; it yields a number to wait
that many seconds. This module does in simulated time what `client/session/connection.py` does in its thread: greet,
resend, undo replies for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

from tests.simulator.machine import SimServer
from tests.simulator.world import SimConnection, World
from transferqueue.client.session.calls import PendingCall, PendingCalls, outcome
from transferqueue.client.session.discard_reply import discard_reply
from transferqueue.errors import Disconnected, TransferQueueError, Unreachable
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer
from transferqueue.wire.requests import is_notice

Role = Generator[m.Request | float, Any, Any]


class Process:
    """One client, which is started again after each death. sights: ranges of the server's own arena that it may view
    now.

    offer: the memory with which process `number` joins as a shard, if any.
    """

    def __init__(
        self,
        world: World,
        server: SimServer,
        name: str,
        role: Callable[[Process], Role],
        offer: Callable[[int], m.ShardOffer | None] = lambda _: None,
    ) -> None:
        self.name: Final = name
        self.world: Final = world
        self.server: Final = server
        self.number = 0
        self.done = False
        self.sights: dict[int, tuple[int, int]] = {}
        self._role: Final = role
        self._offer: Final = offer
        self._running: Role | None = None
        self._connections = 0
        self._jumped = 0.0
        self._paused = False
        self._missed: list[Callable[[], None]] = []

    # ------------------------------------------------------------ life and death

    def start(self, number: int) -> None:
        """Start again, as process `number`."""
        self.number = number
        self.sights, self._missed, self._paused = {}, [], False
        self._calls, self._late_at = PendingCalls(), -1.0
        self._hello = m.Hello(
            client=number.to_bytes(16, "little"),
            pid=number,
            host="simulated",
            label=self.name,
            shard=self._offer(number),
        )
        self._running = self._role(self)
        self._connect()
        self._ask(self._hello, self._welcomed)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._running is not None

    def kill(self) -> None:
        """End at once, as by SIGKILL."""
        number, self._running, self.sights, self.connection.broken = self.number, None, {}, True
        self.world.after(self.world.random.uniform(0.0, 0.3), lambda: self.server.process_ended(number))

    def pause(self, seconds: float) -> None:
        """Stop for some seconds, as by SIGSTOP."""
        self._paused, number = True, self.number
        self.world.after(seconds, lambda: self._wake(number))

    def jump(self, seconds: float) -> None:
        """Move the clock of this process forward."""
        self._jumped += seconds
        self._plan()

    def _wake(self, number: int) -> None:
        if number == self.number:
            self._paused, missed, self._missed = False, self._missed, []
            for act in missed:
                self._do(act, number)

    def when_running(self, act: Callable[[], None], number: int) -> None:
        """Call `act` now, or when this process goes on after a pause; never if it is not process `number` any more."""
        self._do(act, number)

    def _do(self, act: Callable[[], None], number: int) -> None:
        if number != self.number or not self.alive:
            return
        if self._paused:
            self._missed.append(act)
        else:
            act()

    # ------------------------------------------------------------ the connection

    def _connect(self) -> None:
        self._connections += 1
        self.connection = SimConnection(self.world, b"%d.%d" % (self.number, self._connections))

    def reconnect(self) -> None:
        """Replace the broken connection by a new one, and greet the server on it."""
        self.connection.broken = True
        self._do(self._greet, self.number)

    def _greet(self) -> None:
        self.connection.broken = True
        self._connect()
        self._say(self._calls.greet(self._hello, self._clock()))
        self._plan()

    def _clock(self) -> float:
        return self.world.now + self._jumped

    def _send(self, frame: bytes, *, notice: bool = False) -> None:
        if self._calls.greeting is None:
            self._say(frame, notice=notice)

    def _say(self, frame: bytes, *, notice: bool = False) -> None:
        peer = self.connection.peer
        self.connection.carry(frame, lambda data: self.server.receive(peer, data), up=True, notice=notice)

    def hear(self, frame: bytes) -> None:
        """Carry an answer from the server to this process."""
        number = self.number
        self.connection.carry(frame, lambda data: self._do(lambda: self._receive(data), number), up=False)

    def _receive(self, frame: bytes) -> None:
        answer = decode_answer(frame)
        if self._calls.is_late(answer):
            return
        pending, reply = self._calls.answered(answer), outcome(answer.reply)
        if isinstance(reply, m.Welcome):
            self._calls.session = reply.session
            for unheard in self._calls.welcomed(self._clock()):
                self._send(unheard)
        if isinstance(reply, Disconnected):
            self.kill()
        elif pending is not None and pending.on_settled is not None:
            pending.settle(reply)
        elif pending is not None and not isinstance(reply, TransferQueueError):
            for undo in discard_reply(pending.request, reply):
                self.send_unawaited(undo)

    # ------------------------------------------------------------ the role

    def send_unawaited(self, request: m.Request) -> None:
        """Send a request for whose reply nobody waits."""
        if is_notice(request):
            self._send(self._calls.notice(request), notice=True)
        else:
            self._send(self._calls.send(PendingCall(request), self._clock()))
            self._plan()

    def _ask(self, request: m.Request, then: Callable[[m.Reply | TransferQueueError], None]) -> None:
        pending = PendingCall(request, lambda: then(pending.error or pending.reply or m.DoneReply()))
        self._send(self._calls.send(pending, self._clock()))
        self._plan()

    def _welcomed(self, reply: m.Reply | TransferQueueError) -> None:
        if isinstance(reply, TransferQueueError):
            self.kill()  # as a program does whose `connect` raises
        else:
            self._resume(None)

    def _resume(self, reply: Any) -> None:
        if self._running is None:
            return
        number = self.number
        try:
            failed = isinstance(reply, TransferQueueError)
            wanted = self._running.throw(reply) if failed else self._running.send(reply)
        except StopIteration:
            self.done = True
            self.kill()
            return
        except TransferQueueError:  # the role did not catch it: the process ends, as a worker does
            self.kill()
            return
        if isinstance(wanted, float | int):
            self.world.after(wanted, lambda: self._do(lambda: self._resume(None), number))
        else:
            self._ask(wanted, self._resume)

    def _plan(self) -> None:
        late = self._calls.next_overdue()
        if late is not None:
            when, number = max(late - self._jumped, self.world.now), self.number
            if self._late_at <= self.world.now or when < self._late_at:
                self._late_at = when
                self.world.at(when, lambda: self._do(lambda: self._late(when), number))

    def _late(self, when: float) -> None:
        if when != self._late_at:
            return
        self._late_at = -1.0
        again, overdue = self._calls.overdue(self._clock())
        for frame in again:
            self._say(frame)
        for pending in overdue:
            pending.settle(Unreachable(f"{m.tag_of(pending.request)} was not answered; the server may be gone"))
        self._plan()
