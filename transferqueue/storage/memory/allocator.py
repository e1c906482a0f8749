"""Which bytes of an arena are free: a pure page allocator, no memory touched.

The law:

1. Every extent begins and ends on a page. Free ranges never overlap; two neighbours of the same
   temperature are one range (coalescing is immediate, so fragmentation is only what is really lent).
2. A free range is *warm* if it was lent before and its pages are still there, *cold* if it was never
   lent or was given back to the system (`chill`). Warm first: writing into fresh pages costs about ten
   times a copy into pages that exist.
3. Within a temperature the smallest range that suffices is taken (best fit); among equals the most
   recently freed one, whose page-table entries and cache lines are likeliest to be alive.
4. Only if no single range suffices are neighbours of both temperatures joined.
5. What is freed must be exactly what was lent: anything else is a defect, refused before it can make
   two writers share a page.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from transferqueue.errors import Corruption, InternalError, UsageError
from transferqueue.limits import PAGE_BYTES
from transferqueue.schema import align


class _Ranges:
    """Free ranges of one temperature, found by start, by end and by size."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.stamps: dict[int, int] = {}
        self.order: list[tuple[int, int, int]] = []
        self.total = 0

    def add(self, start: int, size: int, stamp: int) -> None:
        """Insert a range, joined with the neighbours it touches."""
        before = self.starts.get(start)
        if before is not None:
            size += self.sizes[before]
            stamp = max(stamp, self.remove(before))
            start = before
        if start + size in self.sizes:
            after, more = start + size, self.sizes[start + size]
            stamp = max(stamp, self.remove(after))
            size += more
        self.sizes[start], self.starts[start + size], self.stamps[start] = size, start, stamp
        insort(self.order, (size, -stamp, start))
        self.total += size

    def remove(self, start: int) -> int:
        """Take a whole range out; returns its stamp."""
        size, stamp = self.sizes.pop(start), self.stamps.pop(start)
        del self.starts[start + size]
        del self.order[bisect_left(self.order, (size, -stamp, start))]
        self.total -= size
        return stamp

    def cut(self, start: int, at: int, size: int) -> None:
        """Take ``[at, at + size)`` out of the range that begins at `start`."""
        end = start + self.sizes[start]
        stamp = self.remove(start)
        if at > start:
            self.add(start, at - start, stamp)
        if at + size < end:
            self.add(at + size, end - at - size, stamp)

    def fit(self, size: int) -> int | None:
        """Start of the smallest range of at least `size` bytes, the latest freed among equals."""
        at = bisect_left(self.order, (size,))
        return self.order[at][2] if at < len(self.order) else None

    def holding(self, start: int) -> int | None:
        """Start of the range that has byte `start`, if one has."""
        if start in self.sizes:
            return start
        return next((at for at, size in self.sizes.items() if at <= start < at + size), None)


class Allocator:
    """Extents of an arena of `capacity` bytes. Not thread-safe: one loop owns it.

    Sizes are rounded up to whole pages; offsets are page-aligned.

    >>> allocator = Allocator(1 << 20)
    >>> first = allocator.allocate(5000)
    >>> allocator.used, allocator.free(first, 5000), allocator.used
    (8192, None, 0)
    """

    def __init__(self, capacity: int) -> None:
        if capacity < PAGE_BYTES:
            raise UsageError(f"an arena of {capacity} bytes is smaller than one page of {PAGE_BYTES}; give it more")
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self._warm, self._cold = _Ranges(), _Ranges()
        self._lent: dict[int, int] = {}
        self._clock = 0
        self._cold.add(0, self.capacity, 0)

    @classmethod
    def holding(cls, capacity: int, lent: Iterable[tuple[int, int]]) -> Allocator:
        """An allocator that has lent these extents ``(offset, nbytes)`` already; all else is cold.

        `Corruption` if they overlap, or are not extents of an arena of `capacity` bytes.
        """
        made = cls(capacity)
        made._cold = _Ranges()
        end = 0
        for offset, nbytes in sorted(lent):
            if offset < end or offset % PAGE_BYTES or nbytes < 1 or offset + nbytes > made.capacity:
                raise Corruption(
                    f"extent at {offset} of {nbytes} bytes is none of an arena of {made.capacity}: extents begin on a page "
                    f"and do not overlap, and one ends at {end}; restore a snapshot"
                )
            if offset > end:
                made._cold.add(end, offset - end, 0)
            end = offset + align(nbytes, PAGE_BYTES)
            made._lent[offset] = end - offset
        if end < made.capacity:
            made._cold.add(end, made.capacity - end, 0)
        return made

    def free_ranges(self) -> list[tuple[int, int]]:
        """Every maximal free range ``(offset, nbytes)``, ascending."""
        return list(self._joined())

    @property
    def used(self) -> int:
        """Bytes lent, in whole pages."""
        return self.capacity - self._warm.total - self._cold.total

    @property
    def warm(self) -> int:
        """Free bytes whose pages are still there."""
        return self._warm.total

    @property
    def largest(self) -> int:
        """Bytes of the largest extent that could be lent now."""
        return max((size for _, size in self._joined()), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free extent of `nbytes`, rounded up to pages; None if nothing is large enough."""
        if nbytes < 1:
            raise UsageError(f"an extent of {nbytes} bytes is not one; ask for at least 1")
        size = align(nbytes, PAGE_BYTES)
        if size > self.capacity - self.used:
            return None
        for ranges in (self._warm, self._cold):
            if (start := self._take(ranges, size)) is not None:
                return start
        return self._straddle(size)

    def allocate_warm(self, nbytes: int) -> int | None:
        """Offset of a free extent whose pages are all there; None if none is large enough."""
        return self._take(self._warm, align(nbytes, PAGE_BYTES))

    def allocate_cold(self, nbytes: int) -> int | None:
        """Offset of a free extent without pages; None if none is large enough."""
        return self._take(self._cold, align(nbytes, PAGE_BYTES))

    def _take(self, ranges: _Ranges, size: int) -> int | None:
        start = ranges.fit(size)
        if start is not None:
            ranges.cut(start, start, size)
            self._lent[start] = size
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Take back an extent as it was lent. Anything else raises `InternalError` and changes nothing."""
        size = self._lent.get(offset)
        if size is None:
            raise InternalError(f"extent at {offset} of {nbytes} bytes is not lent: freed twice, or never lent")
        if size != align(nbytes, PAGE_BYTES):
            raise InternalError(f"extent at {offset} was lent with {size} bytes, but {nbytes} are freed; free it whole")
        del self._lent[offset]
        self._clock += 1
        self._warm.add(offset, size, self._clock)

    def coldest(self) -> Iterator[tuple[int, int]]:
        """Warm free ranges ``(offset, nbytes)``, the longest unused first. A copy: `chill` may be called meanwhile."""
        for _, start in sorted((stamp, start) for start, stamp in self._warm.stamps.items()):
            yield start, self._warm.sizes[start]

    def chill(self, offset: int, nbytes: int) -> None:
        """The pages of this part of a warm free range were given back to the system."""
        start = self._warm.holding(offset)
        if start is None or start + self._warm.sizes[start] < offset + nbytes:
            raise InternalError(
                f"range at {offset} of {nbytes} bytes is not warm and free; only such ranges are chilled"
            )
        self._warm.cut(start, offset, nbytes)
        self._cold.add(offset, nbytes, 0)

    def _joined(self) -> Iterator[tuple[int, int]]:
        """Maximal free runs of either temperature, ascending."""
        start = end = 0
        for at, size in sorted([*self._warm.sizes.items(), *self._cold.sizes.items()]):
            if at != end:
                if end > start:
                    yield start, end - start
                start = at
            end = at + size
        if end > start:
            yield start, end - start

    def _straddle(self, size: int) -> int | None:
        fitting = [(have, start) for start, have in self._joined() if have >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        self._take_joined(start, start + size)
        self._lent[start] = size
        return start

    def _take_joined(self, start: int, end: int) -> None:
        while start < end:
            ranges = self._warm if start in self._warm.sizes else self._cold
            size = min(ranges.sizes[start], end - start)
            ranges.cut(start, start, size)
            start += size
