"""An event loop reads the replies to its own calls: no thread is woken to send a call, and none to read its reply.

1. The loop of the first asynchronous call reads, until it is closed. The I/O thread sends and reads calls of another
   loop, or of threads.
2. Either the loop or the I/O thread is woken by arriving frames, never both: the I/O thread decides at the end of each
   of its turns. It keeps reading while any other call is unanswered (the renewal of a lease, a thread that shares the
   session, a caller that went away), while frames wait to be written, and while there is no connection.
3. The loop uses the channel with the role of the session, and only if the role is free: it waits for nothing. So a loop
   that is blocked by other work stops nothing but its own calls. The I/O thread does all work that is due by time, and
   reads whenever it does.
4. The loop settles its own calls. It leaves all other frames to the I/O thread: greetings, late answers, the end of the
   session.
5. An interrupt at any step of reading leaves the channel suspect (see `channel_role`): the I/O thread connects again,
   and the server answers the remaining calls again. A call is settled first and taken out afterwards, and a caller may
   be told twice. A second interrupt may come before the role was given back: the loop gives it back when the I/O thread
   asks, or with its next call.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from transferqueue.client.session.caller_io import settle_next
from transferqueue.client.session.calls import PendingCall
from transferqueue.client.session.channel_role import RoleClaim
from transferqueue.client.session.io_thread import IoThread
from transferqueue.transport.control.channel import DrivableChannel
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    import asyncio


class LoopReader:
    """Has an event loop read the frames of a session."""

    def __init__(self, io: IoThread) -> None:
        self._io: Final = io
        self._pid: Final = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames: select.epoll | None = None
        """Readable when a frame has come."""
        self._driver: Final = PendingCall(m.Heartbeat())
        """The driver of the role while the loop has it."""

    def begin(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Have `loop`, in whose thread this is called, read from now on, unless another one does. Returns whether it
        does. May be interrupted at any step, and called again."""
        if self._loop is loop:
            return True
        io = self._io
        if io.role.drivable is None or io.over is not None or (self._loop is not None and not self._loop.is_closed()):
            return False
        if self._frames is None:
            self._frames = select.epoll()
        try:
            loop.add_reader(self._frames.fileno(), self._read)
        except NotImplementedError:  # this kind of loop watches no descriptors
            return False
        self._loop, io.loop_frames = loop, self._frames
        io.role.ask_loop = self._ask
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

    def _ask(self) -> None:
        """Have the loop give the role back, if two interrupts have ended its holder. From any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._io.role.revoke_own)

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._frames is not None and os.getpid() == self._pid:
            loop.remove_reader(self._frames.fileno())
            self._frames.close()

    def _read(self) -> None:
        """Settle the calls whose replies have come, unless the I/O thread or a caller that drives has the role: those
        read."""
        if os.getpid() != self._pid:
            return  # a forked child has the loop and the socket, too
        io, role = self._io, self._io.role
        channel, claim = role.drivable, RoleClaim(role)
        if channel is None:
            return
        role.revoke_own()  # two interrupts may have come, and the second before the role was given back
        try:  # no other `try` in this function: CPython does not guard the line of an inner one
            if claim.take():
                self._take_replies(channel)
                claim.release()
        except BaseException:
            claim.give_up()
            io.wakeup.set()
            raise

    def _take_replies(self, channel: DrivableChannel) -> None:
        io, role = self._io, self._io.role
        if not io.stands():
            io.wakeup.set()
            return
        role.driver = self._driver
        role.suspect = True
        channel.hear()
        while settle_next(io, channel, None):
            pass
        if role.driver is self._driver:  # not revoked by a signal handler in this thread
            if io.channel.is_lost or channel.peek() is not None:
                io.wakeup.set()
            role.suspect = False
            role.driver = None
