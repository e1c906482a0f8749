"""The last minutes of a queue: for each moment, how many workers of each table worked, and how many waited. Pure.

Rules: a worker of a task works while it holds a lease, and is idle while it waits for one and holds none. A producer is idle while
it waits to reserve, to put or for memory; producers count as working if rows arrived since the previous moment. Workers are
distinguished by the names that the server shows: those that share a label count as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from transferqueue.observe.answers.stats import TableStats, TaskStats, Waiting
from transferqueue.observe.frame import StatsFrame

MOMENTS_MAX: Final = 300
"""Five minutes, a moment a second."""
_PRODUCING: Final = frozenset({"Reserve", "Put", "Grant"})


class Lane(msgspec.Struct, frozen=True):
    """Counts of workers of one task, or of producers: busy and idle."""

    busy: int
    idle: int


class TableMoment(msgspec.Struct, frozen=True):
    """One table at one moment. put_s, done_s: rows per second since the previous moment."""

    put_s: float
    done_s: float
    producers: Lane
    tasks: dict[str, Lane]


class Moment(msgspec.Struct, frozen=True):
    """All tables at one moment. at_s: time of the server's clock."""

    at_s: float
    tables: dict[str, TableMoment]


class Timeline:
    """Keeps the newest moments."""

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=MOMENTS_MAX)

    def add(self, frame: StatsFrame) -> Moment:
        """Add the moment of a frame, and return it."""
        tables = {name: _table(name, table, frame) for name, table in frame.stats.tables.items()}
        moment = Moment(frame.stats.now_s, tables)
        self.moments.append(moment)
        return moment


def _table(name: str, table: TableStats, frame: StatsFrame) -> TableMoment:
    rates = frame.rates.get(name)
    put_s, done_s = (rates.put_s, rates.done_s) if rates else (0.0, 0.0)
    waiting = [request for request in frame.stats.waiting if request.table == name]
    producers = Lane(int(put_s > 0), len(_names(request for request in waiting if request.request in _PRODUCING)))
    return TableMoment(
        put_s, done_s, producers, {task: _lane(task, shown, waiting) for task, shown in table.tasks.items()}
    )


def _lane(task: str, shown: TaskStats, waiting: Iterable[Waiting]) -> Lane:
    holders = set(shown.holders)
    idle = _names(request for request in waiting if request.request == "Lease" and request.task == task)
    return Lane(len(holders), len(idle - holders))


def _names(waiting: Iterable[Waiting]) -> set[str]:
    """The names of waiting sessions, in the form of `holders`."""
    return {request.label or f"session {request.session}" for request in waiting}
