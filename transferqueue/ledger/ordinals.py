"""The prompt cursor of a table: up to which ordinal everything that was put has its final fate.

An ordinal is final while it was put, some row of it has ended, and none of its rows is live. So a member of a group that is asked for
again makes its ordinal open again. The ordinals that ended are kept as spans of consecutive numbers; which of them have a
live row is looked up only when the cursor is asked for. So an end costs an append, and the spans of a run that puts its
ordinals roughly in order are few.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.pages import LIVE
from transferqueue.ledger.rows import Rows

PENDING_MAX: Final = 1 << 16
"""Ended ordinals that are kept as they came, before they are made into spans."""
SPANS_MAX: Final = 1 << 16
"""More are kept of no table: of ordinals so sparse the highest are forgotten. The cursor then stays where it would be with
them unfinished, which is safe: a prompt is put again, none is lost."""


class Ordinals:
    """Ordinals of which rows have ended."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.spans: IntArray = np.empty((0, 2), np.int64)
        """First and last of each, ascending, with a gap between any two: ``[spans, 2]``."""
        self._pending: list[IntArray] = []
        self._count = 0

    def ended(self, at: IntArray) -> None:
        """The rows at these places have got their fate."""
        ordinals: IntArray = self._rows.facts["ordinal"].a[at]
        if int(ordinals.max()) < 0:
            return
        self._pending.append(ordinals)
        self._count += ordinals.size
        if self._count > PENDING_MAX:
            self.settle()

    def settle(self) -> None:
        """Make all that ended into spans."""
        if not self._pending:
            return
        ordinals = np.unique(np.concatenate(self._pending))
        ordinals = ordinals[ordinals >= 0]
        starts = np.flatnonzero(np.diff(ordinals, prepend=-2) > 1)
        ends = np.append(starts[1:], ordinals.size) - 1
        self.spans = _joined(np.concatenate([self.spans, np.stack([ordinals[starts], ordinals[ends]], axis=1)]))
        self._pending, self._count = [], 0

    def cursor(self, start: int = 0) -> int:
        """The lowest ordinal from `start` on that is not final. Walks the live rows."""
        self.settle()
        found = int(np.searchsorted(self.spans[:, 0], start, "right")) - 1
        end = max(start, int(self.spans[found, 1]) + 1) if found >= 0 else start
        rows = self._rows.pages.resident_rows()
        at = self._rows.pages.index(rows)
        live: IntArray = self._rows.facts["ordinal"].a[at[self._rows.pages.fate.a[at] == LIVE]]
        return int(live[(live >= start) & (live < end)].min(initial=end))


def _joined(spans: IntArray) -> IntArray:
    """Spans that overlap or touch become one."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.ones(len(spans), np.bool_)
    first[1:] = spans[1:, 0] > reach[:-1] + 1
    starts = np.flatnonzero(first)
    ends = np.append(starts[1:], len(spans)) - 1
    return np.stack([spans[starts, 0], reach[ends]], axis=1)[:SPANS_MAX]
