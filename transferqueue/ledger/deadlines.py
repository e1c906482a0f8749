"""All deadlines of a ledger in one heap: of leases, groups and update slots.

To end or move a deadline, set `subject.deadline`. Old heap entries become void, and are skipped when they reach the
top. So renewing a lease costs one push, and ending one costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol


class Expiring(Protocol):
    """An object with a deadline (None: no deadline)."""

    deadline: float | None


class Deadlines:
    """A heap of (time, subject) that skips void entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expiring]] = []
        self._pushed = 0

    def add(self, subject: Expiring, at: float) -> None:
        """Set the deadline of `subject`. An earlier one becomes void."""
        subject.deadline = at
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, subject))

    def next(self) -> float | None:
        """The earliest valid deadline."""
        heap = self._heap
        while heap and heap[0][2].deadline != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Expiring]:
        """Yield subjects whose deadline has passed, earliest first, and clear their deadlines."""
        while (at := self.next()) is not None and at <= now:
            subject = heapq.heappop(self._heap)[2]
            subject.deadline = None
            yield subject
