"""A consistent snapshot of a ledger as plain columns, which any later version of this package can read.

`take_snapshot` copies the state in one step of the ledger, so all of it is of one moment. `restore.restored` rebuilds a
ledger from it.

- A snapshot has: terms; rows with ids, facts, fates and fields, their states and attempts in each task, steps; groups;
  refills; the clock; the cursor; counters; versions of weights; and the places of bytes.
- It lacks: rows that were dropped and could be taken again, sessions, leases, reservations, shared batches, pending
  versions of weights, events. In the restored ledger every lease has ended as no failure, and so has every wait after a
  failure: their rows are ready again, and the rules for returned rows apply to them. Refills that reservations had
  promised are asked for again.
- Times are stored as ages, since another server has another clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.task_state import ACKED_WITH_STEP, TaskState
from transferqueue.policies import Tags
from transferqueue.schema import Field
from transferqueue.wire.messages import BlockLocation, TableTerms, TensorSlice

Columns = dict[str, AnyArray]
"""Named columns of equal length."""


class TaskCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of a task, and its last checkpoint."""

    checkpoint: int
    given: int
    done: int
    failed: int
    dropped: int
    worker_deaths: int = 0


class TableCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Counters of a table. `refills`: group -> members that are asked for again."""

    next_row: int
    rows_put: int
    rows_done: int
    rows_dropped: dict[str, int]
    staleness: dict[int, int]
    refills: dict[int, int]
    cursor: int
    tasks: dict[str, TaskCounts]
    staleness_in_flight: dict[int, int] = {}
    staleness_in_queue: dict[int, int] = {}
    columns_freed: int = 0
    column_bytes_freed: int = 0


@dataclass(slots=True)
class TableSnapshot:
    """One table. Columns of `rows`, `inline`, `has`, `places` and `tasks` cover all resident rows, ascending.

    Args:
        rows: row_id, fate, age_s, stamped and the facts.
        has: which rows have a field.
        inline: values, where rows have the field.
        places: block number (0: none) and slot of fields in blocks.
        tasks: state, attempts, order, step (-1: none).
        groups: group_id, group_size, present.
        forming: for tasks that take groups; left_s: seconds until the deadline, NaN: none.
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


@dataclass(slots=True)
class VersionSnapshot:
    """One version of weights. `blocks`: their numbers. `slices`: fields that are slices of a tensor."""

    version: int
    fields: list[Field]
    blocks: list[int]
    age_s: float
    slices: list[TensorSlice] = field(default_factory=list)


@dataclass(slots=True)
class ChannelSnapshot:
    """One weight channel."""

    name: str
    keep: int
    latest: int
    versions: list[VersionSnapshot]


@dataclass(slots=True)
class LedgerSnapshot:
    """The state of a whole ledger. `blocks`: the location of each named block."""

    tables: list[TableSnapshot] = field(default_factory=list)
    channels: list[ChannelSnapshot] = field(default_factory=list)
    blocks: dict[int, BlockLocation] = field(default_factory=dict)
    dropped_tables: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(at.nbytes for at in self.blocks.values())


FORMING_COLUMNS: Final = ("unit", "state", "lost", "late", "order", "left_s")


def take_snapshot(state: LedgerState) -> LedgerSnapshot:
    """Copy the state that a snapshot keeps; later changes do not affect the copy. O(resident rows), at memory speed."""
    snapshot = LedgerSnapshot(dropped_tables=dict(state.dropped_tables))
    snapshot.tables = [_table(table, state.now) for table in state.tables.values()]
    snapshot.channels = [_channel(channel, state.now) for channel in state.channels.values()]
    numbers: set[int] = {
        block for channel in snapshot.channels for version in channel.versions for block in version.blocks
    }
    for table in snapshot.tables:
        for blocks, _ in table.places.values():
            numbers.update(np.unique(blocks).tolist())
    snapshot.blocks = {number: state.core.blocks.blocks[number].at for number in sorted(numbers - {0})}
    return snapshot


def _table(table: TableState, now: float) -> TableSnapshot:
    rows = _kept_rows(table)
    at = table.rows.pages.index(rows)
    facts = {name: column.a[at] for name, column in table.rows.facts.items()}
    table.ordinals.merge_pending()
    left_out = table.dropped.by_row if not table.keeps_ended else {}
    return TableSnapshot(
        terms=table.terms(),
        counts=_counts(table),
        rows={
            "row_id": rows,
            "fate": table.rows.pages.fate.a[at],
            "age_s": now - table.rows.put_at.a[at],
            "stamped": table.rows.stamped.a[at],
            **facts,
        },
        keys={row: key for row, key in table.rows.keys.items() if row not in left_out},
        tags={row: tags for row, tags in table.rows.tags.items() if row not in left_out},
        has={name: table.rows.has_all(at, table.rows.mask((name,))) for name in table.rows.fields},
        inline={name: column.a[at] for name, column in table.rows.inline.items()},
        places={name: _places(table, name, at) for name in table.rows.fields if name not in table.rows.inline},
        tasks={name: _task(task, at) for name, task in table.tasks.items()},
        groups=_groups(table),
        forming={task.task.name: _forming(task, now) for task in table.group_tasks},
        ordinals=table.ordinals.spans.copy(),
        freed={name: gone for name in table.rows.fields if (gone := table.rows.were_freed(at, name)).any()},
    )


def _kept_rows(table: TableState) -> IntArray:
    """Resident rows, but for those that were dropped and could be taken again."""
    rows = table.rows.pages.resident_rows()
    if table.keeps_ended or not len(table.dropped):
        return rows
    return rows[~np.isin(rows, list(table.dropped.by_row))]


def _counts(table: TableState) -> TableCounts:
    refills = dict(table.flow.refills)
    for group, count in table.flow.promised.items():
        refills[group] = refills.get(group, 0) + count
    tasks = {
        name: TaskCounts(
            task.checkpoint,
            task.counters.given,
            task.counters.done,
            task.counters.failed,
            task.counters.dropped,
            task.counters.worker_deaths,
        )
        for name, task in table.tasks.items()
    }
    return TableCounts(
        table.rows.pages.next_row, table.rows_put, table.rows_done, dict(table.rows_dropped), dict(table.staleness),
        refills, table.ordinals.cursor(), tasks, dict(table.staleness_in_flight), dict(table.staleness_in_queue),
        table.columns_freed, table.column_bytes_freed,
    )  # fmt: skip


def _places(table: TableState, name: str, at: IntArray) -> tuple[IntArray, AnyArray]:
    (places,) = table.parts.locate([name], at)
    has_field = table.rows.has_all(at, table.rows.mask((name,)))
    return np.where(has_field, places.blocks, 0), places.slots


def _task(task: TaskState, at: IntArray) -> Columns:
    state = task.state.a[at]
    step = np.where(state == ACKED_WITH_STEP, task.hold.a[at], -1)
    return {"state": state, "attempts": task.attempts.a[at], "order": task.order.a[at], "step": step}


def _groups(table: TableState) -> Columns:
    ids = np.array(table.groups.known(), np.int64).reshape(-1, 3)
    return {"group_id": ids[:, 0], "group_size": ids[:, 1], "present": ids[:, 2]}


def _forming(task: GroupTaskState, now: float) -> Columns:
    groups = list(task.forming.values())
    left = [np.nan if group.deadline is None else group.deadline - now for group in groups]
    return {
        "unit": np.array([group.unit for group in groups], np.int64),
        "state": np.array([group.state for group in groups], np.uint8),
        "lost": np.array([group.lost for group in groups], np.int64),
        "late": np.array([group.late for group in groups], np.bool_),
        "order": np.array([group.order for group in groups], np.int64),
        "left_s": np.array(left, np.float64),
    }


def _channel(channel: WeightChannelState, now: float) -> ChannelSnapshot:
    versions = [
        VersionSnapshot(number, list(version.fields), list(version.blocks), now - version.at, list(version.slices))
        for number, version in channel.versions.items()
    ]
    return ChannelSnapshot(channel.name, channel.keep, channel.latest, versions)
