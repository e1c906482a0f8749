"""The recent events of a table, from which `inspect` tells the life of a row.

A request adds one event. The event holds the array of row ids that the request had anyway, so recording costs one
tuple. The history is bounded by the number of events, by their texts, and by the number of row ids in them; the oldest
events are removed first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from typing import Final, NamedTuple

from transferqueue.ledger.arrays import IntArray
from transferqueue.limits import EVENT_TEXT_CHARS_MAX, HISTORY_EVENTS_MAX, HISTORY_ROWS_MAX

CUT: Final = "... and more"
"""The end of a detail that was longer."""


class TableEvent(NamedTuple):
    """Something that happened to rows. task and session: "" and 0 if there is none."""

    at: float
    what: str
    rows: IntArray
    task: str
    session: int
    detail: str


_event: Final = tuple.__new__
"""Makes an event in one call of C code: a request makes one or two."""


class TableHistory:
    """The recent events of one table: at most `events_max`, with at most `rows_max` row ids."""

    def __init__(self, events_max: int = HISTORY_EVENTS_MAX, rows_max: int = HISTORY_ROWS_MAX) -> None:
        self._events_max, self._rows_max = events_max, rows_max
        self._events: deque[TableEvent] = deque()
        self._rows = 0
        self.forgotten = 0
        """Number of events that were removed."""

    def add(self, at: float, what: str, rows: IntArray, task: str = "", session: int = 0, detail: str = "") -> None:
        """Record an event. The caller must not change `rows` afterwards."""
        size = rows.size
        if not size:
            return
        if rows.base is not None:
            rows = rows.copy()  # a view would keep its whole base array alive
        if len(detail) > EVENT_TEXT_CHARS_MAX:
            detail = f"{detail[:EVENT_TEXT_CHARS_MAX]}{CUT}"
        self._events.append(_event(TableEvent, (at, what, rows, task, session, detail)))
        self._rows += size
        while len(self._events) > self._events_max or self._rows > self._rows_max + size:
            self._rows -= self._events.popleft().rows.size
            self.forgotten += 1

    def restore(self, events: Iterable[TableEvent], forgotten: int) -> None:
        """Continue as the history of an image."""
        self._events, self.forgotten = deque(events), forgotten
        self._rows = sum(event.rows.size for event in self._events)

    def __reversed__(self) -> Iterator[TableEvent]:
        """The events that are kept, the newest first."""
        return reversed(self._events)

    @property
    def end(self) -> int:
        """Number of events so far, those that were removed included: the position of the next one."""
        return self.forgotten + len(self._events)

    def since(self, position: int, most: int) -> list[TableEvent]:
        """At most `most` events from this position on, oldest first. Events that were removed are missing at the
        beginning."""
        start = max(position - self.forgotten, 0)
        return list(islice(self._events, start, start + most))

    def after(self, at: float) -> list[TableEvent]:
        """The events at this time and later, oldest first."""
        return list(takewhile(lambda event: event.at >= at, reversed(self._events)))[::-1]

    def of(self, row: int) -> list[TableEvent]:
        """Events of a row, oldest first."""
        return [event for event in self._events if bool((event.rows == row).any())]
