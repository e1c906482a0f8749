"""Bytes that are gone: whatever was read from them ends, counted and named, and is never handed over again.

A live row that reads anything from a lost block ends as dropped ("lost"); a finished row that is kept for reading is
freed; results that waited for a last ack go with their lease, whose rows return; a version of weights is kept no more.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transferqueue.ledger import returns
from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.fates import drop_rows, free_rows
from transferqueue.ledger.pages import LIVE
from transferqueue.ledger.settle import conclude
from transferqueue.ledger.state import State
from transferqueue.ledger.table import Table

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
    drop_rows(table, rows[table.rows.pages.fate.a[table.rows.pages.index(rows)] == LIVE], REASON, now)
    conclude(table, now)
    at, there = table.rows.pages.find(rows)
    if there.any():
        free_rows(table, rows[there], at[there])
    table.wake_room()
    lost: list[int] = rows.tolist()
    return lost
