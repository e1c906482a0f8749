"""A flag that any thread may set and one thread sleeps on, together with sockets: an eventfd."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """Set from any thread or signal, waited for by one. Setting twice before it is seen wakes once.

    Example:
        >>> wakeup = Wakeup()
        >>> wakeup.set()
        >>> wakeup.clear(), wakeup.clear()
        (True, False)
        >>> wakeup.close()
    """

    __slots__ = ("_closing", "_fd")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A late `set` must never write into a number that the kernel has given to another file.
        self._closing = threading.RLock()

    def fileno(self) -> int:
        """The descriptor to poll for reading; -1 once closed."""
        return self._fd

    def set(self) -> None:
        """Wake the waiting thread, now or when it next waits. Never blocks; after `close` it does nothing."""
        with self._closing:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> bool:
        """Forget that it was set; returns whether it was."""
        try:
            return os.eventfd_read(self._fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Give the descriptor back. Closing twice is allowed."""
        with self._closing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
