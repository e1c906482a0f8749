"""A set of integers as disjoint half-open intervals, ascending, merged where they touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Intervals:
    """A set of half-open intervals of integers.

    >>> backed = Intervals()
    >>> backed.add(0, 8), backed.add(16, 20), backed.gaps(4, 18), backed.total
    (None, None, [(8, 16)], 12)
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0

    def add(self, start: int, end: int) -> None:
        """Cover ``[start, end)``."""
        if start >= end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._replace(first, last, [(start, end)])

    def remove(self, start: int, end: int) -> None:
        """Uncover ``[start, end)``."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if start >= end or first >= last:
            return
        rest = [(self._starts[first], start), (end, self._ends[last - 1])]
        self._replace(first, last, [(low, high) for low, high in rest if low < high])

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``[start, end)`` that are not covered, ascending."""
        uncovered = []
        for at in range(bisect_right(self._ends, start), bisect_left(self._starts, end)):
            if start < self._starts[at]:
                uncovered.append((start, self._starts[at]))
            start = self._ends[at]
        return [*uncovered, (start, end)] if start < end else uncovered

    def runs(self, start: int | None = None, end: int | None = None) -> list[tuple[int, int]]:
        """The covered parts of ``[start, end)``, ascending; without bounds: all."""
        runs = list(zip(self._starts, self._ends, strict=True))
        low, high = (
            runs[0][0] if runs and start is None else start or 0,
            runs[-1][1] if runs and end is None else end or 0,
        )
        return [(max(first, low), min(other, high)) for first, other in runs if first < high and other > low]

    def _replace(self, first: int, last: int, new: list[tuple[int, int]]) -> None:
        old = zip(self._starts[first:last], self._ends[first:last], strict=True)
        self.total += sum(end - start for start, end in new) - sum(end - start for start, end in old)
        self._starts[first:last] = [start for start, _ in new]
        self._ends[first:last] = [end for _, end in new]
