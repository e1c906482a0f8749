"""A consistent snapshot of a ledger as plain columns, which any later version of this package can read.

`take_snapshot` copies the state in one step of the ledger, so all of it is of one moment. `restore.restored` rebuilds a
ledger from it.

- A snapshot has: terms; rows with ids, facts, fates and fields, their states and attempts in each task, steps; groups;
  refills; the clock; the cursor; counters; versions of weights; and the places of bytes.
- It lacks: rows that were dropped and could be taken again, rows that wait for their file, sessions, leases,
  reservations, shared batches, pending versions of weights, events. In the restored ledger every lease has ended as no
  failure, and so has every wait after a failure: their rows are ready again, and the rules for returned rows apply to
  them. Refills that reservations had promised are asked for again.
- Times are stored as ages, since another server has another clock.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray
from transferqueue.ledger.attributes import COUNT_MAX, SECONDS_MAX, Columns, Count
from transferqueue.ledger.requests.flow_control import VERSION_MAX
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.rows import LIVE, Continued, blocks_above
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import TaskCounters
from transferqueue.limits import REASONS_MAX, TEXT_CHARS_MAX
from transferqueue.policies import Tags
from transferqueue.schema import Field
from transferqueue.wire.messages import BlockLocation, TableTerms, TensorRange

_REASONS_OURS_MAX = 64
"""Reasons of the ledger itself for which rows are dropped. The limit for callers does not count them."""
_Reason = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
_Lags = dict[Annotated[int, msgspec.Meta(ge=-VERSION_MAX, le=VERSION_MAX)], Count]


class TableCounters(msgspec.Struct, forbid_unknown_fields=True):
    """Counters of a table: attributes of `TableState` with these names."""

    rows_put: Count
    rows_done: Count
    rows_dropped: Annotated[dict[_Reason, Count], msgspec.Meta(max_length=REASONS_MAX + _REASONS_OURS_MAX)]
    staleness: _Lags
    staleness_in_flight: _Lags
    staleness_in_queue: _Lags
    columns_freed: Count
    column_bytes_freed: Count
    rows_recorded: Count = 0
    rows_unrecorded: Count = 0


class TableCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers of a table. `refills`: group -> members that are asked for again."""

    next_row: Count
    cursor: Count
    refills: dict[int, int]
    table: TableCounters
    tasks: dict[str, TaskCounters]


@dataclass(slots=True)
class TableSnapshot:
    """One table. Columns of `rows`, `inline`, `has`, `places` and `tasks` cover all resident rows, ascending.

    Args:
        rows: row_id, and `row_state.ATTRIBUTES`.
        has: which rows have a field.
        inline: values, where rows have the field.
        places: block number (0: none) and slot of fields in blocks.
        continued: blocks of which values continue others.
        tasks: `task_state.STORED`.
        groups: `groups.ATTRIBUTES`.
        forming: `group_task.ATTRIBUTES`, for tasks that take groups.
    """

    terms: TableTerms
    counts: TableCounts
    rows: Columns
    keys: dict[int, str]
    tags: dict[int, Tags]
    has: dict[str, BoolArray]
    inline: Columns
    places: dict[str, tuple[IntArray, AnyArray]]
    tasks: dict[str, Columns]
    groups: Columns
    forming: dict[str, Columns]
    ordinals: IntArray
    """Spans of ordinals that have ended: ``[spans, 2]``."""
    freed: dict[str, BoolArray] = field(default_factory=dict)
    """Which rows had a field until it was freed; only fields of which a row did."""
    continued: dict[int, Continued] = field(default_factory=dict)


class VersionSnapshot(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One version of weights.

    Args:
        slices: fields that are slices of a tensor, or differences.
        blocks: numbers of its blocks; the files of a snapshot lack them.
    """

    version: Annotated[int, msgspec.Meta(ge=0, le=VERSION_MAX)]
    fields: list[Field]
    age_s: Annotated[float, msgspec.Meta(ge=-SECONDS_MAX, le=SECONDS_MAX)]
    slices: list[TensorRange] = []
    blocks: list[int] = []


class ChannelSnapshot(msgspec.Struct, forbid_unknown_fields=True):
    """One weight channel."""

    name: str
    keep: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
    latest: Annotated[int, msgspec.Meta(ge=-1, le=VERSION_MAX)]
    versions: list[VersionSnapshot]


@dataclass(slots=True)
class LedgerSnapshot:
    """The state of a whole ledger. `blocks`: the location of each named block."""

    tables: list[TableSnapshot] = field(default_factory=list)
    channels: list[ChannelSnapshot] = field(default_factory=list)
    blocks: dict[int, BlockLocation] = field(default_factory=dict)
    dropped_tables: dict[str, Count] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(at.nbytes for at in self.blocks.values())


def take_snapshot(state: LedgerState) -> LedgerSnapshot:
    """Copy the state that a snapshot keeps; later changes do not affect the copy. O(resident rows), at memory speed."""
    snapshot = LedgerSnapshot(dropped_tables=dict(state.dropped_tables))
    snapshot.tables = [_table(table, state.now) for table in state.tables.values()]
    snapshot.channels = [_channel(channel, state.now) for channel in state.channels.values()]
    numbers: set[int] = {
        block for channel in snapshot.channels for version in channel.versions for block in version.blocks
    }
    for table, taken in zip(state.tables.values(), snapshot.tables, strict=True):
        own = {number for blocks, _ in taken.places.values() for number in np.unique(blocks).tolist()}
        every = blocks_above(table.usage.continued, own) or own
        taken.continued = {one: table.usage.continued[one] for one in every & table.usage.continued.keys()}
        numbers |= every
    snapshot.blocks = {number: state.core.blocks.blocks[number].at for number in sorted(numbers - {0})}
    return snapshot


def _table(table: TableState, now: float) -> TableSnapshot:
    rows = _kept_rows(table)
    at = table.rows.pages.index(rows)
    snapshot = columns_of_table(table, rows, now)
    if table.record is not None:
        live = set(rows.tolist())
        snapshot.tags = {row: tags for row, tags in snapshot.tags.items() if row in live}
    elif not table.keeps_ended:
        for texts in (snapshot.keys, snapshot.tags):
            for row in texts.keys() & table.dropped.by_row.keys():
                del texts[row]
    for group, count in table.flow.promised.items():
        snapshot.counts.refills[group] = snapshot.counts.refills.get(group, 0) + count
    placed = {name: has for name, has in snapshot.has.items() if name not in table.rows.inline}
    snapshot.places = table.column_groups.places(at, placed)
    return snapshot


def columns_of_table(table: TableState, rows: IntArray, now: float) -> TableSnapshot:
    """The columns of these rows, without the places of their values; times as of `now`."""
    at = table.rows.pages.index(rows)
    table.ordinals.merge_pending()
    return TableSnapshot(
        terms=table.terms(),
        counts=_counts(table),
        rows={"row_id": rows} | table.rows.stored(at, now),
        keys=dict(table.rows.keys),
        tags=dict(table.rows.tags),
        has={name: table.rows.has_all(at, table.rows.mask((name,))) for name in table.rows.fields},
        inline={name: column.a[at] for name, column in table.rows.inline.items()},
        places={},
        tasks={name: task.stored(at) for name, task in table.tasks.items()},
        groups=table.groups.stored(),
        forming={task.task.name: task.stored_groups(now) for task in table.group_tasks},
        ordinals=table.ordinals.spans.copy(),
        freed={name: gone for name in table.rows.fields if (gone := table.rows.were_freed(at, name)).any()},
    )


def _kept_rows(table: TableState) -> IntArray:
    """Resident rows, but for those that were dropped and could be taken again, and those that wait for their file: the
    server that ended them writes it."""
    rows = table.rows.pages.resident_rows()
    if table.record is not None:
        live: IntArray = rows[table.rows.pages.fate.a[table.rows.pages.index(rows)] == LIVE]
        return live
    if table.keeps_ended or not len(table.dropped):
        return rows
    return rows[~np.isin(rows, list(table.dropped.by_row))]


def _counts(table: TableState) -> TableCounts:
    counters = TableCounters(*(copy(getattr(table, name)) for name in TableCounters.__struct_fields__))
    tasks = {name: copy(task.counters) for name, task in table.tasks.items()}
    return TableCounts(table.rows.pages.next_row, table.ordinals.cursor(), dict(table.flow.refills), counters, tasks)


def _channel(channel: WeightChannelState, now: float) -> ChannelSnapshot:
    versions = [
        VersionSnapshot(number, list(version.fields), now - version.at, list(version.ranges), list(version.blocks))
        for number, version in channel.versions.items()
    ]
    return ChannelSnapshot(channel.name, channel.keep, channel.latest, versions)
