"""Rows of one task that wait after a failed lease, by the time at which they are ready again.

An entry stands for the rows of one release that wait equally long. A row that leaves its wait early (it is dropped, or requeued) stays in
its entry, which is no harm: its `hold` is another stamp from then on, and no stamp is used twice.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from transferqueue.ledger.rows.arrays import IntArray


class PostponedRows(NamedTuple):
    """Rows that wait until `until`. stamp: the `hold` of those that still do."""

    until: float
    stamp: int
    rows: IntArray


class RetryQueue:
    """The waits of one task; a subject of `Deadlines`."""

    __slots__ = ("_waits", "deadline", "table", "task")

    def __init__(self, table: str, task: str) -> None:
        self.table, self.task = table, task
        self.deadline: float | None = None
        self._waits: list[PostponedRows] = []

    def add(self, until: float, stamp: int, rows: IntArray) -> None:
        """Add rows. The caller sets the deadline to `next` afterwards."""
        heapq.heappush(self._waits, PostponedRows(until, stamp, rows))

    @property
    def next(self) -> float | None:
        """When the first wait ends; None if there is none."""
        return self._waits[0].until if self._waits else None

    def due(self, now: float) -> list[PostponedRows]:
        """Remove and return the waits that are over."""
        over = []
        while self._waits and self._waits[0].until <= now:
            over.append(heapq.heappop(self._waits))
        return over

    def all(self) -> list[PostponedRows]:
        """Remove and return all waits, in the order of their ends."""
        return self.due(float("inf"))
