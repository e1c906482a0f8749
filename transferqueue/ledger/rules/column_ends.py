"""When a column of a row ends though the row lives on: its value is freed, and its bytes with it.

1. In a table with `AckedColumns` a value is freed when the last task that holds its field is done with the row, or will
   never get it. Tasks hold the fields that they need; while stale rows may be requeued, the pacing task holds the
   fields for that (`tasks.task_order.tasks_that_hold`). A row that was acked with a step is not done before a
   checkpoint covers the step.
2. A field that no task needs has no last task: its values end with their rows. Inline values stay, since they take no
   block.
3. In any table `free_columns` frees values that a caller names, unless a task that holds the field still has work with
   the row.
4. A freed value is not set. The row remembers that it was freed until the field is written again, so that a
   reader's error says so (`ColumnFreed`), and no task has to give it a second time.
5. The bytes of a block are freed when none of its values is needed or viewed, as for rows (`rows.blocks`). Clients
   write columns that end with different tasks into different blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from transferqueue.errors import UsageError
from transferqueue.ledger.arrays import BoolArray, IntArray, numbered
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import ABSENT, ACKED_WITH_STEP, DONE, OPEN, STATES, TaskState
from transferqueue.policies import AckedColumns

FREED: Final = "columns freed"
"""The name of the event in the history of a row. Its detail lists the fields."""
_FIELDS_TOLD: Final = 16
"""Fields that one event names: the history is bounded in events, so each of them must be."""
_AT_WORK: Final = (*OPEN, ACKED_WITH_STEP)
"""States of a row in which a task may read its values, or may get it (again)."""


def end_columns(table: TableState, task: TaskState, rows: IntArray, now: float) -> None:
    """Free the values of live rows that ended because `task` is done with the rows, or will never get them."""
    if not rows.size or not isinstance(table.retention, AckedColumns):
        return
    name, at = task.task.name, table.rows.pages.index(rows)
    over = {
        field: _ended(table, field, holders, at)
        for field, holders in table.holders.items()
        if name in holders and field in table.rows.fields and field not in table.rows.inline
    }
    free_values(table, over, rows, now, task=name)


def _ended(table: TableState, field: str, holders: Collection[str], at: IntArray) -> BoolArray:
    """Which rows have a value of the field that no task needs."""
    over = table.rows.has_all(at, table.rows.mask((field,)))
    for name in holders:
        state = table.tasks[name].state.a[at]
        over &= (state == DONE) | (state == ABSENT)
    return over


def free_values(
    table: TableState, chosen: Mapping[str, BoolArray], rows: IntArray, now: float, *, task: str = "", session: int = 0
) -> int:
    """Free stored values; `chosen[field]` masks `rows`. Returns the number freed. `task`, `session`: for the
    history."""
    fields_of_rows: dict[bytes, list[str]] = {}
    for field, of_rows in chosen.items():
        if of_rows.any():
            fields_of_rows.setdefault(of_rows.tobytes(), []).append(field)
    before, freed = table.usage.bytes, 0
    for of_rows_bytes, fields in fields_of_rows.items():
        those = rows[np.frombuffer(of_rows_bytes, np.bool_)]
        at = table.rows.pages.index(those)
        table.rows.mark_freed(at, table.rows.mask(fields))
        for number, refs in table.column_groups.prune(at, fields):
            table.core.blocks.retire(number, refs)
        table.history.add(now, FREED, those, task, session, _named(fields))
        freed += those.size * len(fields)
    if freed:
        table.columns_freed += freed
        table.column_bytes_freed += before - table.usage.bytes
        table.wake_room()
    return freed


def _named(fields: Sequence[str]) -> str:
    more = f" and {len(fields) - _FIELDS_TOLD} more" if len(fields) > _FIELDS_TOLD else ""
    return ", ".join(fields[:_FIELDS_TOLD]) + more


def _may_name(detail: str, field: str) -> bool:
    return field in detail.split(", ") or detail.endswith(" more")


def check_not_needed(table: TableState, fields: Sequence[str], rows: IntArray, at: IntArray) -> None:
    """Raise `UsageError` if a task that holds one of the fields still has work with one of the rows that have it."""
    for field in fields:
        has_field = table.rows.has_all(at, table.rows.mask((field,)))
        for name in table.holders.get(field, ()):
            state = table.tasks[name].state.a[at]
            needed = has_field & np.isin(state, _AT_WORK)
            if needed.any():
                raise UsageError(
                    f'column "{field}" of {numbered(rows[needed])} in table "{table.name}" is not freed: task "{name}" '
                    f"may still need it (the row is {STATES[int(state[needed][0])]} there). Nothing was changed: free "
                    "it when the task is done with the row, or pass again=True, and the task waits until the column "
                    "is written again"
                )


def why_freed(table: TableState, field: str, rows: IntArray, now: float) -> str:
    """When and by whom the column of these rows, which had it, was freed: a sentence for the reader."""
    row = int(rows[0])
    events = [event for event in table.history.of(row) if event.what == FREED and _may_name(event.detail, field)]
    text = f'column "{field}" of {numbered(rows)} in table "{table.name}" was freed'
    if not events:
        return f"{text} (the time was evicted from the log); its rows stay without it"
    event = events[-1]
    ago = f"{max(0.0, now - event.at):.1f} s ago"
    if event.task:
        return (
            f'{text} {ago}: task "{event.task}" was the last that needs it, and was done with the row. A task that '
            "still reads it names it in its needs; make the table with retention=Acked() to keep columns as long as "
            "their rows"
        )
    who = table.core.labels.get(event.session, f"session {event.session}")
    return f"{text} {ago} by free_columns, which {who} called; write it again with update()"
