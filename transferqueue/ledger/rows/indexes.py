"""Indexes over the rows of a table: by policy version, by ordinal, by checkpoint step.

Each answers one question without a walk over all rows: which rows are over the staleness bound, up to which ordinal all
rows have ended, which rows a checkpoint covers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

import numpy as np

from transferqueue.ledger.arrays import NO_ROWS, BoolArray, Index, IntArray, by_value
from transferqueue.ledger.rows.row_pages import LIVE, StateColumn
from transferqueue.ledger.rows.row_state import RowStore

SLACK: Final = 8192
"""An index may keep this many void entries more than there are rows."""


class VersionIndex:
    """Finds live rows that are over the staleness bound, by their policy version.

    Every row with a version is filed under it. When the clock advances, the index removes all versions below the bound.
    So each row is visited once for its version, however many rows the table has. A row that gets another version is
    filed again, and its old entry becomes void.
    """

    def __init__(self, rows: RowStore) -> None:
        self._rows = rows
        self._filed: dict[int, list[IntArray]] = {}
        self._versions: list[int] = []
        self._size = 0

    def file(self, rows: IntArray, versions: IntArray) -> None:
        """Add rows that got these versions. Rows without a version (-1) are never stale."""
        for version, positions in by_value(versions):
            if version < 0:
                continue
            if version not in self._filed:
                self._filed[version] = []
                heapq.heappush(self._versions, version)
            self._filed[version].append(rows if positions.size == rows.size else rows[positions])
            self._size += positions.size
        if self._size > 2 * self._rows.pages.resident + SLACK:
            self._compact()

    def _live_rows(self, version: int) -> IntArray:
        rows = np.concatenate(self._filed[version])
        at, live = self._rows.pages.find(rows)
        live &= (self._rows.version.a[at] == version) & (self._rows.pages.fate.a[at] == LIVE)
        return np.unique(rows[live])

    def _compact(self) -> None:
        for version in list(self._filed):
            rows = self._live_rows(version)
            if rows.size:
                self._filed[version] = [rows]
            else:
                del self._filed[version]
        self._versions = sorted(self._filed)
        self._size = sum(arrays[0].size for arrays in self._filed.values())

    def below(self, bound: int) -> list[IntArray]:
        """Live rows of versions below `bound`, oldest version first. The index keeps them."""
        return [self._live_rows(version) for version in sorted(self._filed) if version < bound]

    def take_below(self, bound: int) -> IntArray:
        """Live rows of versions below `bound`. The index removes them."""
        taken = []
        while self._versions and self._versions[0] < bound:
            version = heapq.heappop(self._versions)
            taken.append(self._live_rows(version))
            self._size -= sum(rows.size for rows in self._filed.pop(version))
        return np.concatenate(taken) if taken else np.empty(0, np.int64)


PENDING_MAX: Final = 1 << 16
_NONE: Final = (-1).to_bytes(8, "little", signed=True)
"""Ordinals of ended rows that are buffered before they are merged into spans."""
SPANS_MAX: Final = 1 << 16
"""Most spans of a table. If ordinals are so sparse that there are more, the highest spans are removed. The cursor then
stays where it would be if those ordinals were unfinished. That is safe: a prompt is put again, none is lost.
"""


class FinishedOrdinals:
    """Ordinals whose rows have ended, and the prompt cursor: the lowest ordinal that is not final.

    An ordinal is final if a row of it has ended and none of its rows is live. So a further member of its group makes it
    open again. Ended ordinals are kept as spans of consecutive numbers. Whether one has a live row is looked up only
    for a cursor request. So the end of a row costs one append, and a run that puts its ordinals roughly in order has
    few spans.
    """

    def __init__(self, rows: RowStore) -> None:
        self._rows = rows
        self.spans: IntArray = np.empty((0, 2), np.int64)
        """First and last ordinal of each span, ascending, with a gap between any two: ``[spans, 2]``."""
        self._pending: list[IntArray] = []
        self._count = 0

    def ended(self, at: Index) -> None:
        """Record the ordinals of rows that got their fate."""
        if "ordinal" not in self._rows.facts_given:
            return
        ordinals: IntArray = self._rows.facts["ordinal"].a[at]
        if ordinals.tobytes() == _NONE * ordinals.size or int(ordinals.max()) < 0:
            return
        if isinstance(at, slice):
            ordinals = ordinals.copy()  # the column changes
        self._pending.append(ordinals)
        self._count += ordinals.size
        if self._count > PENDING_MAX:
            self.merge_pending()

    def merge_pending(self) -> None:
        """Merge the buffered ordinals into the spans."""
        if not self._pending:
            return
        ordinals = np.unique(np.concatenate(self._pending))
        ordinals = ordinals[ordinals >= 0]
        starts = np.flatnonzero(np.diff(ordinals, prepend=-2) > 1)
        ends = np.append(starts[1:], ordinals.size) - 1
        self.spans = _joined(np.concatenate([self.spans, np.stack([ordinals[starts], ordinals[ends]], axis=1)]))
        self._pending, self._count = [], 0

    def cursor(self, start: int = 0) -> int:
        """The lowest ordinal from `start` on that is not final. Visits all live rows."""
        self.merge_pending()
        span = int(np.searchsorted(self.spans[:, 0], start, "right")) - 1
        end = max(start, int(self.spans[span, 1]) + 1) if span >= 0 else start
        live = self._live_ordinals()
        return int(live[(live >= start) & (live < end)].min(initial=end))

    def have_ended(self, spans: IntArray) -> BoolArray:
        """Of which spans (first and last ordinal, ``[spans, 2]``) every ordinal is final. Visits all live rows if some
        may be."""
        self.merge_pending()
        if not len(self.spans):
            return np.zeros(len(spans), np.bool_)
        at = np.searchsorted(self.spans[:, 0], spans[:, 0], "right") - 1
        ended: BoolArray = (at >= 0) & (self.spans[at, 1] >= spans[:, 1])
        if ended.any():
            live = np.sort(self._live_ordinals())
            ended &= np.searchsorted(live, spans[:, 0]) == np.searchsorted(live, spans[:, 1], "right")
        return ended

    def _live_ordinals(self) -> IntArray:
        if "ordinal" not in self._rows.facts_given:
            return np.empty(0, np.int64)
        rows = self._rows.pages.resident_rows()
        at = self._rows.pages.index(rows)
        live: IntArray = self._rows.facts["ordinal"].a[at[self._rows.pages.fate.a[at] == LIVE]]
        return live


def _joined(spans: IntArray) -> IntArray:
    """Merge spans that overlap or touch."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.ones(len(spans), np.bool_)
    first[1:] = spans[1:, 0] > reach[:-1] + 1
    starts = np.flatnonzero(first)
    ends = np.append(starts[1:], len(spans)) - 1
    return np.stack([spans[starts, 0], reach[ends]], axis=1)[:SPANS_MAX]


class StepIndex:
    """Rows of one task by the checkpoint step of their ack, until a checkpoint covers the step or a rollback undoes it.

    `state` and `hold` are columns of the task. A filed row may meanwhile have ended, been requeued, or been acked
    again. So its entry is valid only while its `state` is `stepped` and its `hold` is this step. Void entries are
    removed when they outnumber the rows.
    """

    def __init__(self, rows: RowStore, state: StateColumn, hold: StateColumn, stepped: int) -> None:
        self._rows = rows
        self._state = state
        self._hold = hold
        self._stepped = stepped
        self._filed: dict[int, list[IntArray]] = {}
        self._size = 0

    def file(self, rows: IntArray, step: int) -> None:
        """Add rows that were just acked with `step`."""
        self._filed.setdefault(step, []).append(rows)
        self._size += rows.size
        if self._size > 2 * self._rows.pages.resident + SLACK:
            self._compact()

    def uncovered_rows(self, step: int) -> IntArray:
        """Rows whose last ack had this step and that no checkpoint covers yet, ascending."""
        rows = np.unique(np.concatenate(self._filed[step]))
        at, resident = self._rows.pages.find(rows)
        uncovered: IntArray = rows[resident & (self._state.a[at] == self._stepped) & (self._hold.a[at] == step)]
        return uncovered

    def take(self, chosen: Callable[[int], bool]) -> IntArray:
        """Remove the chosen steps. Returns their uncovered rows, in order of step."""
        taken = []
        for step in sorted(step for step in self._filed if chosen(step)):
            taken.append(self.uncovered_rows(step))
            self._size -= sum(rows.size for rows in self._filed.pop(step))
        return np.concatenate(taken) if taken else NO_ROWS

    @property
    def latest(self) -> int:
        """The highest step in the index; -1 if it is empty."""
        return max(self._filed, default=-1)

    def _compact(self) -> None:
        uncovered = {step: self.uncovered_rows(step) for step in self._filed}
        self._filed = {step: [rows] for step, rows in uncovered.items() if rows.size}
        self._size = sum(rows.size for rows in uncovered.values())
