"""Rows go back to an earlier task: what it gave, and what was made of that, is made again.

A value is *gone* when its bytes are lost. That matters as soon as a task waits for it: one to which the row is open, or
comes back (from a lease, by a rollback, by going back itself). Then the row goes back to a task that gives the field, as
the terms declare (`gives`). It ends as dropped ("lost") instead if no task gives the field, or each that does

- does not have the row (any more);
- comes before a task that gives nothing and is done with the row: its effect is outside (a trained row is trained once);
- comes before, or is, a task that takes whole groups and has handed over the row's group: members are not made again one by one.

A row that is on lease stays there: its holder may have read what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from transferqueue.ledger.rows.arrays import BoolArray, IntArray
from transferqueue.ledger.rules.finish import lose_leases, retire
from transferqueue.ledger.table import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.task_state import ACKED_WITH_STEP, DONE, READY, WAITING_FOR_GROUP, TaskState
from transferqueue.policies import Task

LOST: Final = "lost"


def downstream(tasks: Sequence[Task], first: Task) -> tuple[frozenset[str], list[str]]:
    """Fields that `first` gave, directly or through others, and the tasks that need one of them."""
    fields = set(first.gives)
    after: dict[str, None] = {}
    grew = True
    while grew:
        grew = False
        for task in tasks:
            if task.name not in after and fields & set(task.needs):
                after[task.name] = None
                fields |= set(task.gives)
                grew = True
    return frozenset(fields), list(after)


def requeue_rows(table: TableState, target: str, rows: IntArray, what: str, now: float) -> None:
    """Rows go back to `target`: what it and those after it gave is cleared. what: for the history. `conclude` has to follow."""
    first = table.tasks[target]
    fields, names = downstream([state.task for state in table.tasks.values()], first.task)
    at = table.rows.pages.index(rows)
    known = sorted(name for name in fields if name in table.rows.fields)
    table.rows.clear_fields(at, table.rows.mask(known))
    retire(table, table.parts.prune(at, known))
    had = {name: _set_pending(table, table.tasks[name], rows, at) for name in names}
    had[target] = _reset_done_rows(table, first, rows, at, now)
    for task in table.tasks.values():
        task.rerank(rows, at)
    table.history.add(now, what, rows, target)
    table.wake_room()
    for name, mine in had.items():
        redo_or_drop_missing(table, table.tasks[name], mine, now, requeued=fields)


def _set_pending(table: TableState, task: TaskState, rows: IntArray, at: IntArray) -> IntArray:
    """Rows that the task saw are pending to it. Returns those that had all it needs."""
    seen = task.state.a[at] <= DONE
    rows, at = rows[seen], at[seen]
    had: IntArray = rows[task.state.a[at] >= WAITING_FOR_GROUP]
    lose_leases(table, task, rows, at, "its rows went back to an earlier task")
    table.rows.tasks_left.a[at[task.state.a[at] == DONE]] += 1
    task.set_pending(rows, at)
    return had


def _reset_done_rows(table: TableState, task: TaskState, rows: IntArray, at: IntArray, now: float) -> IntArray:
    """Rows that the task did, it does again. Returns those."""
    done = (task.state.a[at] == DONE) | (task.state.a[at] == ACKED_WITH_STEP)
    if done.any():
        _set_pending(table, task, rows[done], at[done])
        ready = done & task.completed(at)
        task.complete(rows[ready], at[ready], now)
        table.wake_task(task.task.name)
    again: IntArray = rows[done]
    return again


# ---------------------------------------------------------------- what is gone


def redo_or_drop_missing(
    table: TableState, task: TaskState, rows: IntArray, now: float, requeued: frozenset[str] = frozenset()
) -> None:
    """`task` had these live rows with all it needs. What it lacks by now, `requeued` apart, is made again, or they end."""
    for name in task.task.needs:
        if name not in requeued and rows.size:
            lacking = ~table.rows.has_all(table.rows.pages.index(rows), table.rows.mask((name,)))
            regenerate_field(table, name, rows[lacking], now)


def regenerate_field(table: TableState, name: str, rows: IntArray, now: float) -> None:
    """Live rows whose value of the field is gone go back to a task that gives it; where there is none, they are to_drop."""
    for giver, state in table.tasks.items():
        if rows.size and name in state.task.gives:
            can = _can_regenerate(table, giver, rows)
            if can.any():
                requeue_rows(table, giver, rows[can], "lost bytes", now)
            rows = rows[~can]
    if rows.size:
        table.to_drop.append((rows, LOST))


def _can_regenerate(table: TableState, name: str, rows: IntArray) -> BoolArray:
    """Which rows the task, and those after it, can have anew."""
    at = table.rows.pages.index(rows)
    first = table.tasks[name]
    _, after = downstream([state.task for state in table.tasks.values()], first.task)
    can: BoolArray = first.state.a[at] <= DONE
    for task in [first, *(table.tasks[other] for other in after)]:
        state = task.state.a[at]
        if isinstance(task, GroupTaskState):
            can &= ~task.handed_over(table.groups.units(rows, at)) & (state <= READY)
        elif not task.task.gives:
            can &= (state != DONE) & (state != ACKED_WITH_STEP)
    return can
