"""The last hour of a queue: at each moment, the numbers of working and waiting workers. Does no I/O.

A worker of a task works while it holds a lease, and is idle while it waits for one and holds none. A producer is idle
while it waits to reserve, to put or for memory; producers count as working if rows arrived since the previous moment. A
silent worker counts as silent, even if it holds rows.

The last five minutes stay as sampled. Older moments are joined into one for about every ten seconds, with mean rates
and mean counts. A gap without samples stays a gap: moments on its two sides are not joined.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, TypeVar

import msgspec

from transferqueue.observe.frame import StatsFrame, TableRates
from transferqueue.observe.stages import TableStage

RECENT_S: Final = 300.0
"""Age up to which moments stay as sampled."""
JOINED_S: Final = 10.0
"""Longest time that a joined moment covers."""
KEPT_S: Final = 3600.0
"""Age beyond which moments are forgotten."""
MOMENTS_MAX: Final = 1024
"""Bound on recent moments, and on older ones, if the clock jumps."""
TABLES_MAX: Final = 64
"""Tables of a moment. Further tables have no history."""
_TOUCHING_S: Final = 0.001
_Part = TypeVar("_Part")


class Lane(msgspec.Struct, frozen=True):
    """Numbers of busy, idle and silent workers of one task, or of producers; means in joined moments."""

    busy: float
    idle: float
    silent: float = 0.0


class TableMoment(msgspec.Struct, frozen=True):
    """One table at one moment. put_s and done_s are rows per second since the previous moment."""

    put_s: float
    done_s: float
    producers: Lane
    tasks: dict[str, Lane]


class Moment(msgspec.Struct, frozen=True):
    """All tables at one moment.

    Attributes:
        at_s: Time of the server's clock.
        lasts_s: Seconds before `at_s` that the moment covers.
        tables: The tables by name.
    """

    at_s: float
    lasts_s: float
    tables: dict[str, TableMoment]

    def follows(self, earlier: Moment) -> bool:
        """Whether no time lies between the two."""
        return self.at_s - self.lasts_s <= earlier.at_s + _TOUCHING_S


class Timeline:
    """Keeps the moments of the last hour, older ones joined."""

    def __init__(self) -> None:
        self._older: deque[Moment] = deque(maxlen=MOMENTS_MAX)
        self._recent: deque[Moment] = deque(maxlen=MOMENTS_MAX)

    @property
    def moments(self) -> list[Moment]:
        """All moments, the oldest first."""
        return [*self._older, *self._recent]

    def add(self, frame: StatsFrame, stages: Mapping[str, Sequence[TableStage]], longest_s: float) -> Moment:
        """Add the moment of a frame, and return it.

        Args:
            frame: Its rates are those since the frame before.
            stages: By table, with their present workers.
            longest_s: Longest time that the moment covers, even if the last one is older.
        """
        tables = {name: _table(of, frame.rates.get(name)) for name, of in islice(stages.items(), TABLES_MAX)}
        now = frame.stats.now_s
        moment = Moment(now, min(frame.interval_s or 0.0, longest_s), tables)
        if self._recent and now <= self._recent[-1].at_s:  # another server, whose clock began anew
            self._older.clear()
            self._recent.clear()
        self._recent.append(moment)
        self._join(now - RECENT_S)
        while self._older and self._older[0].at_s < now - KEPT_S:
            self._older.popleft()
        return moment

    def _join(self, before_s: float) -> None:
        """Move moments before `before_s` to the older ones, and join them into the last while it is short enough."""
        while self._recent and self._recent[0].at_s < before_s:
            moment = self._recent.popleft()
            last = self._older[-1] if self._older else None
            if last is not None and moment.follows(last) and last.lasts_s + moment.lasts_s <= JOINED_S + _TOUCHING_S:
                self._older[-1] = joined(last, moment)
            else:
                self._older.append(moment)


def joined(first: Moment, second: Moment) -> Moment:
    """One moment for two that follow each other: rates and counts are means over the time of both."""
    names = dict.fromkeys([*first.tables, *second.tables])
    return Moment(
        second.at_s,
        first.lasts_s + second.lasts_s,
        {
            name: _mean_table([(one.lasts_s, one.tables[name]) for one in (first, second) if name in one.tables])
            for name in names
        },
    )


def _mean_table(parts: Sequence[tuple[float, TableMoment]]) -> TableMoment:
    tasks = dict.fromkeys(task for _, table in parts for task in table.tasks)
    return TableMoment(
        _mean(parts, lambda table: table.put_s),
        _mean(parts, lambda table: table.done_s),
        _mean_lane([(lasts_s, table.producers) for lasts_s, table in parts]),
        {
            task: _mean_lane([(lasts_s, table.tasks[task]) for lasts_s, table in parts if task in table.tasks])
            for task in tasks
        },
    )


def _mean_lane(parts: Sequence[tuple[float, Lane]]) -> Lane:
    return Lane(
        _mean(parts, lambda lane: lane.busy),
        _mean(parts, lambda lane: lane.idle),
        _mean(parts, lambda lane: lane.silent),
    )


def _mean(parts: Sequence[tuple[float, _Part]], value: Callable[[_Part], float]) -> float:
    """The mean of a value, weighted by the seconds of each part; without seconds, the last value."""
    seconds = sum(lasts_s for lasts_s, _ in parts)
    return sum(lasts_s * value(part) for lasts_s, part in parts) / seconds if seconds else value(parts[-1][1])


def _table(stages: Sequence[TableStage], rates: TableRates | None) -> TableMoment:
    put_s, done_s = (rates.put_s, rates.done_s) if rates else (0.0, 0.0)
    lanes = {stage.task: _lane(stage) for stage in stages}
    producers = lanes.pop("", Lane(0, 0))
    return TableMoment(put_s, done_s, msgspec.structs.replace(producers, busy=int(put_s > 0)), lanes)


def _lane(stage: TableStage) -> Lane:
    states = Counter(worker.state for worker in stage.workers)
    return Lane(states["works"], states["waits"], states["silent"])
