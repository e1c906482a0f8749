"""Rebuilds the tables and channels of a snapshot in a ledger without tables.

- `restored` changes a copy of the state and returns it. The caller replaces its state in one assignment, so an error
  here changes nothing.
- `snapshot_checks` has already checked that ids, states, groups and counts fit each other. Terms are checked here, as
  of any new table, and each restored table must balance.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from transferqueue.errors import Corruption, NotFound, UsageError, listing
from transferqueue.ledger.arrays import BoolArray, IntArray, tally
from transferqueue.ledger.persistence import image
from transferqueue.ledger.persistence.snapshot import ChannelSnapshot, LedgerSnapshot, TableCounters, TableSnapshot
from transferqueue.ledger.reports.statistics import table_audit
from transferqueue.ledger.requests.tables import check_create, create_table
from transferqueue.ledger.requests.weight_channels import PublishedVersion, WeightChannelState
from transferqueue.ledger.rows.blocks import OwnerBytes
from transferqueue.ledger.rows.row_metadata import CheckedFacts
from transferqueue.ledger.rows.row_pages import LIVE
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, return_rows
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.task_state import ACKED_WITH_STEP, KEPT_STALE, LEASED, RETRYING, TaskState
from transferqueue.limits import PAGE_BYTES
from transferqueue.schema import align
from transferqueue.wire.messages import CreateTable, WrittenBlock

RESTORE_SESSION = -1
"""Owner of the extents of the snapshot's blocks until all are committed."""


def restored(state: LedgerState, snapshot: LedgerSnapshot, now: float) -> LedgerState:
    """Return a copy of the state with the tables and channels of `snapshot`. Each block lies in an extent of its own,
    of whole pages, which belongs to this ledger from now on. Blocks have no copies at first; those of a table with
    replicas lack them, and are copied when further shards have joined.

    `UsageError` if a table or channel exists, `Corruption` if no ledger could have written the snapshot. `state` does
    not change.
    """
    check_empty(state)
    copied, _ = image.read(image.write(state, 0), state.core.plugins)
    _restore(copied, snapshot, now)
    _check_sums(copied, snapshot)
    return copied


def check_empty(state: LedgerState) -> None:
    """Raise `UsageError` if a table or channel exists."""
    if state.tables or state.channels:
        existing = listing([*state.tables, *state.channels])
        raise UsageError(
            f"a snapshot is restored into an empty deployment; this one has {existing}: start another server"
        )


def _check_sums(state: LedgerState, snapshot: LedgerSnapshot) -> None:
    """Check that each restored table balances."""
    for table in snapshot.tables:
        made = state.tables[table.terms.name]
        audit = table_audit(made, state.now)
        if not audit.balanced:
            raise Corruption(f'table "{made.name}" does not balance: {audit}')


def _check_terms(state: LedgerState, snapshot: TableSnapshot) -> None:
    """Check that a table with these terms can be created."""
    try:
        check_create(state.core, _request(snapshot))
    except NotFound:
        raise  # this server lacks a selector plugin: the files may be intact
    except UsageError as error:
        raise Corruption(f'table "{snapshot.terms.name}" has terms that no table can have: {error}') from error


def _restore(state: LedgerState, snapshot: LedgerSnapshot, now: float) -> None:
    for table in snapshot.tables:
        _check_terms(state, table)
    restore = _SnapshotRestore(state, snapshot, now)
    for table in snapshot.tables:
        restore.table(table)
    for channel in snapshot.channels:
        restore.channel(channel)
    state.core.blocks.return_grants(RESTORE_SESSION)
    state.dropped_tables = dict(snapshot.dropped_tables)


def _request(snapshot: TableSnapshot) -> CreateTable:
    terms = snapshot.terms
    return CreateTable(
        terms.name, terms.fields, terms.tasks, terms.limits, terms.pacing, terms.retention, replicas=terms.replicas
    )


class _SnapshotRestore:
    """Writes one snapshot into a state."""

    def __init__(self, state: LedgerState, snapshot: LedgerSnapshot, now: float) -> None:
        self._state, self._snapshot, self._now = state, snapshot, now

    def table(self, snapshot: TableSnapshot) -> None:
        """Restore a table."""
        table = create_table(self._state.core, _request(snapshot))
        self._state.tables[table.name] = table
        table.restrict_fields(snapshot.terms.extra_fields)
        table.sealed, table.clock = snapshot.terms.sealed, snapshot.terms.version
        ids = snapshot.rows["row_id"]
        table.rows.pages.restore(snapshot.counts.next_row, ids)
        at = table.rows.pages.index(ids)
        self._rows(table, snapshot, at)
        self._blocks(table, snapshot, at)
        _counts(table, snapshot)
        live = snapshot.rows["fate"] == LIVE
        table.groups.restore(snapshot.groups, ids[live], snapshot.rows["group_id"][live])
        for name, task in table.tasks.items():
            self._task(task, snapshot, name, ids, at)
        if table.versions is not None:
            table.versions.file(ids[live], table.rows.version.a[at[live]])
        table.history.add(self._now, "restored", ids)
        if table.ordinals.cursor() != snapshot.counts.cursor:
            raise Corruption(
                f'table "{table.name}" has the cursor {snapshot.counts.cursor}; its rows say {table.ordinals.cursor()}'
            )
        self._end_leases(table, ids, at)

    def _rows(self, table: TableState, snapshot: TableSnapshot, at: IntArray) -> None:
        rows = table.rows
        rows.restore(at, snapshot.rows, self._now)
        for name, has_field in snapshot.has.items():
            rows.set_fields(at[has_field], rows.mask((name,)))
        for name, gone in snapshot.freed.items():
            rows.mark_freed(at[gone], rows.mask((name,)))
        for name, values in snapshot.inline.items():
            rows.set_inline(name, at, values)
        for texts, facts in (
            (snapshot.keys, CheckedFacts(keys=[*snapshot.keys.values()])),
            (snapshot.tags, CheckedFacts(tags=[*snapshot.tags.values()])),
        ):
            ids = np.array([*texts], np.int64)
            rows.set_facts(ids, rows.pages.index(ids), facts)
        left = [(task["state"] <= ACKED_WITH_STEP) | (task["state"] == KEPT_STALE) for task in snapshot.tasks.values()]
        rows.tasks_left.a[at] = np.sum(left, axis=0) if left else 0

    def _blocks(self, table: TableState, snapshot: TableSnapshot, at: IntArray) -> None:
        refs: dict[int, int] = {}
        for blocks, _ in snapshot.places.values():
            for number, count in tally(blocks[blocks > 0]):
                refs[number] = refs.get(number, 0) + count
        new = {number: self._commit(number, table.usage, count) for number, count in refs.items()}
        for name, (blocks, slots) in snapshot.places.items():
            parts = table.column_groups.parts_of((name,))
            for number, count in tally(blocks[blocks > 0]):
                chosen = blocks == number
                table.column_groups.write(at[chosen], count, parts, new[number], slots[chosen])

    def _commit(self, number: int, usage: OwnerBytes, refs: int) -> int:
        blocks, at = self._state.core.blocks, self._snapshot.blocks[number]
        extent = blocks.grant(RESTORE_SESSION, at.shard, at.offset, align(max(at.nbytes, 1), PAGE_BYTES))
        placed = WrittenBlock(
            extent.id, at.offset, at.nbytes, at.rows, list(at.fields), list(at.counts), None, at.checksum
        )
        return blocks.commit([placed], usage, [refs])[0]

    def _task(self, task: TaskState, snapshot: TableSnapshot, name: str, ids: IntArray, at: IntArray) -> None:
        task.restore(ids, at, snapshot.tasks[name])
        task.counters = copy(snapshot.counts.tasks[name])
        if isinstance(task, GroupTaskState):
            task.restore_groups(snapshot.forming[name], ids, at, self._now)
        else:
            task.rerank(ids, at)

    def _end_leases(self, table: TableState, ids: IntArray, at: IntArray) -> None:
        for task in table.tasks.values():
            for state in (LEASED, RETRYING):
                out: BoolArray = task.state.a[at] == state
                return_rows(table, task, ids[out], failed=False, now=self._now, before=state)
        apply_group_and_stale_rules(table, self._now)
        table.wake_room()
        table.wake_tasks()
        table.core.effects.wake("table", table.name)

    def channel(self, snapshot: ChannelSnapshot) -> None:
        """Restore a weight channel."""
        channel = self._state.channels[snapshot.name] = WeightChannelState(
            snapshot.name, snapshot.keep, snapshot.latest
        )
        for version in snapshot.versions:
            numbers = [self._commit(number, channel.usage, 1) for number in version.blocks]
            channel.versions[version.version] = PublishedVersion(
                version.fields, numbers, self._now - version.age_s, version.slices
            )
        self._state.core.effects.wake("channel", snapshot.name)


def _counts(table: TableState, snapshot: TableSnapshot) -> None:
    for name in TableCounters.__struct_fields__:
        setattr(table, name, copy(getattr(snapshot.counts.table, name)))
    table.flow.refills = dict(snapshot.counts.refills)
    table.ordinals.spans = snapshot.ordinals
