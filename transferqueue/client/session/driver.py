"""A lone caller, or an event loop, *drives* the channel: it writes and reads the socket itself, and no thread is woken.

All other calls go through the I/O thread, which also does all work that is due by time.

1. The holder of `IoThread.lock` uses the channel and the unanswered calls: a driver, or the I/O thread. A driver does
   not wait for the lock. It puts its name in `IoThread.driver` before its first step, and takes it out after its last.
2. An exception that a signal handler raises (KeyboardInterrupt) comes between any two steps. It releases the lock and
   leaves the name. So the next holder knows that the channel is broken, perhaps in the middle of a frame, and leaves it
   to the I/O thread: this connects again, says Hello, and sends the unanswered calls again with their ids.
3. So a step may be done twice: a call is settled before it is taken out of the calls.
4. A lone caller drives where no other call is on its way. When anything happens but the reply of its call (a wake-up, a
   refusal, the end of the connection), the I/O thread does the rest.
5. The event loop of the first asynchronous call reads until it is closed, and settles its own calls. It leaves all
   other frames to the I/O thread: greetings, late answers, the end of the session. Arriving frames wake the loop or the
   I/O thread, never both: the I/O thread decides at the end of each of its turns. A blocked loop stops only its own
   calls.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from transferqueue.client.session.calls import PendingCall, outcome
from transferqueue.client.session.io_thread import IoThread
from transferqueue.errors import Disconnected, PeerError, ProtocolError, TransferQueueError
from transferqueue.limits import HEARTBEAT_S, UNPIN_S
from transferqueue.transport.control.channel import DrivableChannel
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer

if TYPE_CHECKING:
    import asyncio


def call_if_free(io: IoThread, pending: PendingCall, until: float | None) -> None:
    """Send a call and wait for its reply, unless another thread uses the channel or other work comes first.

    The caller looks afterwards whether the call was sent (it has an id), and is settled.

    Args:
        io: the session.
        pending: the call.
        until: when to stop waiting; None: never.
    """
    if (channel := io.drivable) is not None:
        _drive(io, pending, lambda: _call(io, channel, pending, until))


def send_if_free(io: IoThread, pending: PendingCall) -> None:
    """Send a call without waiting for its reply, unless another thread uses the channel or other work comes first: then
    the call has no id yet. The I/O thread is not woken: it, or the event loop of the call, reads the reply."""
    if (channel := io.drivable) is not None:
        _drive(io, pending, lambda: _send_alone(io, channel, pending))


def _drive(io: IoThread, driver: object, work: Callable[[], None]) -> None:
    """Do the work of a driver if the channel is free and not broken."""
    try:
        if io.begin_driving(driver):
            work()
            if io.driver is driver:  # not taken from it by a signal handler
                io.driver = None
    except PeerError:  # the channel takes no frames: it counts as broken, too
        io.wakeup.set()
    finally:
        try:  # noqa: SIM105  (release first: a second interrupt may come at the call of `suppress`)
            io.lock.release()
        except RuntimeError:  # it was not free, or a signal handler has released it
            pass
    if io.has_work():
        io.wakeup.set()


def _call(io: IoThread, channel: DrivableChannel, pending: PendingCall, until: float | None) -> None:
    if io.calls.by_id or io.has_other_work() or not channel.begin_driving():
        return
    _send(io, pending)
    _await_reply(io, channel, pending, until)
    if io.driver is pending:
        if pending.reply is None or channel.peek() is not None:
            io.wakeup.set()
        channel.end_driving()


def _send_alone(io: IoThread, channel: DrivableChannel, pending: PendingCall) -> None:
    """Nothing is sent over a lost connection: a send would count as a sign of life, and put off the check whether the
    server is gone (`ServerLiveness`)."""
    if io.has_other_work() or io.channel.is_lost:
        return
    _send(io, pending)
    if io.driver is not pending:
        return
    if channel.is_behind:
        io.wakeup.set()
    elif channel.peek() is not None and not (pending.by_loop and channel.leave_to_loop()):
        io.wakeup.set()  # the channel read while it sent
    elif io.loop_frames is not None and not pending.by_loop:
        io.wakeup.set()  # the I/O thread reads from now on, not the loop


def _send(io: IoThread, pending: PendingCall) -> None:
    now = io.clock()
    if io.unpinned and now >= io.unpinned_at + UNPIN_S:
        _send_pins(io, now)
    io.channel.send(io.calls.send(pending, now))
    io.outbox.spoke_at = now


def _send_pins(io: IoThread, now: float) -> None:
    frames = io.notices_of_pins(now)
    while frames:
        del frames[: io.channel.send_some(frames)]


def _await_reply(io: IoThread, channel: DrivableChannel, pending: PendingCall, until: float | None) -> None:
    """Wait until the call is settled, its deadline passes, or something else happens. Pins that are left over are sent
    meanwhile."""
    left_s = HEARTBEAT_S  # by then the I/O thread has work, and reads what comes
    while until is None or (left_s := min(until - io.clock(), HEARTBEAT_S)) > 0:
        pins_wait = bool(io.unpinned) and left_s > UNPIN_S
        has_frame = channel.wait_for_frame(UNPIN_S if pins_wait else left_s)
        if io.driver is not pending:
            return
        if pins_wait and not has_frame:
            _send_pins(io, io.clock())
        elif not has_frame or not _settle_next(io, channel, pending) or pending.reply is not None:
            return


def _settle_next(io: IoThread, channel: DrivableChannel, own: PendingCall | None) -> bool:
    """Settle the driver's call if its reply has come, and is no refusal.

    Args:
        io: the session.
        channel: its channel.
        own: the driver's call; None: any call of the event loop that reads, also one that is refused.

    Returns:
        False if the I/O thread has to look at a frame; for an event loop also if no frame has come.
    """
    frame = channel.peek()
    if frame is None:
        return own is not None and not io.channel.is_lost
    try:
        answer = decode_answer(frame)
    except ProtocolError:
        return False
    pending = io.calls.by_id.get(answer.id) if own is None else own
    if pending is None or pending.id != answer.id or (own is None and not pending.by_loop):
        return False
    if io.calls.is_late(answer):
        return False
    reply: m.Reply | TransferQueueError = answer.reply
    if isinstance(reply, m.Failed):
        reply = outcome(reply)
        if own is not None or io.why_no_waits is not None or isinstance(reply, Disconnected):
            return False
    io.server.heard_at = io.clock()
    pending.settle(reply)
    io.calls.answered(answer)
    io.channel.recv_nowait()
    return True


class LoopReader:
    """Has an event loop read the frames of a session."""

    def __init__(self, io: IoThread) -> None:
        self._io: Final = io
        self._pid: Final = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames: select.epoll | None = None
        """Readable when a frame has come."""

    def begin(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Have `loop`, in whose thread this is called, read from now on, unless another one does. Returns whether it
        does. May be interrupted at any step, and called again."""
        if self._loop is loop:
            return True
        io = self._io
        if io.drivable is None or io.over is not None or (self._loop is not None and not self._loop.is_closed()):
            return False
        if self._frames is None:
            self._frames = select.epoll()
        try:
            loop.add_reader(self._frames.fileno(), self._read)
        except NotImplementedError:  # this kind of loop watches no descriptors
            return False
        self._loop, io.loop_frames = loop, self._frames
        io.wakeup.set()  # at the end of its turn the I/O thread leaves the reading to the loop
        if self._io.over is not None:  # meanwhile
            self._stop()
            return False
        return True

    def end(self) -> None:
        """The session is over. From any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and has forgotten the descriptor
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._frames is not None and os.getpid() == self._pid:
            loop.remove_reader(self._frames.fileno())
            self._frames.close()

    def _read(self) -> None:
        """Settle the calls whose replies have come, unless the I/O thread or a caller that drives uses the channel:
        those read."""
        if os.getpid() != self._pid:
            return  # a forked child has the loop and the socket, too
        io = self._io
        if (channel := io.drivable) is None:
            return
        try:
            _drive(io, self, lambda: self._take_replies(channel))
        except BaseException:
            io.wakeup.set()
            raise

    def _take_replies(self, channel: DrivableChannel) -> None:
        io = self._io
        if not io.stands():
            io.wakeup.set()
            return
        channel.hear()
        while io.driver is self and _settle_next(io, channel, None):
            pass
        if io.driver is self and (io.channel.is_lost or channel.peek() is not None):
            io.wakeup.set()
