"""Ready units of one task, in selector order, at a cost that does not depend on how many there are.

A unit is a row, or a group. Every entry carries its whole sort key (key, order), a stamp, and the unit.
The rules:

- An entry is *alive* while its unit is ready under the same stamp. A unit that is leased, dropped or ranked
  anew is not searched for and removed: its entry is dead from then on, and skipped when it surfaces.
- Entries lie in sorted *runs*. A push that sorts after (or before) a whole run extends it; else it becomes
  a run, and runs are merged so that each is at least four times the next. So a row is moved O(log n) times
  in its life, always by a vectorised merge, and there are O(log n) runs. Fifo needs one run and no merge.
- `first(k)` takes the first k alive entries of each run and merges those: O(k log n).

This is a log-structured merge tree (O'Neil et al. 1996) in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from transferqueue.ledger.arrays import BoolArray, IntArray

KEY, ORDER, STAMP, UNIT = 0, 1, 2, 3
"""Rows of an entries array ``[4, n]``, int64."""
CHUNK = 4096
SLACK = 8192
"""Dead entries that are not worth a compaction."""
WINDOW = 64
TIER = 4
PREPEND_MIN = 64
"""Shorter pushes are merged instead: a run of tiny chunks is slow to read."""

Entries = IntArray
Alive = Callable[[IntArray, IntArray], BoolArray]
"""(units, stamps) -> which entries are alive."""

_NONE: Entries = np.empty((4, 0), np.int64)


def in_order(entries: Entries) -> Entries:
    """Entries sorted by (key, order)."""
    return entries[:, np.lexsort((entries[ORDER], entries[KEY]))]


def _before(left: Entries, right: Entries) -> bool:
    """Whether all of `left` sorts before all of `right`; both are sorted and not empty."""
    end, start = left[KEY, -1], right[KEY, 0]
    return bool(end < start or (end == start and left[ORDER, -1] < right[ORDER, 0]))


class Run:
    """Entries in order, in chunks; read from the front, extended at both ends."""

    __slots__ = ("chunks", "head", "size", "tail", "tail_used")

    def __init__(self, entries: Entries) -> None:
        self.chunks: deque[Entries] = deque([entries])
        self.head = 0
        """Entries of the first chunk that are known to be dead."""
        self.size = entries.shape[1]
        self.tail: Entries | None = None
        self.tail_used = 0

    def extend(self, entries: Entries) -> bool:
        """Take `entries` if they sort after or before all that is here."""
        if not self.chunks or _before(self.chunks[-1], entries):
            self._append(entries)
        elif entries.shape[1] >= PREPEND_MIN and _before(entries, self.chunks[0][:, self.head :]):
            self._prepend(entries)
        else:
            return False
        self.size += entries.shape[1]
        return True

    def _append(self, entries: Entries) -> None:
        count = entries.shape[1]
        if self.tail is None or self.tail_used + count > CHUNK:
            if count > CHUNK // 4:
                self.tail = None
                self.chunks.append(entries)
                return
            self.tail, self.tail_used = np.empty((4, CHUNK), np.int64), 0
            self.chunks.append(self.tail[:, :0])
        self.tail[:, self.tail_used : self.tail_used + count] = entries
        start = self.tail_used - self.chunks[-1].shape[1]
        self.tail_used += count
        self.chunks[-1] = self.tail[:, start : self.tail_used]

    def _prepend(self, entries: Entries) -> None:
        self.chunks[0] = self.chunks[0][:, self.head :]
        self.head = 0
        self.chunks.appendleft(entries)

    def first(self, count: int, alive: Alive) -> Entries:
        """The first `count` alive entries, fewer if there are fewer. Forgets dead ones at the front."""
        found: list[Entries] = []
        have, chunk, at = 0, 0, self.head
        while chunk < len(self.chunks) and have < count:
            entries = self.chunks[chunk]
            window = entries[:, at : at + max(count - have, WINDOW)]
            good = alive(window[UNIT], window[STAMP])
            at += window.shape[1]
            if not have:
                self._skip(window.shape[1], good)
            if good.any():
                found.append(window if good.all() else window[:, good])
                have += found[-1].shape[1]
            if at < entries.shape[1]:
                continue
            at = 0
            if have:
                chunk += 1
            else:
                self._drop_first_chunk()
        return np.concatenate(found, axis=1)[:, :count] if found else _NONE

    def _skip(self, width: int, good: BoolArray) -> None:
        dead = int(good.argmax()) if good.any() else width
        self.head += dead
        self.size -= dead

    def _drop_first_chunk(self) -> None:
        self.chunks.popleft()
        self.head = 0
        if not self.chunks:
            self.tail = None

    def entries(self) -> Entries:
        """All entries, dead ones too."""
        if not self.chunks:
            return _NONE
        first, *others = self.chunks
        return np.concatenate([first[:, self.head :], *others], axis=1)


class Ready:
    """The ready units of one task (or of one `where` of it)."""

    def __init__(self, alive: Alive) -> None:
        self._alive = alive
        self._runs: list[Run] = []

    def push(self, entries: Entries, alive_at_most: int) -> None:
        """Add sorted entries. alive_at_most: a bound of how many can be alive now, for compaction."""
        if not entries.shape[1]:
            return
        if not any(run.extend(entries) for run in self._runs):
            self._runs.append(Run(entries))
            self._merge()
        if sum(run.size for run in self._runs) > 2 * alive_at_most + SLACK:
            self._compact()

    def first(self, count: int) -> Entries:
        """The first `count` alive entries in order, fewer if there are fewer."""
        heads = [head for run in self._runs if (head := run.first(count, self._alive)).shape[1]]
        if len(heads) != len(self._runs):
            self._runs = [run for run in self._runs if run.chunks]
        if len(heads) < 2:
            return heads[0] if heads else _NONE
        return in_order(np.concatenate(heads, axis=1))[:, :count]

    def all(self) -> Entries:
        """Every alive entry, in order."""
        parts = [run.entries() for run in self._runs]
        entries = in_order(np.concatenate(parts, axis=1)) if parts else _NONE
        return entries[:, self._alive(entries[UNIT], entries[STAMP])]

    def _merge(self) -> None:
        self._runs.sort(key=lambda run: run.size, reverse=True)
        while len(self._runs) > 1 and self._runs[-2].size < TIER * self._runs[-1].size:
            small = self._runs.pop().entries()
            merged = np.concatenate([self._runs.pop().entries(), small], axis=1)
            self._runs.append(Run(in_order(merged)))

    def _compact(self) -> None:
        entries = self.all()
        self._runs = [Run(entries)] if entries.shape[1] else []
