"""A flag that any thread may set and one thread sleeps on, together with sockets: an eventfd."""

from __future__ import annotations

import os
from collections.abc import Callable


class Wakeup:
    """Set from any thread or signal, waited for by one. Setting twice before it is seen wakes once.

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
        """The descriptor to poll for reading; -1 once closed."""
        return -1 if (held := self._open) is None else held.number

    def set(self) -> None:
        """Wake the waiting thread, now or when it next waits. Never blocks; after `close` it does nothing.

        Takes no lock: finalizers call it, and an interrupt on the way out of a lock's block leaves the lock taken for ever.
        """
        held = self._open
        if held is not None:
            os.eventfd_write(held.number, 1)

    def clear(self) -> bool:
        """Forget that it was set; returns whether it was."""
        try:
            return os.eventfd_read(self.fileno()) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Give the descriptor back. Closing twice is allowed."""
        self._open = None


class _Descriptor:
    """An open descriptor, closed when nobody uses it any more: a late `set` must never write into a number that the kernel has
    given to another file."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)
