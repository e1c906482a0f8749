"""Requeues rows to an earlier task, which regenerates the fields that it and later tasks gave.

A value is *lost* when its bytes are. That matters once a task waits for it: a task that still has the row, or gets it
back (from a lease, by a rollback, by a requeue). Then the row is requeued to a task that gives the field, as the terms
declare (`gives`). The row is dropped as "lost" instead if no task gives the field, or if each task that gives it

- does not have the row;
- precedes a task that gives nothing and is done with the row, whose effect is outside of the queue (a trained row is
  trained once);
- is, or precedes, a task that takes whole groups and has leased the row's group: members are not regenerated one by
  one.

A row that is on lease stays there: its holder may have read the value already.
"""

from __future__ import annotations

from typing import Final

from transferqueue.ledger.arrays import BoolArray, IntArray
from transferqueue.ledger.rows import retire
from transferqueue.ledger.rules.finish import lose_leases
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.task_order import downstream
from transferqueue.ledger.tasks.task_state import ACKED_WITH_STEP, DONE, READY, WAITING_FOR_GROUP, TaskState

LOST: Final = "lost"


def requeue_rows(table: TableState, target: str, rows: IntArray, what: str, now: float) -> None:
    """Requeue rows to `target`: clear the fields that it and the tasks after it gave. `what` is for the history.

    The caller runs `apply_group_and_stale_rules` afterwards.
    """
    first = table.tasks[target]
    fields, names = downstream([state.task for state in table.tasks.values()], first.task)
    at = table.rows.pages.index(rows)
    known = sorted(name for name in fields if name in table.rows.fields)
    table.rows.clear_fields(at, table.rows.mask(known))
    retire(table, table.column_groups.prune(at, known))
    had = {name: _set_pending(table, table.tasks[name], rows, at) for name in names}
    had[target] = _reset_done_rows(table, first, rows, at, now)
    for task in table.tasks.values():
        task.rerank(rows, at)
    table.history.add(now, what, rows, target)
    table.wake_room()
    for name, mine in had.items():
        redo_or_drop_missing(table, table.tasks[name], mine, now, requeued=fields)


def _set_pending(
    table: TableState,
    task: TaskState,
    rows: IntArray,
    at: IntArray,
    why: str = "its rows went back to an earlier task",
) -> IntArray:
    """Make rows that the task has seen pending again. Returns those that had every field that it needs."""
    seen = task.state.a[at] <= DONE
    rows, at = rows[seen], at[seen]
    had: IntArray = rows[task.state.a[at] >= WAITING_FOR_GROUP]
    lose_leases(table, task, rows, at, why)
    table.rows.tasks_left.a[at[task.state.a[at] == DONE]] += 1
    task.set_pending(rows, at)
    return had


def _reset_done_rows(table: TableState, task: TaskState, rows: IntArray, at: IntArray, now: float) -> IntArray:
    """Make rows that the task is done with ready for it again. Returns those."""
    done = (task.state.a[at] == DONE) | (task.state.a[at] == ACKED_WITH_STEP)
    if done.any():
        _set_pending(table, task, rows[done], at[done])
        ready = done & task.completed(at)
        task.complete(rows[ready], at[ready], now)
        table.wake_task(task.task.name)
    again: IntArray = rows[done]
    return again


def wait_again(table: TableState, field: str, rows: IntArray) -> None:
    """Make live rows, which lack the field now, pending again for each task that needs it. The caller runs
    `apply_group_and_stale_rules` afterwards.
    """
    at = table.rows.pages.index(rows)
    for task in table.tasks.values():
        if field in task.needs:
            _set_pending(table, task, rows, at, "a column that it needs was freed")
    table.wake_room()


# ---------------------------------------------------------------- freed results


def redo_or_drop_missing(
    table: TableState, task: TaskState, rows: IntArray, now: float, requeued: frozenset[str] = frozenset()
) -> None:
    """These rows lost fields that `task` needs. Requeue them to the tasks that give the fields, except fields in
    `requeued`, which are regenerated anyway. Drop rows that no task can repair.
    """
    for name in task.task.needs:
        if name not in requeued and rows.size:
            lacking = ~table.rows.has_all(table.rows.pages.index(rows), table.rows.mask((name,)))
            regenerate_field(table, name, rows[lacking], now)


def regenerate_field(table: TableState, name: str, rows: IntArray, now: float) -> None:
    """Requeue live rows whose value of the field is lost to a task that gives it. Drop rows for which there is none."""
    for giver, state in table.tasks.items():
        if rows.size and name in state.task.gives:
            can = _can_regenerate(table, giver, rows)
            if can.any():
                requeue_rows(table, giver, rows[can], "lost bytes", now)
            rows = rows[~can]
    if rows.size:
        table.to_drop.append((rows, LOST))


def _can_regenerate(table: TableState, name: str, rows: IntArray) -> BoolArray:
    """For which rows the task, and those after it, can run again."""
    at = table.rows.pages.index(rows)
    first = table.tasks[name]
    _, after = downstream([state.task for state in table.tasks.values()], first.task)
    can: BoolArray = first.state.a[at] <= DONE
    for task in [first, *(table.tasks[other] for other in after)]:
        state = task.state.a[at]
        if isinstance(task, GroupTaskState):
            can &= ~task.was_leased(table.groups.units(rows, at)) & (state <= READY)
        elif not task.task.gives:
            can &= (state != DONE) & (state != ACKED_WITH_STEP)
    return can
