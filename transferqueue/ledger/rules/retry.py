"""Rows whose lease failed wait as their task's `Retry` says, and at last are dropped.

A lease fails if its holder says so (`ReleaseRequest.failed`). A lease that expires, or loses its holder, does not: the
worker died, perhaps not because of the row, so its rows are ready at once. While all leases of a task fail,
`tasks.circuit` holds.
"""

from __future__ import annotations

from typing import Final

from transferqueue.ledger.arrays import IntArray, by_value
from transferqueue.ledger.rows import LastFailure
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.leases import LeaseState
from transferqueue.ledger.tasks.retries import PostponedRows
from transferqueue.ledger.tasks.task_state import TaskState

ATTEMPTS: Final = "attempts"
"""The reason with which rows are dropped that failed as often as they may."""


def lease_failed(
    table: TableState, task: TaskState, lease: LeaseState, rows: IntArray, reason: str, now: float
) -> None:
    """Record that the work of a lease failed with these rows, before they return."""
    worker = next(iter(lease.holders.values()), 0)
    task.errors.add(reason, table.core.labels.get(worker, ""), now)
    fresh = bool((task.attempts.a[table.rows.pages.index(rows)] == 0).any())
    if task.circuit.failed(lease.id, rows, fresh=fresh, now=now):
        table.core.deadlines.add(task.circuit, now + task.circuit.next_trial(task.task.retry))


def work_succeeded(table: TableState, task: TaskState, now: float) -> None:
    """A row was acked after failures: a paused task resumes, and its waiting rows are ready at once."""
    paused = task.circuit.opened is not None
    task.circuit.reset()
    if paused:
        _resume(table, task, [*task.retries.due(float("inf")), *task.retries.parked()], now)


def postpone_failed(table: TableState, task: TaskState, rows: IntArray, at: IntArray, now: float) -> None:
    """Count a failure of leased rows, and have each wait for its next try, or drop it."""
    task.counters.failed += rows.size
    counts = task.circuit.counts_failures(now)
    task.attempts.a[at] += counts
    failures = task.attempts.a[at]
    if task.circuit.opened is None:
        for number, chosen in by_value(failures):
            task.postpone(rows[chosen], at[chosen], now + task.task.retry.wait_s(number))
    else:
        task.postpone(rows, at, None)
    _set_deadline(table, task)
    most = task.task.retry.attempts
    if counts and most is not None and (spent := failures >= most).any():
        table.dropped.expect(rows[spent], LastFailure(task.task.name, *task.errors.last, now))
        table.to_drop.append((rows[spent], ATTEMPTS))


def resume_due(table: TableState, task: TaskState, now: float) -> None:
    """Make rows ready whose wait is over. The caller runs `apply_group_and_stale_rules` afterwards."""
    _resume(table, task, task.retries.due(now), now)


def trial_due(table: TableState, task: TaskState, now: float) -> None:
    """Have the next trial of a paused task begin. The caller runs `apply_group_and_stale_rules` afterwards."""
    circuit = task.circuit
    if circuit.due or not task.ready_units:  # no request took the ready rows, or there are none
        _resume(table, task, task.retries.parked(), now)
    circuit.due = True
    if task.retries.has_parked:
        table.core.deadlines.add(circuit, now + task.task.retry.wait_s(circuit.trials))
    table.wake_task(task.task.name)


def trial_ended(table: TableState, task: TaskState, lease: int) -> None:
    """A lease of the trial of a paused task has ended."""
    circuit = task.circuit
    if circuit.trial.pop(lease, 0) is None and not circuit.trial:
        table.wake_task(task.task.name)


def _resume(table: TableState, task: TaskState, waits: list[PostponedRows], now: float) -> None:
    task.resumed(waits, now)
    _set_deadline(table, task)
    table.wake_task(task.task.name)


def _set_deadline(table: TableState, task: TaskState) -> None:
    at = task.retries.next
    if at is None:
        task.retries.deadline = None
    elif at != task.retries.deadline:
        table.core.deadlines.add(task.retries, at)
