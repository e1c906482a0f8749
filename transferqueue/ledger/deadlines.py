"""Everything that will happen by itself: one heap of deadlines for all leases and groups.

A subject that ends or moves its deadline just changes `subject.deadline`; its old entries become void
and are skipped when they surface. So renewing a lease costs one push, and ending one costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol


class Expiring(Protocol):
    """Whatever has a deadline (None: none any more)."""

    deadline: float | None


class Deadlines:
    """A heap of (time, subject) with void entries skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expiring]] = []
        self._pushed = 0

    def add(self, subject: Expiring, at: float) -> None:
        """Set the deadline of `subject`; an earlier one becomes void."""
        subject.deadline = at
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, subject))

    def next(self) -> float | None:
        """The earliest deadline that still holds."""
        heap = self._heap
        while heap and heap[0][2].deadline != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Expiring]:
        """Subjects whose deadline has passed, earliest first; each is cleared as it is given out."""
        while (at := self.next()) is not None and at <= now:
            subject = heapq.heappop(self._heap)[2]
            subject.deadline = None
            yield subject
