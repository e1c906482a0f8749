"""Calls of an environment with a time limit. Python cannot stop a thread: a call that hangs keeps its thread, and its
episode fails without it.

All calls of one environment are made by one thread. Threads that hang share the interpreter with the process's work, so
a process that has `HUNG_MAX` of them is ended.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar

from transferqueue.workflows.flow.loop.runner import StageFailedInProcess

T = TypeVar("T")

HUNG_MAX: Final = 64
"""Calls of one process that may hang, as many as episodes play at once."""


class HungCalls:
    """Counts the calls of this process that hang. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, text: str) -> None:
        """One more hangs. Raises `StageFailedInProcess` at `HUNG_MAX`."""
        with self._lock:
            self._count += 1
            if self._count >= HUNG_MAX:
                raise StageFailedInProcess(
                    f"{self._count} calls of environments hang in this process; the last: {text}"
                )


class CallThread:
    """Makes calls in a thread of its own, each for at most `timeout_s` seconds. A context manager; leaving it ends the
    thread, unless a call hangs."""

    def __init__(self, timeout_s: float, hung: HungCalls) -> None:
        self._timeout_s, self._hung = timeout_s, hung
        self.is_hung = False
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._calls.put(None)
        if not self.is_hung:
            self._thread.join()

    def call(self, name: str, function: Callable[[], T]) -> T:
        """Return what `function` returns, or raise what it raises. name: for messages.

        Raises `TimeoutError` if it does not return in time, and says where it is; and at once after such a call.
        """
        if self.is_hung:
            raise TimeoutError(f"{name} cannot be called: an earlier call of the environment hangs")
        ended: Future[T] = Future()
        self._calls.put((function, ended))
        if not wait_for([ended], self._timeout_s).done:
            self.is_hung = True
            text = (
                f"{name} did not return within reward.0.timeout_s={self._timeout_s:g} s; set a longer limit, or one in "
                "the environment"
            )
            self._hung.add(text)
            error = TimeoutError(text)
            error.add_note(f"it is {self._place()}")
            raise error
        return ended.result()

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            function, ended = asked
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  (`call` raises it)
                ended.set_exception(error)
            else:
                ended.set_result(result)

    def _place(self) -> str:
        """Where the thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "ending"
        last = traceback.extract_stack(frame)[-1]
        return f"in {last.name}, line {last.lineno} of {last.filename}"
