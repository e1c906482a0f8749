"""Rows that ended in a table with `Recorded`: what their file says of them, and their end in memory.

1. Rows that have their fate stay resident until `rows_recorded`, and count towards the limits of the table. So a disk
   that is slow, full or broken slows production, and loses nothing.
2. `next_batch` copies all that a file needs but the values, whose blocks the rows keep.
3. `rows_recorded` frees rows: files contain them, or none ever will (`number` 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from transferqueue.errors import InternalError
from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray
from transferqueue.ledger.attributes import Columns
from transferqueue.ledger.rows import LIVE, EndedRows, Forests, Nodes, RowRecord, Slots, TableEvent, forests
from transferqueue.ledger.rules.finish import free_rows
from transferqueue.ledger.table_state import TableState
from transferqueue.limits import NODES_MAX
from transferqueue.policies import Recorded, Tags
from transferqueue.schema import Field
from transferqueue.wire.messages import BlockLocation


@dataclass(slots=True)
class EndedBatch:
    """Rows to be written. Columns are in the order of `rows`.

    Args:
        number: of the first file that contains some of them.
        now: the time as of which `put_age_s` is. `ended`: fates, reasons, steps and times.
        facts: numeric facts by name.
        attempts: by task, leases that failed.
        has: which rows have a field. `inline`: the values of inline fields; `places`: block and slot of the others.
        nodes: of those fields of which rows continue others.
        events: of the table, since the first of the rows was put; `workers`: names of its sessions.
    """

    table: str
    terms: Recorded
    life: str
    number: int
    now: float
    rows: IntArray
    ended: list[EndedRows]
    put_age_s: AnyArray
    facts: Columns
    attempts: Columns
    tags: dict[int, Tags]
    fields: dict[str, Field]
    has: dict[str, BoolArray]
    inline: Columns
    places: dict[str, tuple[IntArray, AnyArray]]
    blocks: dict[int, BlockLocation]
    events: list[TableEvent]
    workers: dict[int, str]
    nodes: dict[str, Nodes] = field(default_factory=dict)


CROWDED_SHARE: Final = 8
"""A table is crowded when one of so many of its rows waits for its file, or all but one of so many bytes are taken."""


def records_at_once(table: TableState) -> bool:
    """Whether rows that have ended wait for no others to share a file with: they take much of the room of the table, or
    it is sealed and has no live row."""
    if table.sealed and not table.rows_live:
        return True
    bytes_max = table.limits.bytes_max
    full = bytes_max is not None and table.usage.bytes * CROWDED_SHARE > bytes_max * (CROWDED_SHARE - 1)
    return full or _record_of(table).waiting * CROWDED_SHARE >= table.limits.rows


def next_batch(table: TableState, most: int, now: float) -> EndedBatch | None:
    """The rows that ended first, about `most`, fewer if they continue many; None if there are none. Changes nothing."""
    record = _record_of(table)
    ended = record.next_rows(most)
    if not ended:
        return None
    rows, has, places, found = _values_of(table, ended, NODES_MAX)
    if found.fit is not None:
        ended = record.first_rows(max(found.fit, 1))
        rows, has, places, found = _values_of(table, ended)
    at, store, known = table.rows.pages.index(rows), table.rows, table.core.blocks.blocks
    put_at = store.put_at.a[at]
    numbers = {number for blocks, _ in places.values() for number in np.unique(blocks).tolist()}
    numbers.update(number for nodes in found.nodes.values() for number in np.unique(nodes.blocks).tolist())
    return EndedBatch(
        table=table.name,
        terms=terms_of(table),
        life=record.life,
        number=record.files + 1,
        now=now,
        rows=rows,
        ended=ended,
        put_age_s=now - put_at,
        facts={name: column.a[at] for name, column in store.facts.items()},
        attempts={name: task.attempts.a[at] for name, task in table.tasks.items()},
        tags={row: store.tags[row] for row in store.tags.keys() & rows.tolist()} if store.tags else {},
        fields=dict(store.fields),
        has=has,
        inline={name: column.a[at] for name, column in store.inline.items()},
        places=places,
        nodes=found.nodes,
        blocks={number: known[number].at for number in sorted(numbers - {0})},
        events=table.history.after(float(put_at.min())),
        workers=record.workers | table.core.labels,
    )


def _values_of(
    table: TableState, ended: list[EndedRows], most: float = math.inf
) -> tuple[IntArray, dict[str, BoolArray], dict[str, tuple[IntArray, Slots]], Forests]:
    """The rows, which fields they have, the places of these, and what they continue, as of `forests`."""
    rows = np.concatenate([one.rows for one in ended])
    at, store = table.rows.pages.index(rows), table.rows
    has = {name: store.has_all(at, store.mask((name,))) for name in store.fields}
    places = table.column_groups.places(at, {name: mask for name, mask in has.items() if name not in store.inline})
    return rows, has, places, forests(table.usage.continued, places, most)


def rows_recorded(table: TableState, number: int, rows: IntArray) -> int:
    """Files up to `number` contain these rows (0: none ever will). Frees those that are still here; returns their
    number."""
    record, rows = _record_of(table), np.unique(rows)
    at, here = table.rows.pages.find(rows)
    here &= table.rows.pages.fate.a[at] != LIVE
    rows, at = rows[here], at[here]
    record.recorded(number, rows)
    if number:
        table.rows_recorded += rows.size
    else:
        table.rows_unrecorded += rows.size
    if rows.size:
        free_rows(table, rows, at)
        table.wake_room()
    return int(rows.size)


def terms_of(table: TableState) -> Recorded:
    """The retention of a table that records its rows."""
    if not isinstance(table.retention, Recorded):
        raise InternalError(f'table "{table.name}" records no rows')
    return table.retention


def _record_of(table: TableState) -> RowRecord:
    if table.record is None:
        raise InternalError(f'table "{table.name}" records no rows')
    return table.record
