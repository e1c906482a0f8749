"""Ends a stage that does nothing but drop rows: the source would put others in their place for ever, and the trainer
wait for ever."""

from __future__ import annotations

from typing import Final

from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import batch_rows

BATCHES_MAX: Final = 20
"""Batches of rows that may be dropped one after the other before a job counts as one that cannot progress; verl's bound
of tries is 10."""


class AllDroppedGuard:
    """Counts the rows that a stage drops without keeping any. what: the reason, for the message. remedy: what to
    change."""

    def __init__(self, job: Job, what: str, remedy: str) -> None:
        self._rows_max = BATCHES_MAX * batch_rows(job)
        self._what, self._remedy = what, remedy
        self._rows = 0

    def count(self, *, kept: int, dropped: int) -> None:
        """Count the rows of one lease. Raises `StageFailedInProcess` after `BATCHES_MAX` batches of rows that were all
        dropped."""
        self._rows = 0 if kept else self._rows + dropped
        if self._rows >= self._rows_max:
            raise StageFailedInProcess(
                f"the last {self._rows:,} rows, {BATCHES_MAX} batches, were all dropped: {self._what}. The trainer "
                f"would wait for ever: {self._remedy}"
            )
