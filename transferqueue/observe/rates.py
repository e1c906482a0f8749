"""Rates per second, from two snapshots of the same server: counters only grow, so a rate is a difference.

There is no rate between snapshots that cannot be compared: of two lives of a server, at one moment, or of
a table that was dropped and made again in between (its counters went back).
"""

from __future__ import annotations

import msgspec

from transferqueue.observe.stats import Stats, TableStats, TaskStats


class TaskRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rows per second handed to a task, done by it, and come back failed."""

    given_s: float
    done_s: float
    failed_s: float


class TableRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rows per second into a table and out of it; tasks that are in both snapshots."""

    put_s: float
    done_s: float
    dropped_s: float
    tasks: dict[str, TaskRates]


def rates(before: Stats, after: Stats) -> dict[str, TableRates]:
    """Rates of every table that can be compared between the two."""
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
