"""Ends a stage that drops too many rows: the source puts others in their place for ever, and the trainer waits."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import batch_rows

BATCHES_MAX: Final = 20
"""Batches of rows that may be dropped one after the other before a job counts as one that cannot progress; verl's bound
of tries is 10. A share of dropped rows is that of as many."""


class AllDroppedGuard:
    """Counts the rows that a stage drops and keeps. Safe from several threads.

    Args:
        job: the job.
        what: the reason, for the message.
        remedy: what to change.
        most: the key and the value of the largest share that may be dropped; default: rows may be dropped as long as
            one is kept.
    """

    def __init__(self, job: Job, what: str, remedy: str, *, most: tuple[str, float] = ("", 1.0)) -> None:
        self._rows_max = BATCHES_MAX * batch_rows(job)
        self._what, self._remedy = what, remedy
        self._key, self._share_max = most
        self._leases: deque[tuple[int, int]] = deque()
        """Rows kept and dropped of the last leases, just enough for `BATCHES_MAX` batches."""
        self._kept = self._dropped = 0
        self._lock = threading.Lock()

    def count(self, *, kept: int, dropped: int, last: str = "") -> None:
        """Count the rows of one lease. last: why the last one was dropped.

        Raises `StageFailedInProcess` if of the rows of the last `BATCHES_MAX` batches all were dropped, or more than
        the largest share.
        """
        with self._lock:
            self._add(kept, dropped)
            rows = self._kept + self._dropped
            is_over = self._dropped == rows or self._dropped > self._share_max * rows
            if not dropped or rows < self._rows_max or not is_over:
                return
            count = f"{self._dropped:,} of " if self._kept else ""
            were = f"dropped, more than {self._key}={self._share_max:g}" if self._kept else "all dropped"
        raise StageFailedInProcess(
            f"{count}the last {rows:,} rows, {BATCHES_MAX} batches, were {were}: {self._what}. The trainer would wait "
            f"for ever: {self._remedy}" + (f"; the last: {last}" if last else "")
        )

    def _add(self, kept: int, dropped: int) -> None:
        self._leases.append((kept, dropped))
        self._kept, self._dropped = self._kept + kept, self._dropped + dropped
        while self._kept + self._dropped - sum(self._leases[0]) >= self._rows_max:
            oldest = self._leases.popleft()
            self._kept, self._dropped = self._kept - oldest[0], self._dropped - oldest[1]
