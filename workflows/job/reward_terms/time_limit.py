"""Ends this process when a call of user code does not return: Python cannot stop a thread.

The code runs in the main thread, where its own signals work. Another thread waits for the limit; it logs which call
hangs and where, and exits. Code that holds the interpreter's lock stops that thread too, so a timer in C follows a
little later. Calls of several threads at once (`CallLimit`) have no such timer, since a process has only one.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from transferqueue.workflows.flow.processes.stage_process import EXIT_FINAL

LATER_S: Final = 2.0
"""How much later the timer of C ends the process: its traceback names the code, but no row."""


@contextmanager
def ended_process_after(limit_s: float, described: Callable[[], str]) -> Iterator[None]:
    """End the process with `EXIT_FINAL` if the block takes longer than `limit_s`, and write `described()` to stderr.

    Not to be nested: there is one timer of C in a process.
    """
    timer = threading.Timer(limit_s, end_process, [described])
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(limit_s + LATER_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def end_process(described: Callable[[], str]) -> NoReturn:
    """Write where each thread is and `described()` to stderr, and end the process with `EXIT_FINAL`."""
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
    sys.stderr.write(f"{described()}\n")
    sys.stderr.flush()
    os._exit(EXIT_FINAL)


class CallLimit:
    """Bounds calls that several threads make at once, each by `limit_s`. One thread waits for the oldest of them.

    end: is called once with the text of a call that does not return, in that thread.
    """

    def __init__(self, limit_s: float, *, end: Callable[[Callable[[], str]], object] = end_process) -> None:
        self.limit_s: Final = limit_s
        self._end = end
        self._changed = threading.Condition()
        self._calls: dict[int, tuple[float, Callable[[], str]]] = {}
        self._number = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def call(self, described: Callable[[], str]) -> Iterator[None]:
        """End the process if the block takes longer than `limit_s`; `described()` says what hangs."""
        with self._changed:
            number = self._number = self._number + 1
            self._calls[number] = (time.monotonic() + self.limit_s, described)
            self._start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._calls[number]

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="call limit", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while (described := self._overdue()) is None:
                    self._changed.wait(self._left_s())
            self._end(described)
            return

    def _overdue(self) -> Callable[[], str] | None:
        """The oldest call, if its time is over. All calls have the same limit, so the oldest ends first."""
        deadline, described = next(iter(self._calls.values()), (float("inf"), None))
        return described if deadline <= time.monotonic() else None

    def _left_s(self) -> float | None:
        oldest = next(iter(self._calls.values()), None)
        return None if oldest is None else max(0.0, oldest[0] - time.monotonic())
