"""Bytes that are gone: what can be made again is, whatever else was read from them ends, counted and named.

A live row goes back to the tasks that gave what it lost, as their terms declare (`gives`), and what was made of that is cleared
with it. It ends as dropped ("lost") instead if

- it lost a field that no task gives, or that comes from a task which does not have the row (any more);
- a task after those, which gives nothing, is done with it: its effect is outside (a trained row is trained once);
- a task among them takes whole groups, and has handed over the row's group: members are not made again one by one.

A finished row that is kept for reading is freed; results that waited for a last ack go with their lease, whose rows return;
a version of weights is kept no more. Lost bytes are never handed over again.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transferqueue.ledger import returns
from transferqueue.ledger.arrays import BoolArray, IntArray
from transferqueue.ledger.fates import drop_rows, free_rows
from transferqueue.ledger.gathering import GroupTaskState
from transferqueue.ledger.pages import LIVE
from transferqueue.ledger.settle import conclude, downstream, send_back
from transferqueue.ledger.state import State
from transferqueue.ledger.table import Table
from transferqueue.ledger.tasks import DONE, READY, STEPPED

REASON = "lost"


def lose(state: State, blocks: Collection[int]) -> dict[str, list[int]]:
    """The bytes of these blocks are gone. Returns the rows that ended for it, by table."""
    _give_up_staged(state, frozenset(blocks))
    _forget_versions(state, frozenset(blocks))
    numbers = np.array(sorted(blocks), np.int64)
    lost = {name: _lose_rows(table, numbers, state.now) for name, table in state.tables.items()}
    return {name: rows for name, rows in lost.items() if rows}


def _give_up_staged(state: State, blocks: frozenset[int]) -> None:
    for lease in list(state.core.leases.by_id.values()):
        if lease.staged is not None and not blocks.isdisjoint(lease.staged.blocks):
            returns.give_up(state.tables[lease.table], lease, "the bytes of its results were lost", state.now)


def _forget_versions(state: State, blocks: frozenset[int]) -> None:
    for channel in state.channels.values():
        for number, version in list(channel.versions.items()):
            if not blocks.isdisjoint(version.blocks):
                for block in channel.versions.pop(number).blocks:
                    state.core.blocks.retire(block, 1)


def _lose_rows(table: Table, blocks: IntArray, now: float) -> list[int]:
    rows = table.rows.pages.resident_rows()
    rows = rows[table.parts.lies_in(table.rows.pages.index(rows), blocks)]
    if not rows.size:
        return []
    live = rows[table.rows.pages.fate.a[table.rows.pages.index(rows)] == LIVE]
    again = _made_again(table, live, blocks, now)
    rows = rows[~np.isin(rows, again)]
    drop_rows(table, live[~np.isin(live, again)], REASON, now)
    conclude(table, now)
    at, there = table.rows.pages.find(rows)
    if there.any():
        free_rows(table, rows[there], at[there])
    table.wake_room()
    lost: list[int] = rows.tolist()
    return lost


def _made_again(table: Table, rows: IntArray, blocks: IntArray, now: float) -> IntArray:
    """Send back those rows that can be; returns them."""
    at = table.rows.pages.index(rows)
    lost = {name: there for name in table.rows.fields if (there := _lost(table, name, at, blocks)).any()}
    can = np.ones(rows.size, np.bool_)
    wanted: dict[str, BoolArray] = {}
    for name, there in lost.items():
        givers = [task for task, state in table.tasks.items() if name in state.task.gives]
        can &= bool(givers) | ~there
        for task in givers:
            wanted[task] = wanted.get(task, False) | there
    for task, there in wanted.items():
        can &= ~there | _can_again(table, task, rows, at)
    for task, there in wanted.items():
        if (there & can).any():
            send_back(table, task, rows[there & can], "lost bytes", now)
    again: IntArray = rows[can]
    return again


def _lost(table: Table, name: str, at: IntArray, blocks: IntArray) -> BoolArray:
    """Which rows read the field from one of the blocks."""
    if name in table.rows.inline:
        return np.zeros(at.size, np.bool_)
    (places,) = table.parts.locate([name], at)
    return table.rows.has_all(at, table.rows.mask((name,))) & np.isin(places.blocks, blocks)


def _can_again(table: Table, name: str, rows: IntArray, at: IntArray) -> BoolArray:
    """Which rows the task, and those after it, can have anew (see above)."""
    first = table.tasks[name]
    can: BoolArray = first.state.a[at] <= DONE
    for task in [
        first,
        *(table.tasks[one] for one in downstream([one.task for one in table.tasks.values()], first.task)[1]),
    ]:
        state = task.state.a[at]
        if isinstance(task, GroupTaskState):
            out = task.handed_over(table.groups.units(rows, at))
            can &= ~out & (state <= READY)
        elif not task.task.gives:
            can &= (state != DONE) & (state != STEPPED)
    return can
