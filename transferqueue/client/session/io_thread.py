"""The thread of a session: sends the calls that callers queued, reads replies, and does all work that is due by time.

It resends calls, renews leases, sends heartbeats, returns pins, undoes replies of abandoned calls, and greets the
server again after a reconnection. While a caller or an event loop drives the channel (see `driver`), it sleeps until
work is due. Finalizers and signal handlers only append and wake: they run in the middle of this code,
where they could deadlock on a lock.
"""

from __future__ import annotations

import copy
import logging
import select
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Final

from transferqueue.client.session.calls import PendingCall, PendingCalls, outcome, wait_of
from transferqueue.client.session.discard_reply import discard_reply, in_doubt
from transferqueue.client.session.lease_renewal import LeaseRenewer, RenewedLease
from transferqueue.client.session.liveness import ServerLiveness
from transferqueue.client.session.outbox import Outbox
from transferqueue.client.session.wait_log import WaitLog
from transferqueue.errors import (
    DeadlineExceeded,
    Disconnected,
    DiskFailed,
    InternalError,
    LeaseExpired,
    NotFound,
    PeerError,
    ProtocolError,
    TransferQueueError,
    Unreachable,
    UsageError,
)
from transferqueue.limits import ANSWER_S, HEARTBEAT_S, SERVER_CHECK_S, UNPIN_S
from transferqueue.storage.memory.private_pages import end_interrupted
from transferqueue.transport import ClientChannel, Wakeup
from transferqueue.transport.control.channel import DrivableChannel
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer, explain_answer
from transferqueue.wire.requests import declaration, is_notice
from transferqueue.wire.versions import mismatch_of

_log: Final = logging.getLogger("transferqueue.client")

HEARTBEAT_PACES: Final = 64
GOODBYE_S: Final = 1.0
"""How long a closing client waits for the server to have heard it."""
_INTERRUPTED: Final = object()
"""Stands for a driver whose lock was released under it."""


class IoThread:
    """The state of one session that several threads touch, and the thread that serves it.

    Any thread, and any finalizer, may append to `inbox` (calls to send), `abandoned` (calls whose callers went away),
    `unpinned` (pins to return) and `renewer`, and then set `wakeup`. `calls`, `outbox`, `server` and the channel belong
    to the holder of `lock`.
    """

    def __init__(self, channel: ClientChannel, address: str, clock: Callable[[], float]) -> None:
        self.channel: Final = channel
        self.address: Final = address
        self.clock: Final = clock
        self.wakeup: Final = Wakeup()
        self.drivable: Final = channel if isinstance(channel, DrivableChannel) else None
        """The channel; None: callers cannot drive this kind of channel."""
        self.lock: Final = threading.RLock()
        """Which knows its owner, also if an interrupt comes right after it was taken."""
        self.driver: object | None = None
        """The call, or the event loop, that drives the channel now. If the lock is free: it was interrupted, and the
        channel is broken."""
        now = clock()
        self.calls: Final = PendingCalls()
        self.outbox: Final = Outbox(channel, self.calls, now)
        self.server: Final = ServerLiveness(channel, address, self.calls, self.outbox, now)
        self.waits: Final = WaitLog(channel, address, self.calls, self.outbox.call)
        self.renewer: Final = LeaseRenewer()
        self.inbox: Final[deque[PendingCall]] = deque()
        self.abandoned: Final[deque[PendingCall]] = deque()
        self.unpinned: Final[deque[list[int]]] = deque()
        self.unpins_at: float | None = None
        """When this thread sends the pins that no call has taken along; None: the returner of a pin has to wake it."""
        self.unpins_wait = False
        """Whether a pin was returned that does not wait for the next call or heartbeat, and this thread was woken for
        it."""
        self.unpinned_at = now
        """When pins were sent last."""
        self.returning: tuple[list[list[int]], int] | None = None
        """The lists of pins that a driver makes notices of, and the id of the last call before these."""
        self.hello: m.Hello | None = None
        self.on_welcome: Callable[[m.Welcome], object] = _nothing
        self.loop_frames: select.epoll | None = None
        """What an event loop that reads watches (see `driver`); None: none does."""
        self.on_over: Callable[[], object] = _done
        """Called when the thread ends."""
        self.heartbeat_s = HEARTBEAT_S
        self.connections_made = 0
        """How many connections to the server the channel has made."""
        self.check_at = now
        """When this thread next looks for work that is due by time."""
        self.over: TransferQueueError | None = None
        """Why no call can be made any more; None while the session lasts."""
        self.why_no_waits: TransferQueueError | None = None
        """The error of calls that would wait at the server; None: they may."""
        self.waits_end_now = False
        self.closing = False
        self._goodbye: PendingCall | None = None
        self._goodbye_by = 0.0
        self.thread: Final = threading.Thread(target=self._run, name=f"transferqueue {address}", daemon=True)

    def _run(self) -> None:
        try:
            while self.over is None:
                self._take_channel()
                try:
                    self._turn()
                    if self.over is None and self.loop_frames is not None and self.drivable is not None:
                        self.drivable.have_loop_read(None if self._reads() else self.loop_frames)
                finally:
                    self.lock.release()
                if self.over is None:
                    self.channel.sleep(self.wakeup, max(0.0, self.check_at - self.clock()))
        except BaseException as error:
            self._end(InternalError(f"the connection to {self.address} failed: {error!r}"))
            raise
        finally:
            self._take_channel()
            self.channel.close()
            self.wakeup.close()
            self.lock.release()
            self.on_over()

    def _take_channel(self) -> None:
        """Take the lock, which a driver gives up when it is woken. If a driver was interrupted, connect again."""
        if not self.lock.acquire(blocking=False):
            self.wakeup.set()
            self.lock.acquire()
        if self.driver is not None and self.drivable is not None:
            self.driver = None
            self.drivable.end_driving()
            self.drivable.reset()

    def begin_driving(self, driver: object) -> bool:
        """Take the lock for a driver if it is free, and the channel not broken. The driver releases it, whatever this
        returns or raises."""
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            self.stop_own_driver()
        if not self.lock.acquire(blocking=False) or self.driver is not None:
            return False
        self.driver = driver
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # not so if a signal handler has released it

    def stop_own_driver(self) -> None:
        """Release the lock if this thread has it: its driver was interrupted by the signal handler that calls this, and
        goes on after it. The channel counts as broken."""
        while self.lock._is_owned():  # type: ignore[attr-defined]
            self.driver = _INTERRUPTED
            self.lock.release()
            self.wakeup.set()

    def _turn(self) -> None:
        try:
            if self.returning is not None:
                self._settle_pins(*self.returning)
            self.channel.look()
            if self.channel.is_lost and self.calls.session:  # look for the server sooner than at the next heartbeat
                self.check_at = min(self.check_at, self.outbox.spoke_at + SERVER_CHECK_S)
            if self.channel.connections_made != self.connections_made:
                self._found_way(self.clock())
            while self.over is None and (frame := self.channel.recv_nowait()) is not None:
                self.server.heard_at = self.clock()
                self._receive(self._decoded(frame))
            now = self.clock()
            if self.has_work() or now >= self.check_at:
                self._send_what_is_due(now)
                self.check_at = self._next_check(now)
            if self.renewer.has_new:  # perhaps added by a thread that saw the time of the next check before it was set
                self.check_at = min(self.check_at, self.renewer.next_due() or self.check_at)
        except PeerError as error:
            self._end(error)

    def _decoded(self, frame: bytes) -> m.AnswerFrame:
        try:
            return decode_answer(frame)
        except ProtocolError as error:
            package = self.hello.version if self.hello is not None else ""
            if (mismatch := mismatch_of(frame, address=self.address, package=package)) is not None:
                raise mismatch from None
            if (answer := explain_answer(frame, error, server_package=self.server.package)) is None:
                raise
            return answer

    def has_work(self) -> bool:
        """Whether something waits to be done. Kept cheap: this thread runs it after each reply, while the caller that
        the reply woke waits for the interpreter."""
        return bool(
            self.inbox
            or self.abandoned
            or self.outbox.backlog
            or self.closing
            or self.waits_end_now
            or self.unpins_wait
        )

    def has_other_work(self) -> bool:
        """Whether anything but calls that wait for their replies needs this thread before the next call is sent."""
        return not self.stands() or self.why_no_waits is not None or self.has_work()

    def stands(self) -> bool:
        """Whether the server has been greeted over the present connection, and nothing has happened to either."""
        calls = self.calls
        return not (
            self.over is not None
            or calls.greeting is not None
            or not calls.session
            or self.channel.connections_made != self.connections_made
        )

    def _reads(self) -> bool:
        """Whether arriving frames wake this thread, and not the event loop that reads."""
        channel = self.drivable
        if not self.stands() or channel is None or channel.is_behind or self.outbox.backlog:
            return True
        return not all(pending.by_loop for pending in self.calls.by_id.values())

    def _send_what_is_due(self, now: float) -> None:
        self.outbox.cork()
        try:
            self._say_what_is_due(now)
        finally:
            self.outbox.uncork()

    def _say_what_is_due(self, now: float) -> None:
        if self.closing:
            self._say_goodbye(now)
        if self.waits_end_now:
            self.waits_end_now = False
            for pending in self.calls.unanswered():
                self._end_wait(pending, now)
        if self.inbox or self.unpins_at is None or now >= self.unpins_at:
            self._send_unpins(now)
        while self.inbox:
            pending = self.inbox.popleft()
            self.outbox.call(pending, now)
            if self.why_no_waits is not None:
                self._end_wait(pending, now)
        while self.abandoned:
            self._leave(self.abandoned.popleft(), now)
        again, overdue = self.calls.overdue(now)
        for frame in again:
            self.outbox.say(frame, now)
        for pending in overdue:
            pending.settle(self._unanswered(pending))
        self.waits.look(now)
        for kept, lease_s in self.renewer.renewals(now):
            self._renew(kept, lease_s, now)
        if self.calls.session and now >= self.outbox.spoke_at + self._silence_s():
            self.outbox.spoke_at = now
            if not self.outbox.backlog:
                self.outbox.notice(m.Heartbeat(), now)
            if (gone := self.server.check(now)) is not None:
                self._end(gone)

    def _next_check(self, now: float) -> float:
        """When the next heartbeat, resend or renewal is due. Before it is greeted this client sends no heartbeat."""
        due = (self.outbox.spoke_at if self.calls.session else now) + self._silence_s()
        for other in (self.calls.next_overdue(), self.renewer.next_due(), self.unpins_at):
            if other is not None:
                due = min(due, other)
        return min(due, self._goodbye_by) if self._goodbye is not None else due

    def _silence_s(self) -> float:
        """For how long this session may send nothing before it says that it lives, and looks whether the server
        does."""
        return SERVER_CHECK_S if self.channel.is_lost or self.outbox.backlog else self.heartbeat_s

    def _renew(self, kept: RenewedLease, lease_s: float, now: float) -> None:
        """Ask for one more term of a lease. The request is resent like any call, so a server that restarts in time
        answers it."""

        def settled() -> None:
            if isinstance(pending.error, UsageError | LeaseExpired):
                kept.lost = True
            else:
                granted = pending.reply.lease_s if isinstance(pending.reply, m.Renewed) else lease_s
                self.renewer.renewed(kept, granted, self.clock())

        pending = PendingCall(m.Renew(table=kept.table, lease=kept.lease, token=kept.token, lease_s=lease_s), settled)
        self.outbox.call(pending, now)

    def _found_way(self, now: float) -> None:
        """The channel has connected to the server, or to the next one: greet it."""
        self.connections_made = self.channel.connections_made
        if self.connections_made == 1 or self.hello is None:
            return  # the first Hello was sent already
        self.outbox.backlog.clear()
        self.outbox.say(self.calls.greet(self.hello, now), now)

    def _send_unpins(self, now: float) -> None:
        """Send the pins that were returned. While there are some, look again after `UNPIN_S`: so those that follow need
        not wake this thread, and an idle client does not wake."""
        end_interrupted()
        self.unpins_wait = False
        if self.unpins_at is not None and now >= self.unpins_at:
            self.unpins_at = (
                None  # first: an `unpin` that has read the time before is in the queue by now, or wakes this thread
            )
        if not self.unpinned:
            return
        if self.unpins_at is None:
            self.unpins_at = now + UNPIN_S
        for frame in self.notices_of_pins(now):
            self.outbox.send(frame, now)

    def notices_of_pins(self, now: float) -> list[bytes]:
        """Frames that return the pins that wait. A driver calls this too, and may be interrupted between any two steps:
        see `_settle_pins`."""
        waiting = list(self.unpinned)
        self.returning = waiting, self.calls.last
        once = {id(some): some for some in waiting}.values()  # an interrupted finalizer gives its list again
        frames = [self.calls.notice(notice) for notice in m.unpin(chain.from_iterable(once))]
        deque(map(list.clear, waiting), 0)  # one step
        self.returning, self.unpinned_at = None, now
        for _ in waiting:
            self.unpinned.popleft()
        return frames

    def _settle_pins(self, waiting: list[list[int]], last: int) -> None:
        """A driver was interrupted while it made notices of these pins, none of which it has sent. Either the pins or
        the notices stay."""
        if any(waiting):
            self.calls.withdraw_notices(last)
        self.returning = None

    def _receive(self, answer: m.AnswerFrame) -> None:
        if self.calls.is_late(answer):
            return
        pending = self.calls.answered(answer)
        reply = outcome(answer.reply)
        if isinstance(reply, Disconnected):
            reply = Disconnected(f"{self.address} ended this session: {reply}")
            if pending is not None:
                pending.settle(reply)
            self._end(reply)
        elif isinstance(reply, DiskFailed) and pending is None:
            self.server.waits_for_disk = str(reply)
            _log.warning("the server at %s waits for its disk, and calls wait for it: %s", self.address, reply)
        elif isinstance(reply, TransferQueueError):
            self._refused(pending, reply)
        elif pending is not None:
            self._answered(pending, reply)

    def _answered(self, pending: PendingCall, reply: m.Reply) -> None:
        if isinstance(reply, m.Welcome):
            self._welcomed(reply)
        if pending is self._goodbye:
            self._end(Disconnected(f"the queue at {self.address} was closed; connect again: tq.connect(address)"))
        elif pending.is_settled:  # by a driver, or an event loop, that was interrupted then
            if pending.by_loop and pending.on_settled is not None:
                pending.settle(reply)
        elif pending.on_settled is None:
            self._give_back(pending.request, reply)
        else:
            if self.unpins_at is None and declaration(pending.request).undo is not None:
                self.unpins_at = self.clock() + UNPIN_S  # pins may return soon, and then need not wake this thread
                self.check_at = min(self.check_at, self.unpins_at)
            pending.settle(reply)

    def _welcomed(self, welcome: m.Welcome) -> None:
        if self.calls.session and self.calls.session != welcome.session:
            self._end(
                Disconnected(
                    f"the server at {self.address} was started anew and knows nothing of this session; connect again"
                )
            )
        self.calls.session = welcome.session
        self.heartbeat_s = heartbeat_s(welcome.session)
        self.server.durable, self.server.waits_for_disk = welcome.durable, ""
        self.server.package = welcome.server
        self.on_welcome(welcome)
        now = self.clock()
        for frame in self.calls.welcomed(now):
            self.outbox.send(frame, now)

    def _refused(self, pending: PendingCall | None, error: TransferQueueError) -> None:
        if pending is None:
            return
        if pending.on_settled is not None:
            cut_short = (
                self.why_no_waits is not None and isinstance(error, DeadlineExceeded) and wait_of(pending.request)
            )
            pending.settle(copy.copy(self.why_no_waits) if self.why_no_waits is not None and cut_short else error)
        elif isinstance(pending.request, m.Hello):
            self._end(Disconnected(f"{self.address} was found again and refused this session: {error}; connect again"))
        elif pending.is_post and not isinstance(error, LeaseExpired | NotFound):  # it may be gone
            _log.error("%s, for which no caller waits, was refused: %s", m.tag_of(pending.request), error)

    def _leave(self, pending: PendingCall, now: float) -> None:
        """The caller of `pending` went away, perhaps after the reply came: undo the reply, or end the wait at the
        server."""
        pending.on_settled = None
        pending.gave_up, pending.by_loop = True, False
        if pending.reply is not None:
            self._give_back(pending.request, pending.reply)
        else:
            self._end_wait(pending, now)

    def _end_wait(self, pending: PendingCall, now: float) -> None:
        """End the wait of a call at the server: it answers at once, or refuses."""
        if (frame := self.calls.end_wait_frame(pending, now)) is not None:
            self.outbox.send(frame, now)

    def _give_back(self, request: m.Request, reply: m.Reply) -> None:
        now = self.clock()
        for undo in discard_reply(request, reply):
            if is_notice(undo):
                self.outbox.notice(undo, now)
            else:
                self.outbox.call(PendingCall(undo), now)

    def _unanswered(self, pending: PendingCall) -> Unreachable:
        name = m.tag_of(pending.request)
        return Unreachable(
            f"{self.address} did not answer {name} within {ANSWER_S:g} s past the wait it asked for, after "
            f"{pending.tries} more tries; {self.server.why_silent}{in_doubt(pending.request)}"
        )

    def _say_goodbye(self, now: float) -> None:
        """End all calls at once, and say goodbye to the server after everything that was posted before."""
        if self._goodbye is None:
            closed = Disconnected(f"the queue at {self.address} was closed; connect again: tq.connect(address)")
            for pending in self.calls.drain():
                pending.settle(copy.copy(closed))
            self._goodbye, self._goodbye_by = PendingCall(m.Goodbye()), now + GOODBYE_S
            if not self.calls.session:
                self._end(closed)
                return
            posted = [pending for pending in self.inbox if pending.on_settled is None]
            for pending in posted:
                self.outbox.call(pending, now)
            self.fail_inbox(closed)
            self.outbox.call(self._goodbye, now)
        elif now >= self._goodbye_by:
            self._end(Disconnected(f"the queue at {self.address} was closed; connect again: tq.connect(address)"))

    def _end(self, error: TransferQueueError) -> None:
        self.over = error
        for pending in self.calls.drain():
            pending.settle(copy.copy(error))
        self.fail_inbox(error)

    def fail_inbox(self, error: TransferQueueError) -> None:
        """End the calls that were never sent."""
        while self.inbox:
            try:
                pending = self.inbox.popleft()
            except IndexError:  # another thread was quicker
                return
            pending.settle(copy.copy(error))


def heartbeat_s(session: int) -> float:
    """How long this session may send nothing: from three quarters of `HEARTBEAT_S` to all of it, each session at its
    own pace. Otherwise the sessions that a restarted server greets together would say together, each time, that they
    live."""
    return HEARTBEAT_S * (1 - session % HEARTBEAT_PACES / (4 * HEARTBEAT_PACES))


def _nothing(_: m.Welcome) -> None:
    pass


def _done() -> None:
    pass
