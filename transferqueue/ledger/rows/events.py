"""What happened to a table, one event a request, bounded: so that `inspect` can tell a row's whole life.

An event names its rows by the array that the request used anyway, so recording costs one tuple. The oldest
events go first, by number of events and by number of row ids they hold.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from transferqueue.ledger.rows.arrays import IntArray
from transferqueue.limits import HISTORY_EVENTS_MAX, HISTORY_ROWS_MAX


class TableEvent(NamedTuple):
    """Something that happened to rows. task and session: "" and 0 where there is none."""

    at: float
    what: str
    rows: IntArray
    task: str
    session: int
    detail: str


class TableHistory:
    """The recent events of one table."""

    def __init__(self) -> None:
        self._events: deque[TableEvent] = deque()
        self._rows = 0
        self.forgotten = 0
        """Events that are kept no more."""

    def add(self, at: float, what: str, rows: IntArray, task: str = "", session: int = 0, detail: str = "") -> None:
        """Record an event; `rows` must not be changed afterwards."""
        if not rows.size:
            return
        rows = rows if rows.base is None else rows.copy()  # a view would keep more alive than the ids
        self._events.append(TableEvent(at, what, rows, task, session, detail))
        self._rows += rows.size
        while len(self._events) > HISTORY_EVENTS_MAX or self._rows > HISTORY_ROWS_MAX + rows.size:
            self._rows -= self._events.popleft().rows.size
            self.forgotten += 1

    def of(self, row: int) -> list[TableEvent]:
        """Events of a row, oldest first."""
        return [event for event in self._events if bool((event.rows == row).any())]
