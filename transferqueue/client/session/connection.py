"""One session with a server: calls from any thread and any event loop.

There are two ways to make a call:

1. A lone caller or an event loop *drives* the channel (`driver`): it sends its requests and reads their replies itself.
2. All others append the request to a queue and wake the I/O thread (`io_thread`). The caller waits on a bare lock that
   the I/O thread releases. A driver ends this way too as soon as anything happens but the reply.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NoReturn

from transferqueue.client.session.calls import Deadline, PendingCall
from transferqueue.client.session.deferred_interrupts import DeferredInterrupts
from transferqueue.client.session.discard_reply import unanswered
from transferqueue.client.session.driver import LoopReader, call_if_free, send_if_free
from transferqueue.client.session.io_thread import IoThread
from transferqueue.client.session.lease_renewal import RenewedLease
from transferqueue.errors import Forked, InternalError, TransferQueueError, Unreachable
from transferqueue.limits import ANSWER_S
from transferqueue.storage.memory.mapping import Pins
from transferqueue.transport import ClientChannel
from transferqueue.wire import messages as m


class Connection:
    """Calls to the server at `address` over `channel`."""

    def __init__(self, channel: ClientChannel, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.address: Final = address
        self.clock: Final = clock
        self._pid: Final = os.getpid()
        self._io: Final = IoThread(channel, address, clock)
        self._reader: Final = LoopReader(self._io)
        self._io.on_over = self._reader.end

    def on_welcome(self, heard: Callable[[m.Welcome], object]) -> None:
        """Call `heard` with each `Welcome`, also with that of a later server, in the I/O thread."""
        self._io.on_welcome = heard

    def open(self, hello: m.Hello, timeout_s: float, asked_s: float | None = None) -> m.Welcome:
        """Start, and introduce this process. `Unreachable` if the server does not answer within `timeout_s`.

        Args:
            hello: the introduction.
            timeout_s: seconds to wait.
            asked_s: for the error: the timeout that the caller gave, of which `timeout_s` is left; default None: all of
                it.
        """
        self._io.hello = hello
        self._io.thread.start()
        heard = threading.Event()
        pending = PendingCall(hello, heard.set)
        pending.deadline = self.clock() + timeout_s + ANSWER_S  # the wait below ends first
        try:
            self._submit(pending)
            if not heard.wait(timeout_s):
                raise Unreachable(
                    f"nothing answered at {self.address} within {timeout_s if asked_s is None else asked_s:g} s; "
                    f"{self._io.channel.doubt}"
                )
            reply = _result(pending)
        except BaseException:
            self.close()
            raise
        if not isinstance(reply, m.Welcome):
            raise InternalError(f"{self.address} answered Hello with {m.tag_of(reply)}")
        return reply

    def greet_again(self, hello: m.Hello, deadline: Deadline) -> m.Welcome:
        """Say another Hello for the same session, now and after each reconnection."""
        self._io.hello = hello
        reply = self.call(hello, deadline)
        if not isinstance(reply, m.Welcome):
            raise InternalError(f"{self.address} answered Hello with {m.tag_of(reply)}")
        return reply

    def call(
        self,
        request: m.Request,
        deadline: Deadline | None = None,
        interrupts: DeferredInterrupts | None = None,
    ) -> m.Reply:
        """Send a request and wait for its reply; raises the server's refusal.

        An interrupt ends the wait at once and leaves the session usable: the connection is made again, and when the
        reply comes, it is undone. So does the deadline, whatever the server does (see `unanswered`). Without a deadline
        the call is `Unreachable` if there is no reply long after the request's own wait has passed.

        `interrupts` are deferred from before this returns a reply, since a returned reply is not undone any more. The
        caller ends that.
        """
        io, gate = self._io, threading.Lock()
        gate.acquire()
        pending = PendingCall(request, gate.release)
        try:  # from here on: an interrupt that comes after the request was queued must not lose its reply
            since = self.clock()
            until = None
            if deadline is not None:
                until = since + deadline.patience(since)
                pending.blocks_loop = _in_event_loop()
            if io.drivable is not None:
                if os.getpid() != self._pid:
                    self._check_process()
                call_if_free(io, pending, until)
            if pending.reply is None:
                if not pending.id:
                    self._submit(pending)
                gate.acquire(timeout=-1 if until is None else max(0.0, until - self.clock()))
            if deadline is not None:
                deadline.waited(since)
                if pending.reply is None and not pending.is_settled:
                    self._give_up(pending, deadline)
            reply = pending.reply if pending.reply is not None else _result(pending)
            if interrupts is not None:
                interrupts.begin()
            return reply
        except TransferQueueError:
            raise
        except BaseException:
            self._abandon(pending)
            raise

    def start(
        self, request: m.Request, deadline: Deadline | None = None
    ) -> tuple[Callable[..., m.Reply], Callable[[], object]]:
        """Send a request. Returns two functions, of which the caller calls one, once: the first waits for the reply
        like `call`, the second gives the reply up."""
        gate = threading.Lock()
        gate.acquire()
        pending = PendingCall(request, gate.release)
        until = None if deadline is None else self.clock() + deadline.patience()
        try:
            self._check_process()
            send_if_free(self._io, pending)
            if not pending.id:
                self._submit(pending)
        except TransferQueueError:
            raise
        except BaseException:
            self._abandon(pending)
            raise

        def answer(interrupts: DeferredInterrupts | None = None) -> m.Reply:
            try:
                gate.acquire(timeout=-1 if until is None else max(0.0, until - self.clock()))
                if deadline is None or pending.is_settled:
                    reply = _result(pending)
                    if interrupts is not None:
                        interrupts.begin()
                    return reply
                return self._give_up(pending, deadline)
            except TransferQueueError:
                raise
            except BaseException:
                self._abandon(pending)
                raise

        return answer, partial(self._abandon, pending)

    def astart(
        self, request: m.Request, deadline: Deadline | None = None
    ) -> tuple[Callable[[], Awaitable[m.Reply]], Callable[[], object]]:
        """`start` for an event loop: requests are sent in the order of these calls."""
        import asyncio

        task = asyncio.ensure_future(self.acall(request, deadline))
        return lambda: task, task.cancel

    async def acall(
        self,
        request: m.Request,
        deadline: Deadline | None = None,
        interrupts: DeferredInterrupts | None = None,
    ) -> m.Reply:
        """`call` for an event loop; a cancelled wait is an interrupted one."""
        import asyncio  # 18 ms of processor time, which programs without an event loop need not spend

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        thread = threading.get_ident()

        def tell() -> None:
            try:
                if threading.get_ident() == thread:
                    wake()
                else:
                    loop.call_soon_threadsafe(wake)
            except RuntimeError:  # no task waits in a closed loop; the next loop of its thread may read its calls
                self._abandon(pending)

        pending = PendingCall(request, tell)
        try:
            self._check_process()
            pending.by_loop = self._reader.begin(loop)
            if pending.by_loop:
                send_if_free(self._io, pending)
            if not pending.id:
                self._submit(pending)
            if deadline is None:
                await done
            else:
                since = self.clock()
                timer = loop.call_later(deadline.patience(), wake)
                try:
                    await done
                finally:
                    timer.cancel()
                deadline.waited(since)
                if not pending.is_settled:
                    self._give_up(pending, deadline)
            reply = _result(pending)
            if interrupts is not None:
                interrupts.begin()
            return reply
        except TransferQueueError:
            raise
        except BaseException:
            self._abandon(pending)
            raise

    def post(self, request: m.Request) -> None:
        """Send a request without waiting for its reply. Finalizers may call it: it takes no lock, raises nothing, and
        does nothing after the end of the connection or in a forked child."""
        if os.getpid() == self._pid and self._io.over is None:
            self._io.inbox.append(PendingCall(request))
            self._io.wakeup.set()

    def unpin(self, blocks: list[int]) -> None:
        """Return one pin of each block, within `UNPIN_S`; if their bytes were copied (`Pins.copied`), with a call after
        `UNPIN_S`, or with the next heartbeat. Finalizers may call it, like `post`.

        The list `blocks` is emptied when it is sent, so that an interrupted finalizer may give the same list again.
        """
        io = self._io
        if os.getpid() == self._pid and io.over is None:
            io.unpinned.append(blocks)
            if io.unpins_at is None and not (type(blocks) is Pins and blocks.copied):
                io.unpins_wait = True
                io.wakeup.set()

    def end_waits(self, why: TransferQueueError) -> None:
        """From now on no call waits at the server. Calls that wait, or would have to, end with `why`; others are
        answered as before."""
        self._io.why_no_waits, self._io.waits_end_now = why, True
        self._io.wakeup.set()

    def allow_waits(self) -> None:
        """Calls may wait again."""
        self._io.why_no_waits, self._io.waits_end_now = None, False

    def keep(self, kept: RenewedLease, lease_s: float) -> None:
        """Renew this lease, which lasts `lease_s` from now, until it ends or its time limit has passed. Finalizers may
        call it, like `post`."""
        if os.getpid() != self._pid or self._io.over is not None:
            return
        kept.begin(self.clock(), lease_s)
        self._io.renewer.renew(kept)
        if kept.due < self._io.check_at:  # read after the lease was added: see `_turn`
            self._io.wakeup.set()

    def keep_on(self, kept: RenewedLease) -> None:
        """The holder of a lease that is kept has shown that it does not hang."""
        if os.getpid() == self._pid and self._io.over is None and kept.restart(self.clock()):
            self._io.renewer.renew(kept)
            self._io.wakeup.set()

    @property
    def over(self) -> TransferQueueError | None:
        """Why no call can be made any more; None while the session lasts."""
        return self._io.over

    def close(self) -> None:
        """Say goodbye and stop. Calls that wait end with `Disconnected`. A second call, or one in a forked child, does
        nothing."""
        if os.getpid() != self._pid or self._io.thread.ident is None:
            return
        self._io.stop_own_driver()
        self._io.closing = True
        if self._io.over is None:
            self._io.wakeup.set()
        if threading.current_thread() is not self._io.thread:
            self._io.thread.join()

    def _submit(self, pending: PendingCall) -> None:
        self._check_process()
        self._io.inbox.append(pending)
        if self._io.over is not None:  # the I/O thread may have emptied the inbox for the last time
            self._io.fail_inbox(self._io.over)
        else:
            self._io.wakeup.set()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Forked(
                f"the queue at {self.address} was opened by process {self._pid} and is used in its forked child "
                f"{os.getpid()}; connect again there (or start workers with spawn)"
            )

    def _give_up(self, pending: PendingCall, deadline: Deadline) -> NoReturn:
        """End a call whose deadline has passed, as an interrupt would, with the error that says so."""
        self._abandon(pending)
        raise unanswered(pending.request, self.address, deadline.wait_s, self._io.server.why_silent)

    def _abandon(self, pending: PendingCall) -> None:
        self._io.abandoned.append(pending)
        if self._io.over is None:
            self._io.wakeup.set()


def _in_event_loop() -> bool:
    """Whether this thread runs an event loop. Loads no asyncio."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


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
