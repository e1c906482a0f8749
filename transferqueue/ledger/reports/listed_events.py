"""The latest events of a table's rows: the answer to `ListEvents`.

A reader asks again from the position at which the last answer ended. It may ask for one row in `every`. The choice
depends only on row ids, so every answer is about the same rows: the id, multiplied by 2^64 divided by the golden ratio
(Knuth, The Art of Computer Programming, volume 3, section 6.4), gives 31 bits that follow no pattern of puts or groups.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.ledger.arrays import BoolArray, IntArray
from transferqueue.ledger.rows import TableEvent
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import EVENT_ROWS_TOLD_MAX, EVENTS_TOLD_MAX
from transferqueue.wire.answers.events import EventsAnswer, RowsEvent
from transferqueue.wire.messages import ListEvents

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(33)


def listed_events(table: TableState, request: ListEvents, now: float) -> EventsAnswer:
    """Events from ``request.after`` on, with those of their rows that are chosen, and where the next answer begins.

    `missed` counts events between, which the bounded history had removed. `omitted` counts chosen rows of an event that
    it does not list.
    """
    if request.after < -1 or request.every < 1:
        raise UsageError(
            f'events of table "{table.name}" were asked for after={request.after}, every={request.every}; '
            "give `next` of an earlier answer or -1, and at least 1"
        )
    history = table.history
    start = history.end if request.after < 0 else min(request.after, history.end)
    events = _affordable(history.since(start, EVENTS_TOLD_MAX))
    first = max(start, history.forgotten)
    return EventsAnswer(
        now_s=now,
        next=first + len(events),
        missed=first - start,
        more=first + len(events) < history.end,
        events=_told(events, request.every, now),
    )


def chosen(rows: IntArray, every: int) -> BoolArray:
    """Which of these rows are among the one in `every`."""
    mixed = (rows.astype(np.uint64) * _GOLDEN) >> _SHIFT
    choice: BoolArray = mixed % np.uint64(every) == 0
    return choice


def _affordable(events: list[TableEvent]) -> list[TableEvent]:
    """The first of these events, as many as have `EVENT_ROWS_TOLD_MAX` rows together; always one."""
    ends = np.cumsum([event.rows.size for event in events])
    return events[: max(int(np.searchsorted(ends, EVENT_ROWS_TOLD_MAX, "right")), 1)]


def _told(events: list[TableEvent], every: int, now: float) -> list[RowsEvent]:
    """Events that concern a chosen row, with these rows. All rows are looked at in one pass."""
    if not events:
        return []
    sizes = [event.rows.size for event in events]
    rows = np.concatenate([event.rows for event in events])
    places = np.flatnonzero(chosen(rows, every))
    of_event = np.repeat(np.arange(len(events)), sizes)[places]
    edges = np.searchsorted(of_event, np.arange(len(events) + 1))
    return [
        RowsEvent(
            ago_s=now - event.at,
            what=event.what,
            task=event.task,
            session=event.session,
            detail=event.detail,
            rows=rows[places[first : min(last, first + EVENT_ROWS_TOLD_MAX)]].tolist(),
            omitted=max(0, last - first - EVENT_ROWS_TOLD_MAX),
        )
        for event, first, last in zip(events, edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        if last > first
    ]
