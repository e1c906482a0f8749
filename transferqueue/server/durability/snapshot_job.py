"""One snapshot or restore that runs: how far it is, and how its thread is told to end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from transferqueue.errors import DeadlineExceeded, TransferQueueError
from transferqueue.limits import PART_DECISION_S
from transferqueue.wire import messages as m


class SnapshotJob:
    """One snapshot or restore. done, total: bytes. reported: the value of `done` at the last wake-up of its watchers. is_part: of a cut over
    several coordinators; it ends only when it is told whether all parts are `ready`."""

    def __init__(self, number: int, path: Path, total: int, *, is_part: bool = False, cut: str = "") -> None:
        self.number, self.path, self.total = number, path, total
        self.done = self.reported = 0
        self.ended = False
        self.error: TransferQueueError | None = None
        self.is_part: Final = is_part
        self.cut = cut
        """Of a part: its cut; "": a restore has not read it yet."""
        self.is_complete = False
        """Of a snapshot: it has its name."""
        self.was_cleared = False
        """Of a part of a whole cut: older snapshots are removed."""
        self.ready = False
        self.decided = threading.Event()
        """Of a part: it is known whether all parts are ready."""
        self.asked_at = time.monotonic()
        """Of a part: when somebody watched it last."""
        self._given_up: TransferQueueError | None = None

    def expect_twice(self, nbytes: int) -> None:
        """A restore reads all files twice: to compare checksums, and to load them."""
        self.total = 2 * nbytes

    def give_up(self, error: TransferQueueError) -> None:
        """Have the thread end the job with this error."""
        self._given_up = self._given_up or error
        self.decided.set()

    def check_wanted(self) -> None:
        """Raise what the job was given up with, if it was."""
        if self._given_up is not None:
            raise self._given_up

    def await_decision(self) -> None:
        """Of a part that is ready: block until all parts are. Raises what it is given up with, `DeadlineExceeded` if nobody asks for it."""
        while not self.decided.wait(PART_DECISION_S / 4):
            if time.monotonic() - self.asked_at > PART_DECISION_S:
                raise DeadlineExceeded(
                    f"{self.path} was given up: it was ready, and nobody asked for it for {PART_DECISION_S:g} s; its client is gone: take "
                    "another snapshot, or restore again"
                )
        self.check_wanted()

    def reply(self) -> m.JobProgress | m.PartProgress:
        """The progress of the job."""
        if not self.is_part:
            return m.JobProgress(self.number, str(self.path), self.done, self.total, self.ended)
        ready = self.ready and not self.decided.is_set()
        return m.PartProgress(self.number, str(self.path), self.done, self.total, self.cut, ready, self.ended)
