"""Over-sampling: more responses are begun than a batch needs, and when the batch is full the rest stops where it is.

The law (APRIL, arXiv 2509.18521; the stop goes through the queue here):

1. The trainer tells which batch it has on the channel `FULL`: version k says that batch k - 1 is full, the one that the
   weights k are made of. Its one tensor holds the rows of the batch.
2. A rollout process hears that at the server, in a thread of its own, and stops between two tokens. What is unfinished goes
   back with its tokens, log-probs and versions, and what is not begun as it is: nothing is lost, and nothing done twice.
3. From then on nothing is generated with weights older than k: the rows wait for them, and go on under them.
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
"""Channel on which full batches are told."""
ABORTED: Final = "aborted"
"""Figures of responses that stopped because their batch was full: rows, and the tokens that they have."""
_FOLLOW_S: Final = 3600.0
"""Longest wait for one batch, after which it is asked for again."""

Due = Callable[[], int]
"""The version of the weights that the newest full batch makes; 0 as long as there is none. Raises what ended the hearing."""


def nothing_due() -> int:
    """Without over-sampling no batch is told of."""
    return 0


def tell_full(queue: tq.Queue, version: int, rows: npt.NDArray[np.int64]) -> None:
    """Tell that the batch of which weights `version` will be made is full. Again: nothing (a trainer that was started anew)."""
    with suppress(AlreadyExists):
        queue.weights(FULL, keep=1).publish(version, {"rows": np.ascontiguousarray(rows)})


@contextmanager
def hearing(queue: tq.Queue) -> Iterator[Due]:
    """Hear of full batches while entered."""
    channel = queue.weights(FULL, keep=1)
    latest = 0
    failures: list[Exception] = []
    ended = threading.Event()

    def hear() -> None:
        nonlocal latest
        try:
            while not ended.is_set():
                with suppress(DeadlineExceeded), channel.pull(above=latest, timeout_s=_FOLLOW_S) as weights:
                    latest = weights.version
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
