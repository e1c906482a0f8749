"""Defers Ctrl-C while an operation takes over what a reply has given it.

A reply brings pins, memory, leases or reservations. `Connection.call` undoes a reply if an interrupt ends its wait. An
operation keeps them in objects that give them back when they are collected. Between the two lie many steps of Python
code, and an interrupt at any of them would lose what the reply gave. So the call defers interrupts before it returns,
and the runner ends that before the operation waits again, copies, or returns: an interrupt comes a few microseconds
later, and never later than a wait or a copy.

Only the main thread has interrupts. A handler that is not Python code is left alone.
"""

from __future__ import annotations

# `signal.signal` takes several times as long, to make enumerations of numbers.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any, Final

_SIGINT: Final = int(_signal.SIGINT)


class DeferredInterrupts:
    """The interrupts of one operation. `begin` and `end` may be called in any thread, and again."""

    __slots__ = ("_arrived", "_handler")

    def __init__(self) -> None:
        self._handler: Any = None
        self._arrived: tuple[int, FrameType | None] | None = None

    def begin(self) -> None:
        """Defer interrupts from now on. One that comes before is raised here."""
        if self._handler is not None or threading.get_ident() != threading.main_thread().ident:
            return
        if callable(handler := _signal.signal(_SIGINT, self._arrive)):
            self._handler = handler
        else:
            _signal.signal(_SIGINT, _signal.SIG_DFL if handler is None else handler)

    def end(self) -> None:
        """Have interrupts come at once again. One that was deferred comes now."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        _signal.signal(_SIGINT, handler)
        if (arrived := self._arrived) is not None:
            self._arrived = None
            handler(*arrived)

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived = number, frame
