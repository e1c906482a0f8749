"""The results that a task must give for a row: fields that it declares in `gives` and that another task needs.

1. An ack is refused unless each row that it ends has every required field, from the ack itself or from before (also if
   it was used and freed since). If another task that gives the field still has the row, that task must give it instead:
   the last one does. A row without a result is ended by a drop.
2. A sealed table gets no more rows, so a task can tell when its pending rows can never become ready: each of them lacks
   a field that some task gives, and no task that gives it is active. A task is active while it has ready or leased
   rows, or a pending row that may become ready. A field that no task gives may still come by an update, so a task waits
   for rows that lack only such fields.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

import numpy as np

from transferqueue.errors import UsageError, listing
from transferqueue.ledger.arrays import BoolArray, IntArray, numbered
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.task_state import OPEN, PENDING, TaskState
from transferqueue.policies import Requeue

NEAR = 0.75
"""Names at least this similar (`difflib`: 2 × common characters / all characters) are suggested as the intended one."""


# ---------------------------------------------------------------- rule 1


def check_required_results(table: TableState, task: TaskState, columns: Collection[str], rows: IntArray) -> None:
    """Raise `UsageError` unless `rows`, acked by `task` with these columns, have all results that the task must
    give."""
    for name in sorted(task.required_results.difference(columns)):
        lacking = rows[_lacks(table, name, rows)]
        for other in table.tasks.values():
            if other is not task and lacking.size and name in other.task.gives:
                lacking = lacking[~np.isin(other.state.a[table.rows.pages.index(lacking)], OPEN)]
        if lacking.size:
            raise UsageError(_refusal(table, task, name, columns, lacking))


def _lacks(table: TableState, name: str, rows: IntArray) -> BoolArray:
    if name not in table.rows.fields:
        return np.ones(rows.size, np.bool_)
    at = table.rows.pages.index(rows)
    lacks: BoolArray = ~(table.rows.has_all(at, table.rows.mask((name,))) | table.rows.were_freed(at, name))
    return lacks


def _refusal(table: TableState, task: TaskState, name: str, columns: Collection[str], lacking: IntArray) -> str:
    mine = task.task.name
    needing = listing(f'"{other}"' for other, state in table.tasks.items() if name in state.needs)
    near = get_close_matches(name, [column for column in columns if column not in table.expected_fields()], 1, NEAR)
    came = f'; it has "{near[0]}", and "{name}" is meant' if near else f"; it has {listing(columns)}" if columns else ""
    drop = "table.drop(rows, reason)" if isinstance(task, GroupTaskState) else "batch.drop(reason, rows)"
    return (
        f'the ack of {numbered(lacking)} by task "{mine}" of table "{table.name}" has no "{name}", which task '
        f'"{mine}" gives and task {needing} needs{came}. Nothing was changed, and the rows stay leased: ack them with '
        f"{name}=..., or end rows that have no result by {drop} (a result that update() brings after the ack does not "
        "belong in gives)"
    )


# ---------------------------------------------------------------- rule 2


def stranded(table: TableState, task: TaskState) -> bool:
    """Whether the task has pending rows of a sealed table, none of which can become ready."""
    if not table.sealed or not task.counts[PENDING] or _requeues_stale(table):
        return False
    return not _may_complete(table, task, _active_tasks(table))


def _requeues_stale(table: TableState) -> bool:
    """Whether a stale row is requeued to an earlier task, which then gives its fields again."""
    pacing = table.pacing
    return pacing is not None and pacing.max_staleness is not None and isinstance(pacing.on_stale, Requeue)


def _active_tasks(table: TableState) -> set[str]:
    """Tasks that may still end rows: the smallest set that rule 2 describes."""
    active = {name for name, task in table.tasks.items() if task.at_work}
    grew = True
    while grew:
        more = {
            name
            for name, task in table.tasks.items()
            if name not in active and task.counts[PENDING] and _may_complete(table, task, active)
        }
        grew = bool(more)
        active |= more
    return active


def _may_complete(table: TableState, task: TaskState, active: Collection[str]) -> bool:
    """Whether some pending row has all fields that only tasks outside of `active` give."""
    gone = [name for name in task.task.needs if no_task_gives(table, name, active)]
    if not gone:
        return True
    if any(name not in table.rows.fields for name in gone):
        return False
    mask, pages = table.rows.mask(gone), table.rows.pages
    for page in pages.pages():
        at = pages.index(pages.rows_of(page))
        at = at[task.state.a[at] == PENDING]
        if at.size and table.rows.has_all(at, mask).any():
            return True
    return False


def no_task_gives(table: TableState, name: str, active: Collection[str]) -> bool:
    """Whether tasks give the field, but none of `active` does."""
    givers = [giver for giver, state in table.tasks.items() if name in state.task.gives]
    return bool(givers) and not any(giver in active for giver in givers)
