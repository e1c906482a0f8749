"""How rows end: done, or dropped with a reason; never both, never without a record.

A row gets its fate once, from `finish_rows` (all tasks are done with it) or `drop_rows`. They remove the row from every
task and lease, count it, and then free it (`Acked`), keep it readable (`Manual`), or keep it until a file contains it
(`Recorded`). So ``rows_put = rows_live + rows_done + rows_dropped`` holds after every request.

The end of a row may cause others: a dropped member makes its group incomplete, and the policy of the group may drop the
rest. `TableState.to_drop` collects rows that will be dropped; `apply_group_and_stale_rules` repeats until nothing is
left to do.
"""

from __future__ import annotations

import numpy as np

from transferqueue.ledger.arrays import BoolArray, Index, IntArray, by_value
from transferqueue.ledger.effects import LeaseEnded
from transferqueue.ledger.rows import DONE, DROPPED, LIVE, EndedRows, RowRecord, SpentRow, blocks_above, discard, retire
from transferqueue.ledger.rules.column_ends import end_columns
from transferqueue.ledger.rules.retry import ATTEMPTS, trial_ended
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.leases import LeaseState
from transferqueue.ledger.tasks.task_state import DONE as FINISHED
from transferqueue.ledger.tasks.task_state import LEASED, TaskState
from transferqueue.limits import SPENT_BLOCKS_MAX


def drop_rows(table: TableState, rows: IntArray, reason: str, now: float) -> None:
    """Drop the rows that are still live, for every task."""
    at, live = table.rows.pages.find(rows)
    live &= table.rows.pages.fate.a[at] == LIVE
    if not live.any():
        return
    rows, at = rows[live], at[live]
    if table.dropped.expected:
        _keep_dropped(table, rows, at, reason)
    if table.record is not None:
        _record(table, table.record, rows, DROPPED, reason, np.full(rows.size, -1, np.int64), now)
    for task in table.tasks.values():
        _remove_from_leases(table, task, rows, at)
        task.remove(rows, at)
    table.rows_dropped[reason] = table.rows_dropped.get(reason, 0) + rows.size
    table.history.add(now, "dropped", rows, detail=reason)
    _set_fate(table, rows, at, DROPPED)
    while (oldest := table.dropped.beyond(table.limits.bytes_max)) is not None:
        _let_go(table, np.array([oldest], np.int64))
    if table.sealed:
        table.wake_tasks()


def finish_rows(
    table: TableState, task: TaskState, rows: IntArray, now: float, before: int = LEASED, step: int = -1
) -> None:
    """Record that `task` is done with rows: leased ones, acked with `step` (-1: none), or those acked before. Rows that
    no task needs are done."""
    at = table.rows.pages.where(rows)
    task.finish(rows, at, before)
    if table.record is not None and before == LEASED:
        task.hold.a[at] = step
    left = table.rows.tasks_left.a[at].tobytes()
    ended = left.count(1)
    table.rows.tasks_left.a[at] = 0 if ended == rows.size else np.frombuffer(left, np.uint8) - np.uint8(1)
    if not ended:
        end_columns(table, task, rows, now)
        return
    if ended < rows.size:
        last = np.frombuffer(left, np.uint8) == 1
        end_columns(table, task, rows[~last], now)
        rows = rows[last]
        at = table.rows.pages.where(rows)
    if table.record is not None:
        steps = [np.where(each.state.a[at] == FINISHED, each.hold.a[at], -1) for each in table.tasks.values()]
        _record(table, table.record, rows, DONE, "", np.max(steps, axis=0), now)
    table.rows_done += rows.size
    table.history.add(now, "done", rows)
    _set_fate(table, rows, at, DONE)


def _set_fate(table: TableState, rows: IntArray, at: Index, fate: int) -> None:
    table.ordinals.ended(at)
    if len(table.groups) or table.group_tasks:
        for unit in table.groups.leave(rows, at, dropped=fate == DROPPED):
            table.flow.forget(unit)
            for task in table.group_tasks:
                task.forget(unit)
    if table.keeps_ended:
        table.rows.pages.fate.a[at] = fate
    elif fate == DROPPED and len(table.dropped):
        kept = np.array([row in table.dropped.by_row for row in rows.tolist()], np.bool_)
        table.rows.pages.fate.a[at] = fate
        if not kept.all():
            free_rows(table, rows[~kept], table.rows.pages.index(rows[~kept]))
    else:
        free_rows(table, rows, at)
    table.wake_room()


def _record(
    table: TableState, record: RowRecord, rows: IntArray, fate: int, reason: str, steps: IntArray, now: float
) -> None:
    """Have rows, which are about to get their fate, written into a file. Their keys are free from now on."""
    keys = {row: key for row in rows.tolist() if (key := table.rows.keys.get(row))} if table.rows.keys else {}
    if keys:
        table.rows.unname(list(keys))
    record.end(EndedRows(now, fate, reason, rows.copy(), steps, keys))


def _keep_dropped(table: TableState, rows: IntArray, at: IntArray, reason: str) -> None:
    """Keep those of the rows, which are about to be dropped, that failed too often; not those that continue so many
    that it takes too long."""
    states = {name: task.state.a[at].tolist() for name, task in table.tasks.items()}
    names = [name for name in table.rows.fields if name not in table.rows.inline]
    blocks = [places.blocks.tolist() for places in table.column_groups.locate(names, at)]
    left = SPENT_BLOCKS_MAX
    for position, row in enumerate(rows.tolist()):
        failure = table.dropped.expected.pop(row, None)
        if failure is not None and reason == ATTEMPTS and table.record is None:
            own = {column[position] for column in blocks} - {0}
            mine = blocks_above(table.usage.continued, own, len(own) + left)
            if mine is None:
                continue
            left -= len(mine) - len(own)
            live = [block for number in mine if (block := table.core.blocks.blocks.get(number)) is not None]
            extents = {extent.id: extent.nbytes for block in live for extent in block.extents}
            known = {name: values[position] for name, values in states.items()}
            table.dropped.keep(row, SpentRow(failure, known, extents))


def _let_go(table: TableState, rows: IntArray) -> None:
    """Rows that were kept cannot be taken again."""
    table.dropped.forget(rows.tolist())
    if not table.keeps_ended:
        free_rows(table, rows, table.rows.pages.index(rows))


def free_rows(table: TableState, rows: IntArray, at: Index) -> None:
    """Free rows that have their fate: their bytes, keys, tags, and pages without a row."""
    if len(table.dropped):
        table.dropped.forget(rows.tolist())
    retire(table, table.column_groups.release(at))
    table.known_puts.forget(table.rows.free(rows, at))


def lose_leases(table: TableState, task: TaskState, rows: IntArray, at: IntArray, why: str) -> IntArray:
    """Remove those of `rows` that are leased from their leases, since others may lease them. Returns them. A lease that
    loses its last row so has ended: its holder must not act on these rows."""
    lost, leases = _remove_from_leases(table, task, rows, at)
    for lease in leases:
        if lease.holders and not lease.left:
            end_lease(table, lease, why, by_holder=False)
    return lost


def _remove_from_leases(
    table: TableState, task: TaskState, rows: IntArray, at: IntArray
) -> tuple[IntArray, list[LeaseState]]:
    """Remove those of `rows` that are leased from their leases. Returns them, and the leases."""
    leased: BoolArray = task.state.a[at] == LEASED
    lost: IntArray = rows[leased]
    if not lost.size:
        return lost, []
    leases = []
    for number, positions in by_value(task.hold.a[at[leased]]):
        lease = table.core.leases.by_id[number]
        lease.remove(lost[positions])
        leases.append(lease)
    return lost, leases


def end_lease(table: TableState, lease: LeaseState, why: str, *, by_holder: bool) -> None:
    """End a lease. `by_holder`: the holder ended it; otherwise the loss is counted and logged; its
    holders learn it at their next use of it."""
    if not by_holder:
        for session in lease.holders.values():
            table.core.effects.add(LeaseEnded(session, lease.id, why))
    if lease.staged is not None:
        drop_staged(table, lease)
        table.wake_room()
    if lease.share is not None:
        table.shared_batches[lease.task, *lease.share].share_ended(lease.id)
    table.core.blocks.unpin_all(-lease.id)
    table.core.leases.end(lease, why)
    if (task := table.tasks[lease.task]).circuit.trial:
        trial_ended(table, task, lease.id)


def drop_staged(table: TableState, lease: LeaseState) -> None:
    """Discard results that were never committed."""
    if lease.staged is not None:
        discard(table, lease.staged)
        lease.staged = None
