"""The ready units of one task in selector order, at a cost that does not depend on how many there are.

A unit is a row or a group. Every entry has its sort key (key, order), a stamp, and the unit. Invariants:

- An entry is *alive* while its unit is ready under the same stamp. If a unit is leased, dropped or ranked again, its
  entry is not searched for: it is dead from then on, and skipped when it reaches the front.
- Entries lie in sorted *runs*. A push that sorts after (or before) a whole run extends that run. Otherwise it becomes a
  new run, and runs are merged so that each is at least four times as long as the next. So a row is moved O(log n) times
  in its life, always by a vectorised merge, and there are O(log n) runs.
- Under Fifo, rows that become ready together, with consecutive ids, are one *range* of three integers in the run of
  *arrivals*. Their orders are new, so they sort after all other entries. A queue to which no row returns has only this
  run, and needs no array and no merge.
- With several runs, their first entries are merged into a *front*, enough for a few leases. `first(k)` then reads one
  run and skips dead entries. Pushed entries that sort into the front are merged with it. So a lease costs O(k), and its
  share of building the front O(k log n). `taken` removes entries that were leased.

This is a log-structured merge tree (O'Neil et al. 1996) in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np

from transferqueue.ledger.arrays import NO_ROWS, BoolArray, IntArray

KEY, ORDER, STAMP, UNIT = 0, 1, 2, 3
"""Rows of an entries array ``[4, n]``, int64."""
CHUNK = 4096
TAIL_MIN = 64
"""Entries for which a short run gets room. Room for `CHUNK` (128 KiB) is slow to get from the system and to return."""
SLACK = 1024
"""Dead entries that are not worth a compaction."""
TIER = 4
CUT = 8
"""The front is built for this many leases at once, so that they share its cost."""
FRONT_MAX = 8192
"""A front that grows beyond this becomes a run."""
PREPEND_MIN = 64
"""Shorter pushes are merged instead: a run of tiny chunks is slow to read."""

Entries = IntArray
Alive = Callable[[IntArray, IntArray], BoolArray | None]
"""(units, stamps) -> which entries are alive; None: all are."""

_NONE: Entries = np.empty((4, 0), np.int64)


def in_order(entries: Entries) -> Entries:
    """Return the entries sorted by (key, order)."""
    keys = entries[KEY]
    if (keys[1:] > keys[:-1]).all():  # as the rows of a put under `PutOrder`: a sort of 200,000 takes milliseconds
        return entries
    by_key = entries.take(
        np.argsort(keys, kind="stable"), axis=1
    )  # of sorted runs, one after another, it is a merge: a tenth of the time
    keys, orders = by_key[KEY], by_key[ORDER]
    if not ((keys[1:] == keys[:-1]) & (orders[1:] < orders[:-1])).any():
        return by_key
    return entries.take(np.lexsort((entries[ORDER], entries[KEY])), axis=1)


def _before(left: Entries, right: Entries) -> bool:
    """Whether all of `left` sorts before all of `right`; both are sorted and not empty."""
    end, start = left.item(KEY, -1), right.item(KEY, 0)
    return bool(end < start or (end == start and left.item(ORDER, -1) < right.item(ORDER, 0)))


class SortedRun:
    """Sorted entries in chunks, read from the front, extended at both ends."""

    __slots__ = ("chunks", "head", "size", "tail", "tail_used")

    def __init__(self, entries: Entries) -> None:
        self.chunks: deque[Entries] = deque([entries])
        self.head = 0
        """Entries of the first chunk that were removed."""
        self.size = entries.shape[1]
        self.tail: Entries | None = None
        self.tail_used = 0

    def extend(self, entries: Entries) -> bool:
        """Add `entries` if they sort after or before the whole run; False if they do not."""
        if _before(self.chunks[-1], entries):
            self._append(entries)
        elif entries.shape[1] >= PREPEND_MIN and _before(entries, self.chunks[0][:, self.head :]):
            self._prepend(entries)
        else:
            return False
        self.size += entries.shape[1]
        return True

    def _append(self, entries: Entries) -> None:
        count = entries.shape[1]
        if self.tail is None or self.tail_used + count > self.tail.shape[1]:
            if count > CHUNK // 4:
                self.tail = None
                self.chunks.append(entries)
                return
            room = min(CHUNK, max(TAIL_MIN, TIER * (self.size + count)))
            self.tail, self.tail_used = np.empty((4, room), np.int64), 0
            self.chunks.append(self.tail[:, :0])
        self.tail[:, self.tail_used : self.tail_used + count] = entries
        start = self.tail_used - self.chunks[-1].shape[1]
        self.tail_used += count
        self.chunks[-1] = self.tail[:, start : self.tail_used]

    def _prepend(self, entries: Entries) -> None:
        self.chunks[0] = self.chunks[0][:, self.head :]
        self.head = 0
        self.chunks.appendleft(entries)

    def peek(self, count: int) -> Entries:
        """The first `count` entries, dead or alive; fewer if the run is shorter."""
        first = self.chunks[0][:, self.head : self.head + count]
        if first.shape[1] == count or len(self.chunks) == 1:
            return first
        heads, read = [first], first.shape[1]
        for chunk in islice(self.chunks, 1, None):
            heads.append(chunk[:, : count - read])
            read += heads[-1].shape[1]
            if read == count:
                break
        return np.concatenate(heads, axis=1)

    def skip(self, count: int) -> None:
        """Remove the first `count` entries."""
        self.head += count
        self.size -= count
        while self.chunks and self.head >= self.chunks[0].shape[1]:
            self.head -= self.chunks.popleft().shape[1]
        if not self.chunks:
            self.tail = None

    def units(self, count: int) -> tuple[IntArray, IntArray]:
        """Units and stamps of the first `count` entries, as views."""
        entries = self.peek(count)
        return entries[UNIT], entries[STAMP]

    def entries(self) -> Entries:
        """All entries, dead ones too."""
        return self.peek(self.size)


class Arrivals:
    """A sorted run of rows in the order in which they became ready, with key 0. In a range, row and stamp both ascend
    by one from entry to entry, and the order is the stamp.

    It saves memory, not time: with sorted runs alone, puts of 8 rows took 320 to 337 bytes a row of the server instead
    of 238 to 265 (two tasks), and GRPO groups over ipc 1.01 of the time.
    """

    __slots__ = ("ranges", "size")

    def __init__(self) -> None:
        self.ranges: deque[list[int]] = deque()
        """First row, first stamp and length of each range."""
        self.size = 0

    def append(self, row: int, stamp: int, count: int) -> None:
        """Add a range. Its stamps are higher than all before."""
        self.size += count
        last = self.ranges[-1] if self.ranges else None
        if last is not None and last[0] + last[2] == row and last[1] + last[2] == stamp:
            last[2] += count
        else:
            self.ranges.append([row, stamp, count])

    def units(self, count: int) -> tuple[IntArray, IntArray]:
        """Units and stamps of the first `count` entries, as arrays of their own."""
        row, stamp, length = self.ranges[0]
        if length >= count or length == self.size:
            count = min(count, length)
            return np.arange(row, row + count), np.arange(stamp, stamp + count)
        rows, stamps = [], []
        for row, stamp, length in self.ranges:
            taken = min(count, length)
            rows.append(np.arange(row, row + taken))
            stamps.append(np.arange(stamp, stamp + taken))
            count -= taken
            if not count:
                break
        return np.concatenate(rows), np.concatenate(stamps)

    def peek(self, count: int) -> Entries:
        """The first `count` entries, dead or alive; fewer if the run is shorter."""
        units, stamps = self.units(count)
        entries = np.zeros((4, units.size), np.int64)
        entries[ORDER] = entries[STAMP] = stamps
        entries[UNIT] = units
        return entries

    def skip(self, count: int) -> None:
        """Remove the first `count` entries."""
        self.size -= count
        while count:
            first = self.ranges[0]
            if first[2] > count:
                first[0] += count
                first[1] += count
                first[2] -= count
                return
            count -= first[2]
            self.ranges.popleft()

    def entries(self) -> Entries:
        """All entries, dead ones too."""
        return self.peek(self.size)


Run = SortedRun | Arrivals


class ReadyQueue:
    """The ready units of one task (or of one `where` of it)."""

    def __init__(self, alive: Alive) -> None:
        self._alive = alive
        self._arrivals = Arrivals()
        self._runs: list[SortedRun] = []
        self._front: SortedRun | None = None
        """Entries that sort before all others."""
        self._looked: tuple[Run, IntArray | None] | None = None
        """The last result of `first`: its run, and the positions of its entries there (None: all from the start)."""

    # ------------------------------------------------------------ in

    def push_range(self, row: int, stamp: int, count: int, alive_at_most: int) -> None:
        """Add `count` rows from `row` on with key 0, whose orders are their stamps, from `stamp` on: higher than all
        orders so far. `alive_at_most` is as in `push`.
        """
        arrivals = self._arrivals
        arrivals.append(row, stamp, count)
        if (self.size if self._runs or self._front else arrivals.size) > 2 * alive_at_most + SLACK:
            self._compact()

    def restore_arrivals(self, rows: IntArray, stamps: IntArray) -> None:
        """Add rows with key 0 to an empty queue, whose orders are these stamps."""
        by_stamp = np.argsort(stamps)
        rows, stamps = rows[by_stamp], stamps[by_stamp]
        apart = (np.diff(rows) != 1) | (np.diff(stamps) != 1)
        starts = np.flatnonzero(np.concatenate([[rows.size > 0], apart]))
        lengths = np.diff(starts, append=rows.size)
        for first, stamp, count in zip(rows[starts].tolist(), stamps[starts].tolist(), lengths.tolist(), strict=True):
            self._arrivals.append(first, stamp, count)

    def push(self, entries: Entries, alive_at_most: int) -> None:
        """Add sorted entries. `alive_at_most`: upper bound of the alive entries, for compaction."""
        if self._front is not None and entries.shape[1]:
            entries = self._join_front(self._front, entries)
        if not entries.shape[1]:
            return
        for run in self._runs:
            if run.extend(entries):
                break
        else:
            self._add(SortedRun(entries))
        if self.size > 2 * alive_at_most + SLACK:
            self._compact()

    def _join_front(self, front: SortedRun, entries: Entries) -> Entries:
        """Merge entries that sort into the front. Returns the others."""
        end, last = front.chunks[-1][KEY, -1], front.chunks[-1][ORDER, -1]
        count = int(((entries[KEY] < end) | ((entries[KEY] == end) & (entries[ORDER] < last))).sum())
        if count:
            self._front = SortedRun(in_order(np.concatenate([front.entries(), entries[:, :count]], axis=1)))
        if self._front is not None and self._front.size > FRONT_MAX:
            front, self._front = self._front, None
            self._add(front)
        return entries[:, count:]

    def _add(self, run: SortedRun) -> None:
        """Add a run, and merge runs of similar size."""
        self._runs.append(run)
        self._runs.sort(key=lambda run: run.size, reverse=True)
        while len(self._runs) > 1 and self._runs[-2].size < TIER * self._runs[-1].size:
            small = self._runs.pop().entries()
            merged = np.concatenate([self._runs.pop().entries(), small], axis=1)
            self._runs.append(SortedRun(in_order(merged)))

    def _compact(self) -> None:
        entries = self.all()
        self._front, self._arrivals = None, Arrivals()
        self._runs = [SortedRun(entries)] if entries.shape[1] else []

    # ------------------------------------------------------------ out

    def first(self, count: int) -> IntArray:
        """The units of the first `count` alive entries in order; fewer if there are fewer. Perhaps a view of the
        queue."""
        look = count
        while (run := self._leading(look)) is not None:
            units, stamps = run.units(look)
            alive = self._alive(units, stamps)
            if alive is None or alive.all():
                self._looked = run, None
                return units if units.size <= count else units[:count]
            places = np.flatnonzero(alive)[:count]
            if not places.size:
                self._skip(run, units.size)
                look *= 2  # thousands may be dead, after a drop
            elif places.size == count or units.size < look:
                self._looked = run, places
                return units[places]
            else:
                look *= 2
        return NO_ROWS

    def taken(self, count: int) -> None:
        """Remove the first `count` entries of the last result of `first`."""
        if count and self._looked is not None:
            run, places = self._looked
            self._looked = None
            self._skip(run, count if places is None else int(places[count - 1]) + 1)

    def all(self) -> Entries:
        """Every alive entry, in order."""
        if not self.size:
            return _NONE
        entries = np.concatenate([run.entries() for run in self._all_runs()], axis=1)
        alive = self._alive(entries[UNIT], entries[STAMP])
        return in_order(entries if alive is None else entries.take(np.flatnonzero(alive), axis=1))

    @property
    def size(self) -> int:
        """Number of entries, dead ones too."""
        total = self._arrivals.size if self._front is None else self._arrivals.size + self._front.size
        for run in self._runs:
            total += run.size
        return total

    def _all_runs(self) -> list[Run]:
        return [run for run in (self._front, self._arrivals, *self._runs) if run is not None and run.size]

    def _leading(self, look: int) -> Run | None:
        """A run that begins with the first `look` entries of the queue; if it is shorter, the queue has no more."""
        front, arrivals = self._front, self._arrivals
        if front is not None and (front.size >= look or not (self._runs or arrivals.size)):
            return front
        if front is None and not self._runs:
            return arrivals if arrivals.size else None
        if front is None and len(self._runs) == 1 and not arrivals.size:
            return self._runs[0]
        return self._cut(CUT * look)

    def _cut(self, count: int) -> SortedRun:
        """Move the first `count` entries of all runs into a new front."""
        runs = self._all_runs()
        heads = [run.peek(count) for run in runs]
        entries = np.concatenate(heads, axis=1)
        order = np.lexsort((entries[ORDER], entries[KEY]))[:count]
        sources = np.repeat(np.arange(len(heads)), [head.shape[1] for head in heads])
        for run, mine in zip(runs, np.bincount(sources[order], minlength=len(runs)).tolist(), strict=True):
            run.skip(mine)
        self._runs = [run for run in self._runs if run.size]
        self._front = SortedRun(entries[:, order])
        return self._front

    def _skip(self, run: Run, count: int) -> None:
        run.skip(count)
        if run.size or run is self._arrivals:
            return
        if run is self._front:
            self._front = None
        else:
            self._runs = [other for other in self._runs if other is not run]
