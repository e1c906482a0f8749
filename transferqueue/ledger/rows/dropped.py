"""Rows that were dropped for failing too often: they stay readable for a while, and may be taken again.

Bounded by rows, by the pages of row state that they keep in memory, and by the bytes of the extents in which their
values lie; the oldest are freed first. They do not count as resident rows, so they take no room from new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.rows.row_pages import SHIFT
from transferqueue.limits import DROPPED_BYTES_MAX, DROPPED_PAGES_MAX, DROPPED_ROWS_MAX


class LastFailure(NamedTuple):
    """Why and when (`at`) a row was dropped."""

    task: str
    error: str
    worker: str
    at: float


class SpentRow(NamedTuple):
    """One kept row. `states`: its state in each task when it was dropped. `extents`: the places of its values, with
    their bytes."""

    failure: LastFailure
    states: dict[str, int]
    extents: dict[int, int]


class SpentRows:
    """The kept rows of one table, the oldest first."""

    def __init__(self) -> None:
        self.by_row: dict[int, SpentRow] = {}
        self.expected: dict[int, LastFailure] = {}
        """Rows that will be dropped before the request ends."""
        self._pages: dict[int, int] = {}
        self._extents: dict[int, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.by_row)

    def expect(self, rows: IntArray, failure: LastFailure) -> None:
        """Rows will be dropped for this failure."""
        self.expected.update(dict.fromkeys(rows.tolist(), failure))

    def keep(self, row: int, dropped: SpentRow) -> None:
        """Add a row. The caller then frees the rows `beyond` the bounds."""
        self.by_row[row] = dropped
        self._pages[row >> SHIFT] = self._pages.get(row >> SHIFT, 0) + 1
        for extent, nbytes in dropped.extents.items():
            self._bytes += nbytes if extent not in self._extents else 0
            self._extents[extent] = self._extents.get(extent, 0) + 1

    def forget(self, rows: Iterable[int]) -> None:
        """Remove rows that are freed or taken again; others are no error."""
        for row in [row for row in rows if row in self.by_row]:
            dropped = self.by_row.pop(row)
            _discard(self._pages, row >> SHIFT)
            for extent, nbytes in dropped.extents.items():
                _discard(self._extents, extent)
                self._bytes -= nbytes if extent not in self._extents else 0

    def beyond(self, bytes_max: int | None) -> int | None:
        """The oldest row, if the bounds are exceeded. `bytes_max` is the table's."""
        most = DROPPED_BYTES_MAX if bytes_max is None else min(DROPPED_BYTES_MAX, bytes_max // 8)
        over = len(self.by_row) > DROPPED_ROWS_MAX or len(self._pages) > DROPPED_PAGES_MAX or self._bytes > most
        return next(iter(self.by_row)) if over and self.by_row else None


def _discard(counts: dict[int, int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
