"""Copies large memory with several threads.

numpy releases the GIL while it copies, and one core does not use the whole memory bandwidth. The threads are started
for one copy and end with it (0.1 ms, while 32 MiB take 3 ms), so no thread idles, and a fork finds none of them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from transferqueue.limits import MIB

Job = Callable[[], object]

PARALLEL_BYTES: Final = 8 * MIB
"""Copies of at least this size use several threads."""
PART_BYTES: Final = 2 * MIB
"""About the size of one job."""
COPY_THREADS_MAX: Final = 4
"""Most threads of one copy, with the caller's."""


def parallel_copy(jobs: Sequence[Job], nbytes: int) -> None:
    """Run all jobs, which copy `nbytes` in total, in any order, in this thread and in others.

    Blocks until no job runs any more. Then raises the error of the first job that failed, if one did.
    """
    work = _JobQueue(jobs)
    threads = min(COPY_THREADS_MAX, len(jobs), len(os.sched_getaffinity(0))) if nbytes >= PARALLEL_BYTES else 1
    try:
        with suppress(RuntimeError):  # no thread can be started: the existing ones do all jobs
            for _ in range(threads - 1):
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


class _JobQueue:
    """Jobs that several threads take, and the wait for those that run.

    It does not wait with ``Thread.join``: if an interrupt ends a join, Python 3.11 regards that thread as ended.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.failed: deque[BaseException] = deque()
        self._left: SimpleQueue[Job] = SimpleQueue()
        for job in jobs:
            self._left.put(job)
        self._busy: deque[None] = deque()
        self._ended: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """Run jobs in a further thread; `end` waits for it."""
        self._busy.append(None)
        try:
            self.do()
        finally:
            self._busy.pop()
            self._ended.put(None)

    def do(self) -> None:
        """Run jobs until none is left or one has failed."""
        try:
            while not self.failed and (job := self._next()):
                job()
        except BaseException as error:  # noqa: BLE001  (raised by the caller's thread)
            self.failed.append(error)

    def _next(self) -> Job | None:
        try:
            return self._left.get_nowait()
        except Empty:
            return None

    def end(self) -> None:
        """Wait for the jobs that run, also through an interrupt: their memory is reused by others afterwards."""
        while True:
            try:
                while self._next() is not None:  # a thread that starts from now on finds no job
                    pass
                while self._busy:
                    self._ended.get()
                return
            except BaseException as error:  # noqa: BLE001  (raised when all jobs have ended)
                self.failed.append(error)
