"""A flag (an eventfd) that any thread may set, and on which one thread sleeps together with sockets."""

from __future__ import annotations

import os
from collections.abc import Callable


class Wakeup:
    """Set from any thread or signal handler; one thread waits for it. Setting it twice before it is cleared wakes once.

    Example:
        >>> wakeup = Wakeup()
        >>> wakeup.set()
        >>> wakeup.clear(), wakeup.clear()
        (True, False)
        >>> wakeup.close()
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: _Descriptor | None = _Descriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def fileno(self) -> int:
        """The descriptor to poll for reading; -1 after `close`."""
        return -1 if (held := self._open) is None else held.number

    def set(self) -> None:
        """Wake the waiting thread, now or when it next waits. Never blocks. After `close` it does nothing.

        Takes no lock: finalizers call this, and an interrupt at the end of a ``with lock`` block would leave the lock
        taken for ever.
        """
        held = self._open
        if held is not None:
            os.eventfd_write(held.number, 1)

    def clear(self) -> bool:
        """Reset the flag, and return whether it was set."""
        try:
            return os.eventfd_read(self.fileno()) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        self._open = None


class _Descriptor:
    """An open descriptor, closed when no thread uses it any more: a late `set` must not write into a descriptor number
    that the kernel has reused."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)
