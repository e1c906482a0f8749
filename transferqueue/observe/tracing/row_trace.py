"""Assemble the trace of a row from events of the server. Reads no clock, does no I/O, knows no OpenTelemetry.

- A trace begins with the put of its row and ends with the row: done, or dropped. A row without a seen put has no
  trace.
- ``leased`` begins a lease span of its task. The next event of the row for that task ends it: an ack, a release, or the
  loss of the lease. The end of the row ends its open spans.
- Every other event is a mark on the trace: new columns, a requeue, a checkpoint.
- Rows followed at once, and spans and marks of one row, are limited; the excess is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from transferqueue.wire.answers.events import RowsEvent

ROWS_MAX: Final = 4096
"""Rows of one table that are followed at once: 4 MB. Puts beyond have no trace."""
SPANS_MAX: Final = 64
"""Leases of one row that its trace has: more than `Retry.attempts` of any task that makes sense."""
MARKS_MAX: Final = 64
ENDS_OF_A_ROW: Final = ("done", "dropped")
ENDS_IN_ORDER: Final = ("acked", "acked as dropped", "released")
"""How a worker gives a lease back by itself. All other ends are failures."""

TAKEN: Final = "taken away"
"""End of a lease that only the next lease of the same task shows: the row went back to an earlier task meanwhile."""


class Mark(NamedTuple):
    """An event of a row other than a lease. at_s: seconds since 1970."""

    at_s: float
    what: str
    task: str
    detail: str


@dataclass(slots=True)
class LeaseSpan:
    """One lease of the row. worker: number of its session. outcome: the event that ended it, in the server's words, or
    ""."""

    task: str
    worker: int
    began_s: float
    ended_s: float = 0.0
    outcome: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether the worker failed, died or was too late."""
        return self.outcome not in ENDS_IN_ORDER

    def end(self, at_s: float, outcome: str, detail: str = "") -> None:
        """Close the span."""
        self.ended_s, self.outcome, self.detail = at_s, outcome, detail


@dataclass(slots=True)
class RowTrace:
    """One row from its put to its end.

    Attributes:
        put_by: Number of a session.
        state: done, dropped, or the reason for which its end is unknown; "" before.
        omitted: Number of leases and marks beyond the limits.
    """

    table: str
    row: int
    began_s: float
    put_by: int
    ended_s: float = 0.0
    state: str = ""
    reason: str = ""
    leases: list[LeaseSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    omitted: int = 0
    _held: dict[str, LeaseSpan] = field(default_factory=dict)

    def add(self, event: RowsEvent, at_s: float) -> None:
        """Record an event that does not end the row."""
        held = self._held.pop(event.task, None)
        if held is not None:
            held.end(at_s, TAKEN if event.what == "leased" else event.what, event.detail)
        if event.what == "leased":
            self._lease(event, at_s)
        elif held is None:
            self._mark(Mark(at_s, event.what, event.task, event.detail))

    def end(self, at_s: float, state: str, reason: str = "") -> RowTrace:
        """Close the trace, and the leases that are open; returns itself."""
        for span in self._held.values():
            span.end(at_s, f"row {state}", reason)
        self._held.clear()
        self.ended_s, self.state, self.reason = at_s, state, reason
        return self

    def _lease(self, event: RowsEvent, at_s: float) -> None:
        if len(self.leases) >= SPANS_MAX:
            self.omitted += 1
            return
        self._held[event.task] = LeaseSpan(event.task, event.session, at_s)
        self.leases.append(self._held[event.task])

    def _mark(self, mark: Mark) -> None:
        if len(self.marks) >= MARKS_MAX:
            self.omitted += 1
        else:
            self.marks.append(mark)


class TableTraces:
    """The followed rows of one table."""

    def __init__(self, table: str, rows_max: int = ROWS_MAX) -> None:
        self.table, self.rows_max = table, rows_max
        self.skipped = 0
        """Rows that have no trace, because `rows_max` others were followed."""
        self._open: dict[int, RowTrace] = {}

    def add(self, event: RowsEvent, at_s: float) -> list[RowTrace]:
        """Record an event of this table at `at_s` (seconds since 1970); returns the traces that it ended."""
        if event.what == "put":
            return self._begin(event, at_s)
        followed = [self._open[row] for row in event.rows if row in self._open]
        if event.what in ENDS_OF_A_ROW:
            return [self._open.pop(trace.row).end(at_s, event.what, event.detail) for trace in followed]
        for trace in followed:
            trace.add(event, at_s)
        return []

    def end(self, at_s: float, state: str) -> list[RowTrace]:
        """End all traces, because no more events of their rows will come."""
        ended = [trace.end(at_s, state) for trace in self._open.values()]
        self._open.clear()
        return ended

    def _begin(self, event: RowsEvent, at_s: float) -> list[RowTrace]:
        """Begin traces. Row ids that begin anew are of a table that was made again: its earlier rows have ended."""
        again = [self._open.pop(row).end(at_s, "gone") for row in event.rows if row in self._open]
        room = max(self.rows_max - len(self._open), 0)
        self.skipped += len(event.rows[room:])
        self._open |= {row: RowTrace(self.table, row, at_s, event.session) for row in event.rows[:room]}
        return again
