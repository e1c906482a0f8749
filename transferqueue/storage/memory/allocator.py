"""Allocates the extents of an arena. It only keeps books: it touches no memory.

1. Every extent begins and ends on a page. Free ranges never overlap. Two free neighbours of the same temperature are
   merged at once.
2. A free range is *warm* if it was allocated before and still has its pages. It is *cold* if it was never allocated, or
   if its pages were returned to the system (`chill`). Warm ranges are used first: a write into fresh pages costs about
   ten times a copy into existing pages.
3. Within a temperature, the smallest range that suffices is used (best fit). Among equals it is the one freed last,
   whose page-table entries and cache lines are most likely alive.
4. A range that spans both temperatures is used only if no other range suffices.
5. An extent must be freed exactly as it was allocated. Anything else is refused as a defect: otherwise two writers
   could share a page.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from transferqueue.errors import Corruption, InternalError, UsageError
from transferqueue.limits import PAGE_BYTES
from transferqueue.schema import align


class _Ranges:
    """The free ranges of one temperature, by start, by end and by size. A range's stamp tells when it was freed."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.stamps: dict[int, int] = {}
        self.order: list[tuple[int, int, int]] = []
        self.total = 0

    def add(self, start: int, size: int, stamp: int) -> None:
        """Insert a range, merged with the neighbours that it touches."""
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
        """Remove a whole range, and return its stamp."""
        size, stamp = self.sizes.pop(start), self.stamps.pop(start)
        del self.starts[start + size]
        del self.order[bisect_left(self.order, (size, -stamp, start))]
        self.total -= size
        return stamp

    def cut(self, start: int, at: int, size: int) -> None:
        """Remove ``[at, at + size)`` from the range that begins at `start`."""
        end = start + self.sizes[start]
        stamp = self.remove(start)
        if at > start:
            self.add(start, at - start, stamp)
        if at + size < end:
            self.add(at + size, end - at - size, stamp)

    def fit(self, size: int) -> int | None:
        """The start of the smallest range of at least `size` bytes; among equals, the one freed last."""
        at = bisect_left(self.order, (size,))
        return self.order[at][2] if at < len(self.order) else None

    def holding(self, start: int) -> int | None:
        """The start of the range that contains byte `start`; None if no range does."""
        if start in self.sizes:
            return start
        return next((at for at, size in self.sizes.items() if at <= start < at + size), None)


class Allocator:
    """Allocates extents of an arena of `capacity` bytes. Not thread-safe: the server's loop owns it.

    Sizes and offsets are in bytes. Sizes are rounded up to whole pages; offsets are page-aligned.

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
        self._allocated: dict[int, int] = {}
        self._clock = 0
        self._cold.add(0, self.capacity, 0)

    @classmethod
    def holding(cls, capacity: int, extents: Iterable[tuple[int, int]]) -> Allocator:
        """An allocator that has these extents ``(offset, nbytes)`` allocated. All other bytes are cold.

        `Corruption` if they overlap, or are not extents of an arena of `capacity` bytes.
        """
        allocator = cls(capacity)
        allocator._cold = _Ranges()
        end = 0
        for offset, nbytes in sorted(extents):
            if offset < end or offset % PAGE_BYTES or nbytes < 1 or offset + nbytes > allocator.capacity:
                raise Corruption(
                    f"extent at {offset} of {nbytes} bytes is invalid in an arena of {allocator.capacity}: extents "
                    f"begin on a page and do not overlap, and one ends at {end}; restore a snapshot"
                )
            if offset > end:
                allocator._cold.add(end, offset - end, 0)
            end = offset + align(nbytes, PAGE_BYTES)
            allocator._allocated[offset] = end - offset
        if end < allocator.capacity:
            allocator._cold.add(end, allocator.capacity - end, 0)
        return allocator

    def free_ranges(self) -> list[tuple[int, int]]:
        """Every maximal free range ``(offset, nbytes)``, ascending."""
        return list(self._free_runs())

    @property
    def used(self) -> int:
        """Allocated bytes, in whole pages."""
        return self.capacity - self._warm.total - self._cold.total

    @property
    def warm(self) -> int:
        """Free bytes that still have pages."""
        return self._warm.total

    @property
    def largest(self) -> int:
        """Bytes of the largest extent that could be allocated now."""
        return max((size for _, size in self._free_runs()), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Allocate an extent of `nbytes`, rounded up to pages, and return its offset; None if no free range is large
        enough."""
        if nbytes < 1:
            raise UsageError(f"an extent of {nbytes} bytes is invalid; ask for at least 1")
        size = align(nbytes, PAGE_BYTES)
        if size > self.capacity - self.used:
            return None
        for ranges in (self._warm, self._cold):
            if (start := self._take(ranges, size)) is not None:
                return start
        return self._straddle(size)

    def allocate_warm(self, nbytes: int) -> int | None:
        """As `allocate`, only of warm ranges."""
        return self._take(self._warm, align(nbytes, PAGE_BYTES))

    def allocate_cold(self, nbytes: int) -> int | None:
        """As `allocate`, only of cold ranges."""
        return self._take(self._cold, align(nbytes, PAGE_BYTES))

    def _take(self, ranges: _Ranges, size: int) -> int | None:
        start = ranges.fit(size)
        if start is not None:
            ranges.cut(start, start, size)
            self._allocated[start] = size
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Free an extent with the offset and size of its allocation. Anything else raises `InternalError` and changes
        nothing."""
        size = self._allocated.get(offset)
        if size is None:
            raise InternalError(f"extent at {offset} of {nbytes} bytes is not lent: freed twice, or never lent")
        if size != align(nbytes, PAGE_BYTES):
            raise InternalError(f"extent at {offset} was lent with {size} bytes, but {nbytes} are freed; free it whole")
        del self._allocated[offset]
        self._clock += 1
        self._warm.add(offset, size, self._clock)

    @property
    def largest_warm(self) -> tuple[int, int]:
        """The longest warm free range ``(offset, nbytes)``; of 0 bytes if there is none."""
        if not self._warm.order:
            return 0, 0
        size, _, start = self._warm.order[-1]
        return start, size

    def coldest(self) -> Iterator[tuple[int, int]]:
        """The warm free ranges ``(offset, nbytes)``, the longest unused first. `chill` may be called between two of
        them."""
        for _, start in sorted((stamp, start) for start, stamp in self._warm.stamps.items()):
            yield start, self._warm.sizes[start]

    def chill(self, offset: int, nbytes: int) -> None:
        """Record that the pages of this part of a warm free range were returned to the system."""
        start = self._warm.holding(offset)
        if start is None or start + self._warm.sizes[start] < offset + nbytes:
            raise InternalError(
                f"range at {offset} of {nbytes} bytes is not warm and free; only such ranges are chilled"
            )
        self._warm.cut(start, offset, nbytes)
        self._cold.add(offset, nbytes, 0)

    def _free_runs(self) -> Iterator[tuple[int, int]]:
        """The maximal free ranges across both temperatures, ascending."""
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
        fitting = [(have, start) for start, have in self._free_runs() if have >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        self._take_across(start, start + size)
        self._allocated[start] = size
        return start

    def _take_across(self, start: int, end: int) -> None:
        while start < end:
            ranges = self._warm if start in self._warm.sizes else self._cold
            size = min(ranges.sizes[start], end - start)
            ranges.cut(start, start, size)
            start += size
