"""Requests on rows that were dropped for failing too often: list them, take them again."""

from __future__ import annotations

from itertools import islice

import numpy as np

from transferqueue.errors import Full, NotFound, Sealed
from transferqueue.ledger.arrays import IntArray, decode_rows, numbered
from transferqueue.ledger.requests.put import limit_refills, no_room
from transferqueue.ledger.requests.registry import in_table
from transferqueue.ledger.rows import LIVE
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, apply_stale_policy
from transferqueue.ledger.rules.retry import ATTEMPTS
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import ABSENT, ACKED_WITH_STEP, DONE, PENDING
from transferqueue.limits import DROPPED_ROWS_MAX
from transferqueue.wire.messages import DoneReply, DroppedRow, DroppedRows, ListDropped, RetryRows


@in_table(ListDropped)
def list_dropped(table: TableState, request: ListDropped, session: int, now: float) -> DroppedRows:
    """The kept rows, the latest first."""
    newest = islice(reversed(table.dropped.by_row.items()), request.limit or DROPPED_ROWS_MAX)
    return DroppedRows(
        [
            DroppedRow(row, table.rows.keys.get(row, ""), why.task, ATTEMPTS, why.error, why.worker, now - why.at)
            for row, (why, _, _) in newest
        ]
    )


@in_table(RetryRows)
def retry_rows(table: TableState, request: RetryRows, session: int, now: float) -> DoneReply:
    """Make kept rows live again, without failures. Tasks that were done with a row stay so."""
    rows = np.unique(decode_rows(request.rows))
    _check_retry(table, rows)
    at = table.rows.pages.index(rows)
    before = {name: _states(table, name, rows) for name in table.tasks}
    table.dropped.forget(rows.tolist())
    table.rows_dropped[ATTEMPTS] -= rows.size
    if not table.rows_dropped[ATTEMPTS]:
        del table.rows_dropped[ATTEMPTS]
    table.rows.pages.fate.a[at] = LIVE
    table.rows.tasks_left.a[at] = sum((states < DONE).astype(np.uint8) for states in before.values())
    table.groups.add(rows, table.rows.group_id.a[at], table.rows.facts["group_size"].a[at])
    table.history.add(now, "taken again", rows, session=session)
    for name, task in table.tasks.items():
        task.take_again(rows, at, before[name], now)
    if table.versions is not None:
        table.versions.file(rows, table.rows.version.a[at])
        apply_stale_policy(table, rows, now)
    limit_refills(table)
    apply_group_and_stale_rules(table, now)
    table.wake_tasks()
    return DoneReply(rows.size)


def _check_retry(table: TableState, rows: IntArray) -> None:
    strange = [row for row in rows.tolist() if row not in table.dropped.by_row]
    if strange:
        raise NotFound(
            f'{numbered(np.array(strange))} of table "{table.name}" cannot be taken again: only rows that were dropped '
            f'as "{ATTEMPTS}" can, while dropped() lists them'
        )
    if table.sealed and not table.rows_live:
        raise Sealed(
            f'table "{table.name}" has ended: it is sealed, and its workers have seen the end of the table; read the '
            "rows that dropped() lists, and put them into another table"
        )
    if not table.keeps_ended and (why := no_room(table, rows.size, 0)):
        raise Full(f'rows of table "{table.name}" cannot be taken again: {why}; try again when rows have ended')
    groups = table.rows.group_id.a[at := table.rows.pages.index(rows)]
    table.groups.check_put(table.name, groups, table.rows.facts["group_size"].a[at], table.limits.rows)


def _states(table: TableState, task: str, rows: IntArray) -> IntArray:
    """The states in which rows come back to a task: as they ended for it, or pending."""
    kept = [table.dropped.by_row[row].states.get(task, ABSENT) for row in rows.tolist()]
    return np.array([DONE if state == ACKED_WITH_STEP else state if state >= DONE else PENDING for state in kept])
