"""Long copies by several threads.

numpy lets go of the interpreter while it copies, and one core does not fill the memory's bandwidth; and the core that helped is
awake when the server is asked for the commit that follows. Threads are started for one copy and end with it (0.1 ms, where 32 MiB
take 3): nothing idles, and a fork meets none of them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from transferqueue.limits import MIB

Job = Callable[[], object]

SHARED_BYTES: Final = 8 * MIB
"""From so many bytes on a copy is shared."""
PART_BYTES: Final = 2 * MIB
"""About what one thread takes at a time."""
HANDS_MAX: Final = 4
"""Threads of one copy, the caller's included."""


def parallel_copy(jobs: Sequence[Job], nbytes: int) -> None:
    """Do all jobs, which copy `nbytes` together, in any order, here and in threads of their own.

    Nobody is at it any more when this returns, or raises what the first job that failed raised.
    """
    work = _Shared(jobs)
    hands = min(HANDS_MAX, len(jobs), len(os.sched_getaffinity(0))) if nbytes >= SHARED_BYTES else 1
    try:
        with suppress(RuntimeError):  # no thread can be started: then those that there are do it
            for _ in range(hands - 1):
                threading.Thread(target=work.help, daemon=True).start()
        work.do()
    finally:
        try:
            work.end()
        except BaseException:  # an interrupt that came before `end` could catch it
            work.end()
            raise
    if work.failed:
        raise work.failed.popleft()


class _Shared:
    """Jobs that several threads take from one end.

    Not by joining the helpers: ``Thread.join`` that an interrupt ends takes its thread for one that has ended (Python 3.11).
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.failed: deque[BaseException] = deque()
        self._left = deque(jobs)
        self._busy: deque[None] = deque()
        self._ended: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """Do what is left; nobody has ended before this has."""
        self._busy.append(None)
        try:
            self.do()
        finally:
            self._busy.pop()
            self._ended.put(None)

    def do(self) -> None:
        """Do what is left until nothing is, or one has failed."""
        try:
            while not self.failed and (job := self._next()):
                job()
        except BaseException as error:  # noqa: BLE001  (raised by the caller's thread)
            self.failed.append(error)

    def _next(self) -> Job | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def end(self) -> None:
        """Wait for the last parts, also through an interrupt: they go into memory that others have afterwards."""
        while True:
            try:
                self._left.clear()  # who begins to help from now on finds nothing to do
                while self._busy:
                    self._ended.get()
                return
            except BaseException as error:  # noqa: BLE001  (raised when all are done)
                self.failed.append(error)
