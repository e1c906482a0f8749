"""What happens to rows whose lease failed: they wait as their task's `Retry` says, and at last are dropped.

A lease fails if its holder says so (`ReleaseRequest.failed`). A lease that expires, or loses its holder, does not: the worker died, and the
row need not be why, so its rows are ready at once.
"""

from __future__ import annotations

from typing import Final

from transferqueue.ledger.rows.arrays import IntArray, tally
from transferqueue.ledger.table import TableState
from transferqueue.ledger.tasks.task_state import TaskState

ATTEMPTS: Final = "attempts"
"""The reason with which rows are dropped that failed as often as they may."""


def postpone_failed(table: TableState, task: TaskState, rows: IntArray, at: IntArray, now: float) -> None:
    """Count a failure of leased rows, and have each wait for its next try, or drop it."""
    task.counters.failed += rows.size
    task.attempts.a[at] += 1
    failures = task.attempts.a[at]
    for number, _ in tally(failures):
        chosen = failures == number
        task.postpone(rows[chosen], at[chosen], now + task.task.retry.wait_s(number))
    _set_deadline(table, task)
    most = task.task.retry.attempts
    if most is not None and (spent := failures >= most).any():
        table.to_drop.append((rows[spent], ATTEMPTS))


def resume_due(table: TableState, task: TaskState, now: float) -> None:
    """Make rows ready whose wait is over. The caller runs `apply_group_and_stale_rules` afterwards."""
    task.resumed(task.retries.due(now), now)
    _set_deadline(table, task)
    table.wake_task(task.task.name)


def _set_deadline(table: TableState, task: TaskState) -> None:
    at = task.retries.next
    if at is None:
        task.retries.deadline = None
    elif at != task.retries.deadline:
        table.core.deadlines.add(task.retries, at)
