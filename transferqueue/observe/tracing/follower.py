"""Follow rows of a queue by the events of its server, and export the trace of each row that ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from transferqueue.errors import NotFound
from transferqueue.observe.tracing.row_trace import RowTrace, TableTraces
from transferqueue.wire.answers.coordinators import UnreachableCoordinator, by_coordinator
from transferqueue.wire.answers.events import EventsAnswer
from transferqueue.wire.answers.sessions import labels

if TYPE_CHECKING:
    from transferqueue.client import Queue

EVERY: Final = 64
"""One row in so many is followed, unless another share is asked for: of 10,000 rows a second, 156 traces."""
ANSWERS_MAX: Final = 16
"""Answers that one look takes from a table: four times what the server remembers, so a look ends though events go
on."""
NAMES_MAX: Final = 16_384
"""Names of sessions that are remembered: four times as many as may be connected at once."""
UNKNOWN_END: Final = "unknown"
"""State of a row of which events are missing."""

Export = Callable[[RowTrace, Mapping[int, str]], None]
"""(ended trace, names of the sessions by number)."""


class _FollowedTable:
    """A table, the position in its events, and the lead of this process's clock over the server's (ahead_s)."""

    def __init__(self, name: str, position: int) -> None:
        self.traces = TableTraces(name)
        self.position, self.epoch, self.ahead_s = position, -1, 0.0


class RowFollower:
    """Follows one row in `every` of all tables of `queue`, from now on, and calls `export` with the trace of each row
    that ended.

    Call `look` at least once a second: the server keeps the events of about 4,096 requests of a table. After missed
    events or a restart of the server, the rows in flight end as ``unknown``. `close` ends the remaining rows so too.
    """

    def __init__(
        self, queue: Queue, export: Export, *, every: int = EVERY, clock: Callable[[], float] = time.time
    ) -> None:
        self._queue, self._export, self._every, self._clock = queue, export, every, clock
        self._tables: dict[str, _FollowedTable] = {}
        self._names: dict[int, str] = {}
        self._begin_at = -1
        """Where a table's history is read from: the first look takes none of it, and a table that a later look finds is
        new."""
        self.exported = 0

    @property
    def skipped(self) -> int:
        """Rows without a trace, because too many others had one at their put."""
        return sum(table.traces.skipped for table in self._tables.values())

    def look(self) -> None:
        """Read the events since the last look. Blocks for a request or two of each table."""
        names = self._queue.tables()
        for gone in self._tables.keys() - set(names):
            self._give(self._tables.pop(gone).traces.end(self._clock(), "table dropped"))
        for name in names:
            self._follow(self._tables.setdefault(name, _FollowedTable(name, self._begin_at)))
        self._begin_at = 0

    def close(self) -> None:
        """Export the traces of the remaining rows. Sends the server no request."""
        for table in self._tables.values():
            self._give(table.traces.end(self._clock(), UNKNOWN_END))
        self._tables.clear()

    def _follow(self, table: _FollowedTable) -> None:
        for _ in range(ANSWERS_MAX):
            try:
                answer = self._queue.events(table.traces.table, after=table.position, every=self._every)
            except NotFound:
                return  # dropped since the list of tables was read; the next look ends its traces
            self._take(table, answer)
            if not answer.more:
                return

    def _take(self, table: _FollowedTable, answer: EventsAnswer) -> None:
        is_other = answer.epoch != table.epoch or answer.next < table.position  # a table made again begins at 0
        if answer.missed or is_other or any(event.omitted for event in answer.events):
            self._give(table.traces.end(self._clock(), UNKNOWN_END))
        if answer.epoch != table.epoch:
            table.epoch, table.ahead_s = answer.epoch, self._clock() - answer.now_s
        table.position = answer.next
        if answer.events:
            self._learn_names(table.traces.table, {event.session for event in answer.events})
        for event in answer.events:
            self._give(table.traces.add(event, table.ahead_s + answer.now_s - event.ago_s))

    def _learn_names(self, table: str, sessions: set[int]) -> None:
        """Ask the server for the names of new sessions. A session that is gone by then keeps its number."""
        if not sessions - self._names.keys() - {0}:
            return
        home = by_coordinator(self._queue.address, self._queue.sessions())[self._queue.coordinator_of(table)]
        known = {} if isinstance(home, UnreachableCoordinator) else labels(home)
        self._names |= known | {
            number: f"session {number}" for number in sessions - self._names.keys() - known.keys() - {0}
        }
        for oldest in [*self._names][:-NAMES_MAX]:
            del self._names[oldest]

    def _give(self, traces: list[RowTrace]) -> None:
        for trace in traces:
            self._export(trace, self._names)
        self.exported += len(traces)
