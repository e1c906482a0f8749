"""Stores the state of rows in pages that lie in flat numpy columns.

Row ids ascend and are never reused, so state is kept by page of `PAGE_ROWS` ids. All pages of a table share one flat
array per column. A page table maps each page to a frame of those arrays. One fancy index per column reaches any set of
rows, and its cost does not depend on how many rows the table has. When the last row of a page is freed, the next new
page reuses its frame.

Memory grows with the number of pages that have a resident row. Columns begin with one page and double when needed,
because some stacks create a small table every step.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from transferqueue.ledger.arrays import AnyArray, BoolArray, Index, IntArray, is_run, tally
from transferqueue.ledger.attributes import Attribute
from transferqueue.limits import PAGE_ROWS

SHIFT = PAGE_ROWS.bit_length() - 1
MASK = PAGE_ROWS - 1

COLUMN_BYTES = 2 * 8
"""Of a row in a new column and in the places of its values, at most."""

FREE, LIVE, DONE, DROPPED = 0, 1, 2, 3
"""Fate of a row in the `fate` column. FREE: the row is not resident (freed, or never put)."""
FATE: Final = Attribute("fate", "u1", FREE, LIVE, DROPPED, codes=("free", "live", "done", "dropped"))


class StateColumn:
    """One value per resident row. `a` is replaced when the pages grow: do not keep a reference across an append."""

    __slots__ = ("a", "attribute")

    def __init__(self, attribute: Attribute, a: AnyArray) -> None:
        self.attribute = attribute
        self.a = a


class RowPages:
    """The page table, the frames, and the columns."""

    def __init__(self) -> None:
        self._capacity = PAGE_ROWS
        self._columns: list[StateColumn] = []
        self._spare = [0]
        self._frames: IntArray = np.full(16, -1, np.int64)
        self._base = 0
        """First page in the page table."""
        self._left: dict[int, int] = {}
        """Number of resident rows in each page that is in use."""
        self.next_row = 0
        self.resident = 0
        self.fate = self.column(FATE)

    def column(self, attribute: Attribute) -> StateColumn:
        """Add a column of an attribute."""
        a: AnyArray
        fill, dtype = attribute.fill, attribute.dtype
        if not self._left:
            a = np.empty(self._capacity, dtype)  # `_open_page` fills each page
        else:
            a = np.zeros(self._capacity, dtype) if fill == 0 else np.full(self._capacity, fill, dtype)
        column = StateColumn(attribute, a)
        self._columns.append(column)
        return column

    def growth(self, rows: int, columns: int) -> int:
        """Bytes that the columns take more while `rows` rows are added and `columns` columns, at most."""
        capacity, row_bytes = self._capacity, columns * COLUMN_BYTES
        opened = ((self.next_row + rows - 1) >> SHIFT) - ((self.next_row - 1) >> SHIFT)
        if opened and (needed := (len(self._left) + opened) << SHIFT) > capacity:
            row_bytes += sum(column.a.itemsize for column in self._columns)
            while capacity < needed:
                capacity *= 2
        return row_bytes * capacity

    # ------------------------------------------------------------ rows in

    def append(self, count: int) -> tuple[int, Index, list[int]]:
        """Add `count` rows. Returns the first id, the positions, and pages that became free because all their rows had
        ended.
        """
        first, last = self.next_row, self.next_row + count - 1
        finished = []
        page = first >> SHIFT
        if page == last >> SHIFT and page in self._left:  # mostly: into the page that is in use
            self._left[page] += count
            at = int(self._frames[page - self._base]) * PAGE_ROWS + (first & MASK)
            where: Index = slice(at, at + count)
        else:
            for page in range(first >> SHIFT, (last >> SHIFT) + 1):
                if page not in self._left:
                    finished += self._finished_last_page(page)
                    self._open_page(page)
                self._left[page] += min(last, (page << SHIFT) + MASK) - max(first, page << SHIFT) + 1
            where = self._places(first, last)
        self.next_row += count
        self.resident += count
        self.fate.a[where] = LIVE
        return first, where, finished

    def _places(self, first: int, last: int) -> Index:
        if first >> SHIFT == last >> SHIFT:
            at = int(self._frames[(first >> SHIFT) - self._base]) * PAGE_ROWS + (first & MASK)
            return slice(at, at + last - first + 1)
        return self.index(np.arange(first, last + 1))

    def _finished_last_page(self, page: int) -> list[int]:
        if self._left.get(page - 1) == 0:
            self._close_page(page - 1)
            return [page - 1]
        return []

    def _open_page(self, page: int) -> None:
        if not self._spare:
            self._grow()
        frame = self._spare.pop()
        self._reach(page)
        self._frames[page - self._base] = frame
        self._left[page] = 0
        at = slice(frame * PAGE_ROWS, (frame + 1) * PAGE_ROWS)
        for column in self._columns:
            column.a[at] = column.attribute.fill

    def _grow(self) -> None:
        old, self._capacity = self._capacity, 2 * self._capacity
        for column in self._columns:
            grown = np.empty(self._capacity, column.a.dtype)
            grown[:old] = column.a
            column.a = grown
        self._spare = list(range(self._capacity // PAGE_ROWS - 1, old // PAGE_ROWS - 1, -1))

    def _reach(self, page: int) -> None:
        """Extend the page table to `page`: remove finished pages at its front, or double it."""
        if page - self._base < self._frames.size:
            return
        oldest = next(iter(self._left), page)
        frames_in_use = self._frames[oldest - self._base :]
        size = max(16, 2 * (page - oldest + 1))
        frames: IntArray = np.full(size, -1, np.int64)
        frames[: frames_in_use.size] = frames_in_use
        self._frames, self._base = frames, oldest

    # ------------------------------------------------------------ stored rows

    def restore(self, next_row: int, rows: IntArray) -> None:
        """Fill pages that have no row. `rows` (ascending) become resident and the next id is `next_row`. The caller
        sets their columns, fates too.
        """
        pages = tally(rows >> SHIFT)
        if next_row & MASK and (not pages or pages[-1][0] != next_row >> SHIFT):
            pages.append((next_row >> SHIFT, 0))  # the last page stays in use until it is full
        while self._capacity < len(pages) * PAGE_ROWS:
            self._capacity *= 2
        self._spare = list(range(self._capacity // PAGE_ROWS - 1, -1, -1))
        for column in self._columns:
            column.a = np.empty(self._capacity, column.attribute.dtype)
        for page, count in pages:
            self._open_page(page)
            self._left[page] = count
        self.next_row, self.resident = next_row, rows.size

    # ------------------------------------------------------------ rows out

    def free(self, rows: IntArray, at: Index) -> list[int]:
        """Remove resident rows at positions `at`. Returns the pages that have no rows left."""
        self.fate.a[at] = FREE
        self.resident -= rows.size
        finished = []
        # A slice is within one page.
        pages = [(rows.item(0) >> SHIFT, rows.size)] if isinstance(at, slice) else tally(rows >> SHIFT)
        for page, count in pages:
            self._left[page] -= count
            if not self._left[page] and page < self.next_row >> SHIFT:
                self._close_page(page)
                finished.append(page)
        return finished

    def _close_page(self, page: int) -> None:
        del self._left[page]
        self._spare.append(int(self._frames[page - self._base]))
        self._frames[page - self._base] = -1

    # ------------------------------------------------------------ where rows are

    def where(self, rows: IntArray) -> Index:
        """Positions of resident rows, as a slice if the rows are one run within a page. Otherwise as `index`."""
        if not is_run(rows):
            return self.index(rows)
        first = rows.item(0)
        page, last = first >> SHIFT, first + rows.size - 1
        if last >> SHIFT != page or not 0 <= page - self._base < self._frames.size:
            return self.index(rows)
        at = self._frames.item(page - self._base) * PAGE_ROWS + (first & MASK)
        return slice(at, at + rows.size) if at >= 0 else self.index(rows)

    def index(self, rows: IntArray) -> IntArray:
        """Positions of resident rows. Not checked: for another row it returns some position in bounds."""
        page = self._frames.take((rows >> SHIFT) - self._base, mode="clip")
        return (page << SHIFT) | (rows & MASK)

    def find(self, rows: IntArray) -> tuple[IntArray, BoolArray]:
        """Positions of any row ids, and which of the rows are resident."""
        page = (rows >> SHIFT) - self._base
        inside = (page >= 0) & (page < self._frames.size)
        frame = self._frames[np.where(inside, page, 0)]
        inside &= (frame >= 0) & (rows >= 0)
        places = np.where(inside, (frame << SHIFT) | (rows & MASK), 0)
        return places, inside & (self.fate.a[places] != FREE)

    def pages(self) -> list[int]:
        """Pages with resident rows, ascending."""
        return list(self._left)

    def rows_of(self, page: int) -> IntArray:
        """Resident rows of a page, ascending."""
        at = int(self._frames[page - self._base]) * PAGE_ROWS
        offsets: IntArray = np.flatnonzero(self.fate.a[at : at + PAGE_ROWS])
        return offsets + (page << SHIFT)

    def resident_rows(self) -> IntArray:
        """All resident rows, ascending. Visits every page: for reports, and for tasks declared late."""
        pages = [self.rows_of(page) for page in self._left]
        return np.concatenate(pages) if pages else np.empty(0, np.int64)
