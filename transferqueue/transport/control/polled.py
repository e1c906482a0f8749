"""The common part of the channels over a Unix socket and over ZeroMQ: it decides which waiter a frame wakes.

The waiter is the thread in `sleep`, a caller that drives (it waits on the connection itself), or an event loop (it
watches its own descriptor). To let another waiter sleep on, the channel removes the connection from that waiter's epoll
and adds it again afterwards. So a waiter touches only descriptors, never the connection, which another thread may use
meanwhile.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

from transferqueue.errors import Disconnected
from transferqueue.transport.system.wakeup import Wakeup

_READABLE: Final = select.EPOLLIN


class PolledChannel(ABC):
    """A channel over a descriptor that becomes readable when a frame may have come: `ClientChannel` and
    `DrivableChannel` except for sending and connecting.

    A subclass has the descriptor of each connection polled (`_attach`, `_detach`), and returns it in `_connection`.
    """

    address: str

    def __init__(self) -> None:
        self._arrived: Final[deque[bytes]] = deque()
        self._readable = self._closed = False
        self._poll: Final = select.epoll()
        """The connection and the wake-up."""
        self._sleeper: Final = select.epoll()
        """The wake-up, and `_poll` unless a caller drives or an event loop reads."""
        self._sleeper.register(self._poll, _READABLE)
        self._watched: Wakeup | None = None
        self._frames: select.epoll | None = None
        """The connection alone, for an event loop that reads; None: no loop reads."""
        self._left_to_loop = False

    @property
    @abstractmethod
    def _connection(self) -> int | None:
        """The descriptor of the connection; None without one."""

    @property
    @abstractmethod
    def is_behind(self) -> bool:
        """See `DrivableChannel`."""

    @abstractmethod
    def _hear(self) -> None:
        """Read all arrived frames, so that the next one makes the descriptor readable, and clear `_readable`."""

    @abstractmethod
    def _due_s(self) -> float | None:
        """Seconds until `_tend` has work even without an event; None: it has none."""

    @abstractmethod
    def _tend(self) -> None:
        """Maintain the connection, once in each `look`."""

    def _attach(self, connection: int) -> None:
        self._poll.register(connection, _READABLE)
        if self._frames is not None:
            self._frames.register(connection, _READABLE)

    def _detach(self, connection: int) -> None:
        for polled in (self._poll, self._frames):
            if polled is not None:
                polled.unregister(connection)

    def recv_nowait(self) -> bytes | None:
        """The next frame, or None."""
        self._check_open()
        if not self._arrived and self._readable:
            self._hear()
        return self._arrived.popleft() if self._arrived else None

    def _check_open(self) -> None:
        if self._closed:
            raise Disconnected(f"the channel to {self.address} is closed")

    def wait(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """Block until a frame, the wake-up or the timeout."""
        self.sleep(wakeup, timeout_s)
        self.look()

    def sleep(self, wakeup: Wakeup, timeout_s: float | None) -> None:
        """See `transferqueue.transport.ClientChannel`."""
        if self._closed:
            return
        if self._watched is not wakeup:
            for polled in (self._poll, self._sleeper):
                if self._watched is not None:
                    polled.unregister(self._watched)
                polled.register(wakeup, _READABLE)
            self._watched = wakeup
        due_s = 0.0 if self._arrived else self._due_s()
        if due_s is not None:
            timeout_s = due_s if timeout_s is None else min(due_s, timeout_s)
        self._sleeper.poll(timeout_s)

    def look(self) -> None:
        """See `transferqueue.transport.ClientChannel`."""
        if self._closed:
            return
        for number, events in self._poll.poll(0):
            if self._watched is not None and number == self._watched.fileno():
                self._watched.clear()
            else:
                self._happened(events)
        self._tend()

    def _happened(self, events: int) -> None:
        self._readable = self._readable or bool(events & ~select.EPOLLOUT)

    # ------------------------------------------------------------ a caller that drives, and an event loop that reads

    def begin_driving(self) -> bool:
        """See `DrivableChannel`."""
        connection = self._connection
        if connection is None or self.is_behind or self._arrived or self._readable:
            return False
        self._sleeper.modify(self._poll, 0)
        if self._frames is not None:
            self._frames.modify(connection, 0)
        return True

    def end_driving(self) -> None:
        """See `DrivableChannel`."""
        if self._closed:
            return
        connection = self._connection
        if self._frames is None:
            self._sleeper.modify(self._poll, _READABLE)
        elif connection is not None:
            self._frames.modify(connection, _READABLE)

    def have_loop_read(self, frames: select.epoll | None) -> None:
        """See `DrivableChannel`."""
        if frames is self._frames or self._closed:
            return
        connection = self._connection
        if connection is not None and self._frames is not None:
            self._frames.unregister(connection)
        self._frames, self._left_to_loop = frames, False
        if connection is not None and frames is not None:
            frames.register(connection, _READABLE)
        self._sleeper.modify(self._poll, _READABLE if frames is None else 0)

    def leave_to_loop(self) -> bool:
        """See `DrivableChannel`."""
        connection = self._connection
        if connection is None or self._frames is None or self._closed:
            return False
        self._frames.modify(connection, _READABLE | select.EPOLLOUT)  # the connection is writable, so the loop wakes
        self._left_to_loop = True
        return True

    def hear(self) -> None:
        """See `DrivableChannel`."""
        if self._closed:
            return
        connection = self._connection
        if self._left_to_loop and connection is not None and self._frames is not None:
            self._frames.modify(connection, _READABLE)
        self._left_to_loop = False
        self._hear()

    def wait_for_frame(self, timeout_s: float | None) -> bool:
        """See `DrivableChannel`."""
        if self._arrived:  # `send` reads too
            return True
        connection = self._connection
        events = self._poll.poll(timeout_s, 2)
        if connection is None or events != [(connection, _READABLE)]:
            return False
        self._readable = True
        return True

    def peek(self) -> bytes | None:
        """The frame that `recv_nowait` would return."""
        if not self._arrived and self._readable:
            self._hear()
        return self._arrived[0] if self._arrived else None

    def close(self) -> None:
        """Drop unread frames, and close the poll descriptors. A subclass closes its connection first."""
        self._closed = True
        self._arrived.clear()
        self._sleeper.close()
        self._poll.close()
