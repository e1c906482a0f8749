"""Rows acked with a checkpoint step: they are done once a checkpoint covers the step.

Training progress is safe only in a checkpoint of the model. So rows acked with a step after the last checkpoint stay in
the table, per task:

    LEASED --ack(step=k)--> ACKED_WITH_STEP --checkpointed(c >= k)--> DONE
                                 |
                                 +--rollback(c < k)--> READY at its old place (WAITING_FOR_GROUP until its group is
                                 whole)

- An ack without a step, or with a step that a checkpoint covers already, is final at once.
- Rows that wait for a checkpoint are live and resident. They count against the limits, so memory stays bounded. They
  are not outstanding: no task has work with them, and they do not hold back producers. If they fill the table, the text
  for waiting producers says which step to cover.
- A rollback also ends the leases of the task, as no attempt: the model of their holders is gone, and their acks must
  not count for the next.
- A row that was rolled back and done again is done once: its only fate comes with the checkpoint.
- The end of a table does not wait for a checkpoint. A rollback after it makes rows ready again.
"""

from __future__ import annotations

from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.ledger.requests.ack import expire_lease
from transferqueue.ledger.requests.registry import in_table
from transferqueue.ledger.rows import LIVE
from transferqueue.ledger.rules.finish import finish_rows
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, return_rows
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import ACKED_WITH_STEP, TaskState
from transferqueue.wire.messages import CommitCheckpoint, DoneReply, Rollback


@in_table(CommitCheckpoint)
def checkpointed(table: TableState, request: CommitCheckpoint, session: int, now: float) -> DoneReply:
    """Mark rows of steps up to `request.step` as done. Repeating it for a covered step changes nothing."""
    task = _task(table, request.task)
    table.begin(table.rows.pages.resident)
    rows = task.stepped.take(lambda step: step <= request.step)
    task.counters.checkpoint = max(task.counters.checkpoint, request.step)
    if rows.size:
        table.history.add(now, "checkpointed", rows, task.task.name, detail=f"step {request.step}")
        finish_rows(table, task, rows, now, ACKED_WITH_STEP)
        apply_group_and_stale_rules(table, now)
    return DoneReply(rows.size)


@in_table(Rollback)
def rollback(table: TableState, request: Rollback, session: int, now: float) -> DoneReply:
    """Make rows of steps above `request.step` ready again, and end the leases of the task."""
    task = _task(table, request.task)
    _check_rollback(table, task, request)
    table.begin(table.rows.pages.resident)
    if request.version >= 0:
        _move_clock_back(table, request.version)
    why = f"its task was rolled back to step {request.step}"
    for lease in list(table.core.leases.by_id.values()):
        held = lease.table == table.name and lease.task == task.task.name
        if held and lease.id in table.core.leases.by_id:
            expire_lease(table, lease, why, now, died=False)
    rows = task.stepped.take(lambda step: step > request.step)
    table.history.add(now, "rolled back", rows, task.task.name, detail=f"to step {request.step}")
    return_rows(table, task, rows, failed=False, now=now, before=ACKED_WITH_STEP)
    table.wake_room()
    apply_group_and_stale_rules(table, now)
    return DoneReply(rows.size)


def _task(table: TableState, name: str) -> TaskState:
    """The task of that name; without a name the pacing task, or the only task."""
    if not name and (table.pacing_task is not None or len(table.tasks) == 1):
        return table.pacing_task or next(iter(table.tasks.values()))
    task = table.tasks.get(name)
    if task is not None:
        return task
    if not name:
        raise UsageError(
            f'table "{table.name}" has no pacing, so steps are not known to be those of one task; name one of '
            f"{listing(table.tasks)}"
        )
    raise NotFound(f'task "{name}" is not in table "{table.name}"; it has {listing(table.tasks)}')


def _check_rollback(table: TableState, task: TaskState, request: Rollback) -> None:
    checkpoint = task.counters.checkpoint
    if request.step < checkpoint:
        raise UsageError(
            f'task "{task.task.name}" of table "{table.name}" cannot go back to step {request.step}: rows up to step '
            f"{checkpoint} are final since checkpointed({checkpoint}); restore that checkpoint, or a later one"
        )
    if request.version > table.clock:
        raise UsageError(
            f'the clock of table "{table.name}" is {table.clock}; a rollback does not move it forward to '
            f"{request.version}: use advance"
        )


def _move_clock_back(table: TableState, version: int) -> None:
    """Move the clock back, since the trainer is at an earlier version again. The stale policy applies again as it
    advances.
    """
    table.clock = version
    if table.versions is None:
        return
    rows = table.rows.pages.resident_rows()
    at = table.rows.pages.index(rows)
    live = table.rows.pages.fate.a[at] == LIVE
    table.versions.file(rows[live], table.rows.version.a[at[live]])
