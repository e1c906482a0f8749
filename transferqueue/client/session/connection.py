"""One session with a server: calls from any thread, a thread that does what has to be done by itself, and who may use the channel.

Only whoever has the *role* touches the channel and the calls. There are two ways to make a call:

1. A caller that finds the role free and nothing else to do *drives*: it sends its request and waits on the socket itself, so no other thread
   is woken. As soon as anything else happens it gives the role up, and waits as in 2.
2. Otherwise it appends the request to a queue and wakes the I/O thread, which has the role whenever it is awake. The caller waits on a bare
   lock that the I/O thread releases. So do calls of event loops, calls beside others on their way, and what nobody waits for.

Finalizers and signal handlers only append and wake: they run in the middle of this code, where a lock would one day be taken twice.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Final, NoReturn

from transferqueue.client.session.calls import PendingCall, PendingCalls, outcome, wait_of
from transferqueue.client.session.deadline import Deadline
from transferqueue.client.session.lease_renewal import Keeper, RenewedLease
from transferqueue.client.session.undo import give_back, in_doubt, unanswered
from transferqueue.errors import (
    DeadlineExceeded,
    Disconnected,
    Forked,
    InternalError,
    LeaseExpired,
    NotFound,
    PeerError,
    ProtocolError,
    TransferQueueError,
    Unreachable,
    UsageError,
)
from transferqueue.limits import ANSWER_S, HEARTBEAT_S, SERVER_GONE_S, SESSION_SILENCE_S, UNPIN_S
from transferqueue.storage.memory.private_pages import end_interrupted
from transferqueue.transport import ClientChannel, Wakeup, is_served
from transferqueue.transport.control.channel import DrivableChannel
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer
from transferqueue.wire.requests import is_notice
from transferqueue.wire.versions import mismatch_of

_log: Final = logging.getLogger("transferqueue.client")

ORPHAN_S: Final = 1.0
"""How often the I/O thread, while it waits for a driver to give up the role, looks whether the driver is gone."""
GOODBYE_S: Final = 1.0
"""How long a closing client waits for the server to have heard it."""


class Connection:
    """Calls to the server at `address` over `channel`, from any thread and any event loop."""

    def __init__(self, channel: ClientChannel, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.address: Final = address
        self._channel: Final = channel
        self._bell: Final = Wakeup()
        self._clock: Final = clock
        self.clock: Final = clock
        self._pid: Final = os.getpid()
        self._calls = PendingCalls()
        self._hello: m.Hello | None = None
        self.on_welcome: Callable[[m.Welcome], object] = lambda _: None
        """Called with each `Welcome`, also with that of a later server. Runs in the I/O thread."""
        self._ways = 0
        """How many connections to the server the channel has made."""
        self._durable = False
        self._inbox: deque[PendingCall] = deque()
        self._left: deque[PendingCall] = deque()
        self._unpinned: deque[list[int]] = deque()
        self._unpins_at: float | None = None
        """When the I/O thread sends the pins that no call has taken along; None: `unpin` has to wake it."""
        self._keeper = Keeper()
        self._over: TransferQueueError | None = None
        self._why_no_waits: TransferQueueError | None = None
        self._waits_end_now = False
        self._closing = False
        self._goodbye: PendingCall | None = None
        self._goodbye_by = 0.0
        self._backlog: deque[bytes] = deque()
        self._corked = False
        """Whether more frames follow at once, so that the backlog waits for them."""
        self._spoke_at = self._heard_at = clock()
        self._check_at = self._spoke_at
        self._gone_since: float | None = None
        self._probed = False
        self._drivable = channel if isinstance(channel, DrivableChannel) else None
        self._role = threading.Lock()
        """Whoever holds it may use the channel and the calls: the I/O thread, or a caller that drives."""
        self._driver: PendingCall | None = None
        self._driver_thread = 0
        self._driver_waits = False
        self._release_role: Callable[[], object] = _nothing
        self._suspect = False
        """Whether a driver was interrupted anywhere but in its wait: what the channel has read or written is not known then."""
        self._thread = threading.Thread(target=self._run, name=f"transferqueue {address}", daemon=True)

    # ------------------------------------------------------------ any thread

    def open(self, hello: m.Hello, timeout_s: float) -> m.Welcome:
        """Start, and introduce this process. `Unreachable` if nothing answers within `timeout_s`."""
        self._hello = hello
        self._thread.start()
        heard = threading.Event()
        pending = PendingCall(hello, heard.set)
        try:
            self._submit(pending)
            if not heard.wait(timeout_s):
                raise Unreachable(f"nothing answered at {self.address} within {timeout_s:g} s; {self._channel.doubt}")
            reply = _result(pending)
        except BaseException:
            self.close()
            raise
        if not isinstance(reply, m.Welcome):
            raise InternalError(f"{self.address} answered Hello with {m.tag_of(reply)}")
        return reply

    def greet_again(self, hello: m.Hello, deadline: Deadline) -> m.Welcome:
        """Say another Hello for the same session, now and after each reconnection."""
        self._hello = hello
        reply = self.call(hello, deadline)
        if not isinstance(reply, m.Welcome):
            raise InternalError(f"{self.address} answered Hello with {m.tag_of(reply)}")
        return reply

    def call(self, request: m.Request, deadline: Deadline | None = None) -> m.Reply:
        """Send a request and wait for its reply; raises what the server refused it with.

        An interrupt ends the wait at once and leaves the connection usable: when the reply comes, it is undone. So does the deadline,
        whatever the server does (see `unanswered`). Without a deadline the call is `Unreachable` if there is no reply long after
        the request's own wait has passed.
        """
        gate = threading.Lock()
        gate.acquire()
        pending = PendingCall(request, gate.release)
        taken: deque[bool] = deque()
        release = _once(self._role.release)
        try:  # from here on: an interrupt that comes after the request was queued must not lose its reply
            since = self._clock()
            until = None if deadline is None else since + deadline.patience()
            if self._drivable is not None:
                self._check_process()
                self._drive_if_free(self._drivable, pending, until, taken, release)
            if not pending.is_settled:
                if not pending.id:
                    self._submit(pending)
                gate.acquire(timeout=-1 if until is None else max(0.0, until - self._clock()))
            if deadline is None:
                return _result(pending)
            deadline.waited(since)
            return _result(pending) if pending.is_settled else self._give_up(pending, deadline)
        except TransferQueueError:
            raise
        except BaseException:
            if taken and taken[0]:
                release()
            self._abandon(pending)
            raise

    def _drive_if_free(
        self,
        channel: DrivableChannel,
        pending: PendingCall,
        until: float | None,
        taken: deque[bool],
        release: Callable[[], object],
    ) -> None:
        """Drive, unless another thread has the role. taken: gets whether this thread has it, in one step, which no interrupt divides. release:
        gives it back, once."""
        if self._driver_thread == threading.get_ident():
            self._revoke()  # this is a signal handler, and the driver is the code that it interrupted
        taken.extend(map(self._role.acquire, (False,)))
        if taken[0]:
            try:
                self._drive(channel, pending, until, release)
            finally:
                self._end_driving(channel, pending, release)

    def _drive(
        self, channel: DrivableChannel, pending: PendingCall, until: float | None, release: Callable[[], object]
    ) -> None:
        """Send a call and wait for its reply in this thread, which holds the role: no other thread has to be woken for it.

        Only where nothing else is to be done: no other call is on its way, and the connection stands. As soon as anything happens but
        the reply of this call (the wake-up, a refusal, the end of the connection), the I/O thread does the rest. An interrupt
        in the wait leaves everything as it was. Anywhere else it leaves the channel suspect: the I/O thread then connects again, and sends
        what was not answered. So each step here may be done twice: a call is settled before it is taken out of the calls.
        """
        self._driver, self._driver_thread, self._release_role = pending, threading.get_ident(), release
        if self._has_other_work() or not channel.begin_driving():
            return
        now = self._clock()
        self._suspect = True
        try:
            self._channel.send(self._calls.send(pending, now))
        except PeerError:
            return
        self._spoke_at = now
        left_s = None
        while not pending.is_settled:
            if until is not None and (left_s := until - self._clock()) <= 0:
                break
            self._driver_waits, self._suspect = True, False
            has_frame = channel.wait_for_frame(left_s)
            if self._driver is not pending:
                return
            self._driver_waits, self._suspect = False, True
            if not has_frame or not self._settle_own(channel, pending):
                break
        self._suspect = False

    def _has_other_work(self) -> bool:
        calls = self._calls
        return bool(
            self._over is not None
            or self._suspect
            or len(calls)
            or calls.greeting is not None
            or not calls.session
            or self._why_no_waits is not None
            or self._channel.ways != self._ways
            or self._has_work()
        )

    def _settle_own(self, channel: DrivableChannel, pending: PendingCall) -> bool:
        """Settle the driver's call if its reply has come. False if something came that the I/O thread has to look at."""
        frame = channel.peek()
        if frame is None:
            return not self._channel.is_lost
        try:
            answer = decode_answer(frame)
        except ProtocolError:
            return False
        if answer.id != pending.id or isinstance(answer.reply, m.Failed) or self._calls.is_late(answer):
            return False
        self._heard_at, self._probed = self._clock(), False
        pending.settle(answer.reply)
        self._calls.answered(answer)
        self._channel.recv_nowait()
        return True

    def _end_driving(self, channel: DrivableChannel, pending: PendingCall, release: Callable[[], object]) -> None:
        if self._driver is pending:
            if not pending.is_settled or self._suspect or channel.peek() is not None:
                self._bell.set()  # the I/O thread does the rest
            self._driver_thread, self._driver_waits = 0, False
            self._driver = None
            channel.end_driving()
        release()
        if self._has_work():
            self._bell.set()

    def _revoke(self) -> None:
        """Take the role from a driver in this thread, which goes on only after the signal handler has returned."""
        self._suspect = not self._driver_waits
        self._driver_thread, self._driver = 0, None
        if self._drivable is not None:
            self._drivable.end_driving()
        self._release_role()
        self._bell.set()

    async def acall(self, request: m.Request, deadline: Deadline | None = None) -> m.Reply:
        """`call` for an event loop; a cancelled wait is an interrupted one."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed, so nobody waits there any more
                self._abandon(pending)

        pending = PendingCall(request, tell)
        try:
            self._submit(pending)
            if deadline is None:
                await done
                return _result(pending)
            since = self._clock()
            timer = loop.call_later(deadline.patience(), wake)
            try:
                await done
            finally:
                timer.cancel()
            deadline.waited(since)
            return _result(pending) if pending.is_settled else self._give_up(pending, deadline)
        except TransferQueueError:
            raise
        except BaseException:
            self._abandon(pending)
            raise

    def post(self, request: m.Request) -> None:
        """Send a request without waiting for its reply. Finalizers may call it: it takes no lock, raises nothing, and does nothing
        after the end of the connection or in a forked child."""
        if os.getpid() == self._pid and self._over is None:
            self._inbox.append(PendingCall(request))
            self._bell.set()

    def unpin(self, blocks: list[int]) -> None:
        """Return one pin of each block, with the next call or within `UNPIN_S`. Finalizers may call it, like `post`.

        blocks: emptied when it is sent, so that an interrupted finalizer may give the same list again.
        """
        if os.getpid() == self._pid and self._over is None:
            self._unpinned.append(blocks)
            if self._unpins_at is None:
                self._bell.set()

    def end_waits(self, why: TransferQueueError) -> None:
        """From now on no call waits at the server. Calls that wait, or would have to, end with `why`; others are answered as before."""
        self._why_no_waits, self._waits_end_now = why, True
        self._bell.set()

    def allow_waits(self) -> None:
        """Calls may wait again."""
        self._why_no_waits, self._waits_end_now = None, False

    def keep(self, kept: RenewedLease, lease_s: float) -> None:
        """Renew this lease, which lasts `lease_s` from now, until it ends or its time limit has passed. Finalizers may call it, like
        `post`."""
        if os.getpid() != self._pid or self._over is not None:
            return
        kept.begin(self._clock(), lease_s)
        self._keeper.keep(kept)
        if kept.due < self._check_at:  # read after the lease was added: see `_turn`
            self._bell.set()

    def keep_on(self, kept: RenewedLease) -> None:
        """The holder of a lease that is kept has shown that it does not hang."""
        if os.getpid() == self._pid and self._over is None and kept.restart(self._clock()):
            self._keeper.keep(kept)
            self._bell.set()

    @property
    def over(self) -> TransferQueueError | None:
        """Why no call can be made any more; None while the session lasts."""
        return self._over

    def close(self) -> None:
        """Say goodbye and stop. Calls that wait end with `Disconnected`. Again, or in a forked child: nothing."""
        if os.getpid() != self._pid or self._thread.ident is None:
            return
        self._closing = True
        if self._over is None:
            self._bell.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, pending: PendingCall) -> None:
        self._check_process()
        self._inbox.append(pending)
        if self._over is not None:  # the I/O thread may have emptied the inbox for the last time
            self._fail_inbox(self._over)
        else:
            self._bell.set()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Forked(
                f"the queue at {self.address} was opened by process {self._pid} and is used in its forked child "
                f"{os.getpid()}; connect again there (or start workers with spawn)"
            )

    def _give_up(self, pending: PendingCall, deadline: Deadline) -> NoReturn:
        """End a call whose deadline has passed, as an interrupt would, with the error that says so."""
        self._abandon(pending)
        raise unanswered(pending.request, self.address, deadline.wait_s)

    def _abandon(self, pending: PendingCall) -> None:
        self._left.append(pending)
        if self._over is None:
            self._bell.set()

    def _fail_inbox(self, error: TransferQueueError) -> None:
        while self._inbox:
            try:
                pending = self._inbox.popleft()
            except IndexError:  # another thread was quicker
                return
            pending.settle(_copy(error))

    # ------------------------------------------------------------ the I/O thread

    def _run(self) -> None:
        try:
            while self._over is None:
                self._take_role()
                try:
                    self._turn()
                finally:
                    self._role.release()
                if self._over is None:
                    self._channel.sleep(self._bell, max(0.0, self._check_at - self._clock()))
        except BaseException as error:
            self._end(InternalError(f"the connection to {self.address} failed: {error!r}"))
            raise
        finally:
            self._take_role()
            self._channel.close()
            self._bell.close()
            self._role.release()

    def _take_role(self) -> None:
        """Wait for the role. A caller that drives gives it up when it is woken."""
        if not self._role.acquire(blocking=False):
            self._bell.set()
            while not self._role.acquire(timeout=ORPHAN_S):
                driver = self._driver
                if driver is not None and any(left is driver for left in self._left):
                    self._suspect = True  # a second interrupt came before the first one had given the role back
                    break
        if self._drivable is not None and (
            self._driver is not None or self._suspect
        ):  # what an interrupted driver has left
            self._driver, self._driver_thread = None, 0
            self._drivable.end_driving()
            if self._suspect:
                self._suspect = False
                self._drivable.reset()

    def _turn(self) -> None:
        try:
            self._channel.look()
            if self._channel.ways != self._ways:
                self._found_way(self._clock())
            while self._over is None and (frame := self._channel.recv_nowait()) is not None:
                self._heard_at, self._probed = self._clock(), False
                self._receive(self._decoded(frame))
            now = self._clock()
            if self._has_work() or now >= self._check_at:
                self._send_what_is_due(now)
                self._check_at = self._next_check()
            if self._keeper.has_new:  # perhaps added by a thread that saw the time of the next check before it was set
                self._check_at = min(self._check_at, self._keeper.next_due() or self._check_at)
        except PeerError as error:
            self._end(error)

    def _decoded(self, frame: bytes) -> m.AnswerFrame:
        try:
            return decode_answer(frame)
        except ProtocolError as error:
            package = self._hello.version if self._hello is not None else ""
            raise mismatch_of(frame, address=self.address, package=package) or error from None

    def _has_work(self) -> bool:
        """Kept cheap: this thread runs it after each reply, while the caller that the reply woke waits for the interpreter."""
        return bool(
            self._inbox
            or self._left
            or self._backlog
            or self._closing
            or self._waits_end_now
            or (self._unpinned and self._unpins_at is None)
        )

    def _send_what_is_due(self, now: float) -> None:
        """Frames that are due together leave together: see `_say`."""
        self._corked = True
        try:
            self._say_what_is_due(now)
        finally:
            self._corked = False
        self._flush()

    def _say_what_is_due(self, now: float) -> None:
        if self._closing:
            self._say_goodbye(now)
        if self._waits_end_now:
            self._waits_end_now = False
            for pending in self._calls.unanswered():
                self._hurry(pending, now)
        if self._inbox or self._unpins_at is None or now >= self._unpins_at:
            self._send_unpins(now)
        while self._inbox:
            pending = self._inbox.popleft()
            self._send(self._calls.send(pending, now), now)
            if self._why_no_waits is not None:
                self._hurry(pending, now)
        while self._left:
            self._leave(self._left.popleft(), now)
        again, overdue = self._calls.late(now)
        for frame in again:
            self._say(frame, now)
        for pending in overdue:
            pending.settle(self._unanswered(pending))
        for kept, lease_s in self._keeper.renewals(now):
            self._renew(kept, lease_s, now)
        if self._calls.session and now >= self._spoke_at + HEARTBEAT_S:
            self._spoke_at = now
            if not self._backlog:
                self._send(self._calls.notice(m.Heartbeat()), now)
            self._judge_server(now)

    def _next_check(self) -> float:
        """When the next heartbeat, resend or renewal is due."""
        due = self._spoke_at + HEARTBEAT_S
        for other in (self._calls.next_late(), self._keeper.next_due(), self._unpins_at):
            if other is not None:
                due = min(due, other)
        return min(due, self._goodbye_by) if self._goodbye is not None else due

    def _renew(self, kept: RenewedLease, lease_s: float, now: float) -> None:
        """Ask for one more term of a lease. The request is resent like any call, so a server that restarts in time answers it."""

        def settled() -> None:
            if isinstance(pending.error, UsageError | LeaseExpired):
                kept.lost = True
            else:
                granted = pending.reply.lease_s if isinstance(pending.reply, m.Renewed) else lease_s
                self._keeper.renewed(kept, granted, self._clock())

        pending = PendingCall(m.Renew(table=kept.table, lease=kept.lease, token=kept.token, lease_s=lease_s), settled)
        self._send(self._calls.send(pending, now), now)

    def _send(self, frame: bytes, now: float) -> None:
        """Send a frame, unless a greeting is unanswered: the calls keep the frame, and send it after the greeting."""
        if self._calls.greeting is None:
            self._say(frame, now)

    def _say(self, frame: bytes, now: float) -> None:
        """Send a frame in order. A frame that the channel does not take now is sent first at the next turn (a reply came, or a
        heartbeat is due)."""
        if self._channel.is_lost:
            return  # the calls keep the frame, and send it after the reconnection
        self._backlog.append(frame)
        self._spoke_at = now
        if not self._corked:
            self._flush()

    def _found_way(self, now: float) -> None:
        """The channel has connected to the server, or to the next one: greet it."""
        self._ways = self._channel.ways
        if self._ways == 1 or self._hello is None:
            return  # the first Hello was sent already
        self._backlog.clear()
        self._say(self._calls.greet(self._hello, now), now)

    def _flush(self) -> None:
        backlog = self._backlog
        while backlog:
            try:
                sent = self._channel.send_some(backlog)
            except Unreachable:
                return
            for _ in range(sent):
                backlog.popleft()

    def _judge_server(self, now: float) -> None:
        """Find out whether the server lives, while nothing else is sent. For a server of this machine the kernel says so; a server of
        another machine is probed if a call waits and no reply has come for long."""
        if self._durable:
            return  # it is started again; until then each call waits as long as it may
        served = is_served(self._channel.address)
        if served is None:
            self._probe(now)
        elif served:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= SERVER_GONE_S:
            self._end(Disconnected(f"the server at {self.address} is gone; start it, and connect again"))

    def _probe(self, now: float) -> None:
        silent_s = now - self._heard_at
        if not len(self._calls) or silent_s < SESSION_SILENCE_S:
            return
        if not self._probed:
            self._probed = True
            self._send(self._calls.send(PendingCall(m.ListTables()), now), now)
        elif silent_s >= SESSION_SILENCE_S + ANSWER_S:
            self._end(Disconnected(f"the server at {self.address} has been silent for {silent_s:.0f} s; connect again"))

    def _send_unpins(self, now: float) -> None:
        """Send the pins that were returned. While there are some, look again after `UNPIN_S`: so those that follow need not wake this
        thread, and an idle client does not wake."""
        end_interrupted()
        if self._unpins_at is not None and now >= self._unpins_at:
            self._unpins_at = (
                None  # first: an `unpin` that has read the time before is in the queue by now, or wakes this thread
            )
        if not self._unpinned:
            return
        if self._unpins_at is None:
            self._unpins_at = now + UNPIN_S
        blocks: list[int] = []
        for _ in range(len(self._unpinned)):
            some = self._unpinned.popleft()
            blocks += some
            some.clear()
        for notice in m.unpin(blocks):
            self._send(self._calls.notice(notice), now)

    def _receive(self, answer: m.AnswerFrame) -> None:
        if self._calls.is_late(answer):
            return
        pending = self._calls.answered(answer)
        reply = outcome(answer.reply)
        if isinstance(reply, Disconnected):
            if pending is not None:
                pending.settle(reply)
            self._end(reply)
        elif isinstance(reply, TransferQueueError):
            self._refused(pending, reply)
        elif pending is not None:
            self._answered(pending, reply)

    def _answered(self, pending: PendingCall, reply: m.Reply) -> None:
        if isinstance(reply, m.Welcome):
            self._welcomed(reply)
        if pending is self._goodbye:
            self._end(Disconnected(f"the queue at {self.address} was closed"))
        elif pending.is_settled:
            return  # by a driver that was interrupted then
        elif pending.on_settled is None:
            self._give_back(pending.request, reply)
        else:
            pending.settle(reply)

    def _welcomed(self, welcome: m.Welcome) -> None:
        if self._calls.session and self._calls.session != welcome.session:
            self._end(
                Disconnected(
                    f"the server at {self.address} was started anew and knows nothing of this session; connect again"
                )
            )
        self._calls.session = welcome.session
        self._durable = welcome.durable
        self.on_welcome(welcome)
        now = self._clock()
        for frame in self._calls.welcomed(now):
            self._send(frame, now)

    def _refused(self, pending: PendingCall | None, error: TransferQueueError) -> None:
        if pending is None:
            return
        if pending.on_settled is not None:
            cut_short = (
                self._why_no_waits is not None and isinstance(error, DeadlineExceeded) and wait_of(pending.request)
            )
            pending.settle(_copy(self._why_no_waits) if self._why_no_waits is not None and cut_short else error)
        elif isinstance(pending.request, m.Hello):
            self._end(Disconnected(f"{self.address} was found again and refused this session: {error}; connect again"))
        elif pending.is_post and not isinstance(error, LeaseExpired | NotFound):  # what is handed back may be gone
            _log.error("%s, which nobody waits for, was refused: %s", m.tag_of(pending.request), error)

    def _leave(self, pending: PendingCall, now: float) -> None:
        """The caller of `pending` went away, perhaps after the reply came: undo the reply, or end the wait at the server."""
        pending.on_settled = None
        pending.gave_up = True
        if pending.reply is not None:
            self._give_back(pending.request, pending.reply)
        else:
            self._hurry(pending, now)

    def _hurry(self, pending: PendingCall, now: float) -> None:
        """End the wait of a call at the server: it answers at once, or refuses."""
        if (frame := self._calls.hurried(pending, now)) is not None:
            self._send(frame, now)

    def _give_back(self, request: m.Request, reply: m.Reply) -> None:
        now = self._clock()
        for undo in give_back(request, reply):
            if is_notice(undo):
                self._send(self._calls.notice(undo), now)
            else:
                self._send(self._calls.send(PendingCall(undo), now), now)

    def _unanswered(self, pending: PendingCall) -> Unreachable:
        name = m.tag_of(pending.request)
        return Unreachable(
            f"{self.address} did not answer {name} within {ANSWER_S:g} s past the wait it asked for, after "
            f"{pending.tries} more tries; the server may be stopped or out of reach{in_doubt(pending.request)}"
        )

    def _say_goodbye(self, now: float) -> None:
        """End all calls at once, and say goodbye to the server after everything that was posted before."""
        if self._goodbye is None:
            closed = Disconnected(f"the queue at {self.address} was closed")
            for pending in self._calls.drain():
                pending.settle(_copy(closed))
            self._goodbye, self._goodbye_by = PendingCall(m.Goodbye()), now + GOODBYE_S
            if not self._calls.session:
                self._end(closed)
                return
            posted = [pending for pending in self._inbox if pending.on_settled is None]
            for pending in posted:
                self._send(self._calls.send(pending, now), now)
            self._fail_inbox(closed)
            self._send(self._calls.send(self._goodbye, now), now)
        elif now >= self._goodbye_by:
            self._end(Disconnected(f"the queue at {self.address} was closed"))

    def _end(self, error: TransferQueueError) -> None:
        self._over = error
        for pending in self._calls.drain():
            pending.settle(_copy(error))
        self._fail_inbox(error)


def _result(pending: PendingCall) -> m.Reply:
    if pending.error is not None:
        try:
            raise pending.error
        finally:
            pending.error = (
                None  # the error holds this frame, and so what the caller put: the frame must not hold the error
            )
    if pending.reply is None:
        raise InternalError(f"{m.tag_of(pending.request)} was settled without a reply")
    return pending.reply


def _nothing() -> None:
    pass


def _once(act: Callable[[], object]) -> Callable[[], object]:
    """A function that calls `act` at its first call and does nothing afterwards. Each call is a single call of C code, so an interrupt comes
    before or after it."""
    return partial(deque, starmap(act, iter([()])), 0)


def _copy(error: TransferQueueError) -> TransferQueueError:
    """A copy of the error for each caller, so that each has its own traceback."""
    return copy.copy(error)
