"""Over-sampling: generators begin more responses than a batch needs, and stop the rest when the batch is full.

Rules (APRIL, arXiv 2509.18521; here the stop signal goes through the queue):

1. The trainer announces each full batch on a weight channel: version k says that batch k - 1 is full, the one that
   makes weights k. Its one tensor holds the row ids of the batch.
2. A generating process waits for it at the server, in a separate thread, and stops between two tokens. Unfinished
   responses are released with their tokens, log-probs and versions, and prompts that were not begun as they are: no row
   is lost or done twice.
3. From then on nothing is generated with weights older than k: the rows wait for these weights and continue under them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.errors import AlreadyExists, DeadlineExceeded, PeerError

FULL: Final = "full"
"""Weight channel on which full batches are announced, unless a job has another name for it."""
ABORTED: Final = "aborted"
"""Kind of the metrics of responses that were stopped because their batch was full: rows, and their tokens so far."""
_FOLLOW_S: Final = 3600.0
"""Longest wait for one announcement; then the thread waits again."""

Due = Callable[[], int]
"""Returns the version that the newest full batch makes; 0 before the first. Raises the error that ended the listening
thread."""


def nothing_due() -> int:
    """The `Due` of a job without over-sampling."""
    return 0


def tell_full(queue: tq.Queue, version: int, rows: npt.NDArray[np.int64], *, channel: str = FULL) -> None:
    """Announce that the batch of weights `version` is full. A second announcement (by a restarted trainer) does
    nothing."""
    with suppress(AlreadyExists):
        queue.weights(channel, keep=1).publish(version, {"rows": np.ascontiguousarray(rows)})


@contextmanager
def hearing(
    queue: tq.Queue, *, channel: str = FULL, then: Callable[[int], None] = lambda version: None
) -> Iterator[Due]:
    """Listen for full batches until the block ends. then: called with the version of each, in the thread that
    listens."""
    announced = queue.weights(channel, keep=1)
    latest = 0
    failures: list[Exception] = []
    ended = threading.Event()

    def hear() -> None:
        nonlocal latest
        try:
            while not ended.is_set():
                with suppress(DeadlineExceeded), announced.pull(above=latest, timeout_s=_FOLLOW_S) as weights:
                    latest = weights.version
                    then(latest)
        except PeerError:
            return  # the queue is closed: the stage is over
        except Exception as failure:  # noqa: BLE001  (raised by `due`)
            failures.append(failure)

    def due() -> int:
        if failures:
            raise failures[0]
        return latest

    threading.Thread(target=hear, name="full batches", daemon=True).start()
    try:
        yield due
    finally:
        ended.set()
