"""Rows of one task that wait after a failed lease, by the time at which they are ready again.

An entry stands for the rows of one release that wait equally long. A row that leaves its wait early (it is dropped, or
requeued) stays in its entry, which is no harm: its `hold` is another stamp from then on, and no stamp is used twice.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from transferqueue.ledger.arrays import IntArray


class PostponedRows(NamedTuple):
    """Rows that wait until `until`. `stamp`: the `hold` of those that still do."""

    until: float
    stamp: int
    rows: IntArray


@dataclass(slots=True, eq=False)
class RetryQueue:
    """The waits of one task; a subject of `Deadlines`."""

    table: str
    task: str
    deadline: float | None = None
    _waits: list[PostponedRows] = field(default_factory=list)
    _parked: list[PostponedRows] = field(default_factory=list)

    def add(self, until: float | None, stamp: int, rows: IntArray) -> None:
        """Add rows. With `until` None they are parked (see `circuit`). The caller then sets the deadline to `next`."""
        if until is None:
            self._parked.append(PostponedRows(0.0, stamp, rows))
        else:
            heapq.heappush(self._waits, PostponedRows(until, stamp, rows))

    @property
    def next(self) -> float | None:
        """When the first wait ends; None if no row waits for a time."""
        return self._waits[0].until if self._waits else None

    @property
    def has_parked(self) -> bool:
        """Whether rows are parked."""
        return bool(self._parked)

    def due(self, now: float) -> list[PostponedRows]:
        """Remove and return the waits that are over, in the order of their ends."""
        over = []
        while self._waits and self._waits[0].until <= now:
            over.append(heapq.heappop(self._waits))
        return over

    def parked(self) -> list[PostponedRows]:
        """Remove and return the rows that are parked."""
        parked, self._parked = self._parked, []
        return parked
