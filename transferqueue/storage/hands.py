"""Long copies by several threads.

numpy lets go of the interpreter while it copies, and one core does not fill the memory's bandwidth; and the core that helped is
awake when the server is asked for the commit that follows. Threads are started for one copy and end with it (0.1 ms, where 32 MiB
take 3): nothing idles, and a fork meets none of them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from transferqueue.limits import MIB

Job = Callable[[], object]

SHARED_BYTES: Final = 8 * MIB
"""From so many bytes on a copy is shared."""
PART_BYTES: Final = 2 * MIB
"""About what one thread takes at a time."""
HANDS_MAX: Final = 4
"""Threads of one copy, the caller's included."""


def share(jobs: Sequence[Job], nbytes: int) -> None:
    """Do all jobs, which copy `nbytes` together, in any order, here and in threads of their own.

    Nobody is at it any more when this returns, or raises what the first job that failed raised.
    """
    left, failed = deque(jobs), deque[BaseException]()
    hands = min(HANDS_MAX, len(jobs), len(os.sched_getaffinity(0))) if nbytes >= SHARED_BYTES else 1
    helpers = [threading.Thread(target=_work, args=(left, failed), daemon=True) for _ in range(hands - 1)]
    try:
        with suppress(RuntimeError):  # no thread can be started: then the ones there are do it
            for helper in helpers:
                helper.start()
        _work(left, failed)
    finally:
        left.clear()
        for helper in helpers:
            _join(helper, failed)
    if failed:
        raise failed.popleft()


def _work(left: deque[Job], failed: deque[BaseException]) -> None:
    """Do what is left until nothing is, or one has failed."""
    try:
        while not failed and (job := _next(left)):
            job()
    except BaseException as error:  # noqa: BLE001  (raised by the caller's thread)
        failed.append(error)


def _next(left: deque[Job]) -> Job | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _join(helper: threading.Thread, failed: deque[BaseException]) -> None:
    """Wait for its last part, also through an interrupt: it writes into memory that others have afterwards."""
    while helper.is_alive():
        try:
            helper.join()
        except BaseException as error:  # noqa: BLE001  (raised when all are done)
            failed.append(error)
