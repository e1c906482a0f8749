"""Handles lost bytes: requeues rows that a task still waits for, or ends them, and reports which rows ended.

- A row without a lost value stays as it is. A row with one lacks the value from now on; `rules.requeue` decides whether
  that ends it.
- Results that wait for a last ack are lost with their lease, whose rows become ready again. That is no attempt.
- A version of weights with a lost block is removed (see `requests.weight_channels`).
- Extents of a lost shard are never freed or reused. A session with a grant of one gets the error when it commits.

Lost bytes are never leased again.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transferqueue.ledger.arrays import BoolArray, IntArray
from transferqueue.ledger.requests import weight_channels
from transferqueue.ledger.requests.ack import expire_lease
from transferqueue.ledger.rows import LIVE, blocks_below, forests
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules
from transferqueue.ledger.rules.requeue import LOST, regenerate_field
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import LEASED, READY, TaskState


def lose_blocks(state: LedgerState, blocks: Collection[int], why: str) -> dict[str, list[int]]:
    """Handle the loss of these blocks. `why` is for reports. Returns the rows that ended as lost, by table."""
    gone = frozenset(blocks)
    if not gone:
        return {}
    _expire_leases_with_results_in(state, gone)
    for channel in state.channels.values():
        weight_channels.lose_blocks(channel, state.core.blocks, gone, why)
    numbers = np.array(sorted(gone), np.int64)
    lost = {name: _lose_values(table, numbers, why, state.now) for name, table in state.tables.items()}
    for table in state.tables.values():
        state.core.blocks.sever(table.usage, gone)
    return {name: rows for name, rows in lost.items() if rows}


def values_in(state: LedgerState, blocks: Collection[int]) -> dict[str, dict[str, list[int]]]:
    """The rows that read a field from one of these blocks, by table and field. Changes nothing."""
    numbers = np.array(sorted(blocks), np.int64)
    rows_of_field = {name: _values_in(table, numbers) for name, table in state.tables.items()}
    return {name: fields for name, fields in rows_of_field.items() if fields}


def _values_in(table: TableState, blocks: IntArray) -> dict[str, list[int]]:
    rows = table.rows.pages.resident_rows()
    at = table.rows.pages.index(rows)
    rows_of_field = {name: rows[reads].tolist() for name, reads in _fields_in(table, at, blocks).items()}
    return {name: rows for name, rows in rows_of_field.items() if rows}


def _expire_leases_with_results_in(state: LedgerState, blocks: frozenset[int]) -> None:
    for lease in list(state.core.leases.by_id.values()):
        if lease.staged is not None and not blocks.isdisjoint(lease.staged.blocks):
            why = "the bytes of its results were lost"
            expire_lease(state.tables[lease.table], lease, why, state.now, died=False)


def _lose_values(table: TableState, blocks: IntArray, why: str, now: float) -> list[int]:
    """Clear the lost values of a table. Returns the rows that ended as lost."""
    rows = table.rows.pages.resident_rows()
    below = blocks_below(table.usage.continued, blocks.tolist())
    rows = rows[table.column_groups.lies_in(table.rows.pages.index(rows), below)]
    if not rows.size:
        return []
    live = rows[table.rows.pages.fate.a[table.rows.pages.index(rows)] == LIVE]
    for name, lacking in _clear_fields(table, rows, blocks, why, now).items():
        lacking = lacking[np.isin(lacking, live)]
        regenerate_field(table, name, lacking[_waited_for(table, name, lacking)], now)
    ended = sorted({row for to_drop, reason in table.to_drop if reason == LOST for row in to_drop.tolist()})
    apply_group_and_stale_rules(table, now)
    if ended:
        table.lost[why] = table.lost.get(why, 0) + len(ended)
    table.wake_room()
    return ended


def _clear_fields(table: TableState, rows: IntArray, blocks: IntArray, why: str, now: float) -> dict[str, IntArray]:
    """Clear the fields that lie in the blocks. Returns the rows that had each field there."""
    at = table.rows.pages.index(rows)
    gone = {name: reads for name, reads in _fields_in(table, at, blocks).items() if reads.any()}
    for name, reads in gone.items():
        table.rows.clear_fields(at[reads], table.rows.mask((name,)))
        table.history.add(now, why, rows[reads], detail=name)
    for number, count in table.column_groups.prune(at, gone):
        table.core.blocks.retire(number, count)
    return {name: rows[reads] for name, reads in gone.items()}


def _fields_in(table: TableState, at: IntArray, blocks: IntArray) -> dict[str, BoolArray]:
    """For each field that is not inline, which rows read it from one of the blocks."""
    return {name: _reads_from(table, name, at, blocks) for name in table.rows.fields if name not in table.rows.inline}


def _reads_from(table: TableState, name: str, at: IntArray, blocks: IntArray) -> BoolArray:
    """Which rows read the field from one of the blocks."""
    (places,) = table.column_groups.locate([name], at)
    of_rows = np.where(table.rows.has_all(at, table.rows.mask((name,))), places.blocks, 0)
    if nodes := forests(table.usage.continued, {name: (of_rows, places.slots)}).nodes:
        return nodes[name].rows_in(blocks)
    return np.isin(of_rows, blocks)


def _waited_for(table: TableState, name: str, rows: IntArray) -> BoolArray:
    """For which rows some task waits for the field."""
    at = table.rows.pages.index(rows)
    waits = np.zeros(rows.size, np.bool_)
    for task in table.tasks.values():
        if name in task.needs:
            waits |= (task.state.a[at] <= READY) | _in_unclaimed_share(table, task, at)
    return waits


def _in_unclaimed_share(table: TableState, task: TaskState, at: IntArray) -> BoolArray:
    """Which rows are in shares that no rank has claimed, and thus unread."""
    leases = table.core.leases.by_id
    held = task.hold.a[at]
    unclaimed = [number for number, lease in leases.items() if lease.table == table.name and not lease.holders]
    in_unclaimed: BoolArray = (task.state.a[at] == LEASED) & np.isin(held, unclaimed)
    return in_unclaimed
