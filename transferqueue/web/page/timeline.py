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
        found = Moment(frame.stats.now_s, tables)
        self.moments.append(found)
        return found


def _table(name: str, table: TableStats, frame: StatsFrame) -> TableMoment:
    rates = frame.rates.get(name)
    put_s, done_s = (rates.put_s, rates.done_s) if rates else (0.0, 0.0)
    waiting = [one for one in frame.stats.waiting if one.table == name]
    producers = Lane(int(put_s > 0), len(_names(one for one in waiting if one.request in _PRODUCING)))
    return TableMoment(
        put_s, done_s, producers, {task: _lane(task, shown, waiting) for task, shown in table.tasks.items()}
    )


def _lane(task: str, shown: TaskStats, waiting: Iterable[Waiting]) -> Lane:
    holders = set(shown.holders)
    idle = _names(one for one in waiting if one.request == "Lease" and one.task == task)
    return Lane(len(holders), len(idle - holders))


def _names(waiting: Iterable[Waiting]) -> set[str]:
    """The names of waiting sessions, in the form of `holders`."""
    return {one.label or f"session {one.session}" for one in waiting}
