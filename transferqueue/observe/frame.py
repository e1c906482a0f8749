"""One frame of `top`: the statistics at one moment, and the rates since the previous frame."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from transferqueue.observe.coordinators import Look
from transferqueue.observe.verdict import QueueVerdict, report
from transferqueue.wire.answers.coordinators import UnreachableCoordinator
from transferqueue.wire.answers.stats import Stats, TableStats, TaskStats


class StatsFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame.

    Attributes:
        address: The coordinator.
        stats: Its statistics.
        rates: Rates of each table since the previous frame.
        interval_s: Seconds of the rates. None: the first frame, which has none.
        verdict: The verdict. None: only `stats` was requested.
    """

    address: str
    interval_s: float | None
    stats: Stats
    rates: dict[str, TableRates]
    verdict: QueueVerdict | None = None


def frame(address: str, before: Stats | None, after: Stats, verdict: QueueVerdict | None = None) -> StatsFrame:
    """The frame of `after`, with rates since `before`."""
    return StatsFrame(
        address=address,
        interval_s=None if before is None else after.now_s - before.now_s,
        stats=after,
        rates={} if before is None else rates(before, after),
        verdict=verdict,
    )


def frames(
    before: Mapping[str, Look | UnreachableCoordinator], after: Mapping[str, Look | UnreachableCoordinator]
) -> list[StatsFrame | UnreachableCoordinator]:
    """The frame of each coordinator, by address. Only coordinators in `before` have rates."""
    return [
        now if isinstance(now, UnreachableCoordinator) else _since(address, before.get(address), now)
        for address, now in after.items()
    ]


def _since(address: str, before: Look | UnreachableCoordinator | None, after: Look) -> StatsFrame:
    earlier = before.stats if isinstance(before, Look) else None
    return frame(address, earlier, after.stats, report(after.stats, after.doctor).verdict)


class TaskRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rows per second that a task leased, finished, and failed."""

    given_s: float
    done_s: float
    failed_s: float


class TableRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rows per second into and out of a table, and of each task in both frames."""

    put_s: float
    done_s: float
    dropped_s: float
    tasks: dict[str, TaskRates]


def rates(before: Stats, after: Stats) -> dict[str, TableRates]:
    """Rates of every table that can be compared between two snapshots of the same server: counters only grow, so a rate
    is a difference.

    None between two runs of a server or within one moment; a table that was made again has no rates.
    """
    seconds = after.now_s - before.now_s
    if before.epoch != after.epoch or seconds <= 0:
        return {}
    both = ((name, before.tables[name], table) for name, table in after.tables.items() if name in before.tables)
    return {name: _table(old, new, seconds) for name, old, new in both if _continues(old, new)}


def _continues(old: TableStats, new: TableStats) -> bool:
    return old.rows_put <= new.rows_put and old.rows_done <= new.rows_done and old.rows_dropped <= new.rows_dropped


def _table(old: TableStats, new: TableStats, seconds: float) -> TableRates:
    return TableRates(
        put_s=(new.rows_put - old.rows_put) / seconds,
        done_s=(new.rows_done - old.rows_done) / seconds,
        dropped_s=(new.rows_dropped - old.rows_dropped) / seconds,
        tasks={name: _task(old.tasks[name], task, seconds) for name, task in new.tasks.items() if name in old.tasks},
    )


def _task(old: TaskStats, new: TaskStats, seconds: float) -> TaskRates:
    return TaskRates(
        given_s=(new.given - old.given) / seconds,
        done_s=(new.done - old.done) / seconds,
        failed_s=(new.failed - old.failed) / seconds,
    )
