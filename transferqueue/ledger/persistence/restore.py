"""Rebuilds the tables and channels of a snapshot in a ledger without tables.

- `restore` changes a copy of the state. The caller replaces its state in one assignment, so an error here changes
  nothing.
- `restored_table` makes a table from its columns, for images too.
- `snapshot_checks` has already checked that ids, states, groups and counts fit each other. Terms are checked here, as
  of any new table, and each restored table must balance.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from transferqueue.errors import Corruption, NotFound, UsageError, listing
from transferqueue.ledger.arrays import BoolArray, IntArray, tally
from transferqueue.ledger.persistence.snapshot import ChannelSnapshot, LedgerSnapshot, TableCounters, TableSnapshot
from transferqueue.ledger.reports.statistics import table_audit
from transferqueue.ledger.requests.tables import check_create, create_table
from transferqueue.ledger.requests.weight_channels import PublishedVersion, WeightChannelState
from transferqueue.ledger.rows import life_of
from transferqueue.ledger.rows.blocks import OwnerBytes
from transferqueue.ledger.rows.row_metadata import CheckedFacts
from transferqueue.ledger.rows.row_pages import LIVE
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, return_rows
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import SharedState, TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.task_state import ACKED_WITH_STEP, KEPT_STALE, LEASED, RETRYING
from transferqueue.limits import PAGE_BYTES
from transferqueue.schema import align
from transferqueue.wire.messages import CreateTable, WrittenBlock

RESTORE_SESSION = -1
"""Owner of the extents of the snapshot's blocks until all are committed."""


def restore(state: LedgerState, snapshot: LedgerSnapshot, now: float) -> None:
    """Add the tables and channels of `snapshot` to a state without any. Each block lies in an extent of its own, of
    whole pages, which belongs to this ledger from now on. Blocks have no copies at first; those of a table with
    replicas lack them, and are copied when further shards have joined.

    `Corruption` if no ledger could have written the snapshot; then the state cannot be used.
    """
    for table in snapshot.tables:
        _check_terms(state, table)
    one = _SnapshotRestore(state, snapshot, now)
    for table in snapshot.tables:
        one.table(table)
    for channel in snapshot.channels:
        one.channel(channel)
    state.core.blocks.return_grants(RESTORE_SESSION)
    state.dropped_tables = dict(snapshot.dropped_tables)
    _check_sums(state, snapshot)


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
        ids, live = snapshot.rows["row_id"], snapshot.rows["fate"] == LIVE
        table, at = restored_table(self._state.core, snapshot, ids[live], self._now)
        self._state.add(table)
        if table.record is not None:
            table.record.life = life_of(table.name, self._now, snapshot.counts.next_row, sorted(self._snapshot.blocks))
        self._blocks(table, snapshot, at)
        for task in table.tasks.values():
            task.rerank(ids, at)
        table.history.add(self._now, "restored", ids)
        if table.ordinals.cursor() != snapshot.counts.cursor:
            raise Corruption(
                f'table "{table.name}" has the cursor {snapshot.counts.cursor}; its rows say {table.ordinals.cursor()}'
            )
        self._end_leases(table, ids, at)

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


# ---------------------------------------------------------------- the columns of a table


def restored_table(
    core: SharedState, stored: TableSnapshot, members: IntArray, now: float
) -> tuple[TableState, IntArray]:
    """A table of these columns, without the places of its values, and with empty ready queues. Returns it, and the
    positions of its rows.

    Args:
        core: of its ledger.
        stored: the columns.
        members: the live rows that have a group, those of one group in their order. Others are ignored.
        now: the time as of which the columns have times.
    """
    table = create_table(core, _request(stored))
    table.restrict_fields(stored.terms.extra_fields)
    table.sealed, table.clock = stored.terms.sealed, stored.terms.version
    ids = stored.rows["row_id"]
    table.rows.pages.restore(stored.counts.next_row, ids)
    at = table.rows.pages.index(ids)
    _restore_rows(table, stored, at, now)
    for name in TableCounters.__struct_fields__:
        setattr(table, name, copy(getattr(stored.counts.table, name)))
    table.flow.refills = dict(stored.counts.refills)
    table.ordinals.spans = stored.ordinals
    table.groups.restore(stored.groups, members, table.rows.group_id.a[table.rows.pages.index(members)])
    for name, task in table.tasks.items():
        task.restore(ids, at, stored.tasks[name])
        task.counters = copy(stored.counts.tasks[name])
        if isinstance(task, GroupTaskState):
            task.restore_groups(stored.forming[name], ids, at, now)
    if table.versions is not None:
        live = stored.rows["fate"] == LIVE
        table.versions.file(ids[live], table.rows.version.a[at[live]])
    return table, at


def _restore_rows(table: TableState, stored: TableSnapshot, at: IntArray, now: float) -> None:
    rows = table.rows
    rows.restore(at, stored.rows, now)
    for name, has_field in stored.has.items():
        rows.set_fields(at[has_field], rows.mask((name,)))
    for name, gone in stored.freed.items():
        rows.mark_freed(at[gone], rows.mask((name,)))
    for name, values in stored.inline.items():
        rows.set_inline(name, at, values)
    for texts, facts in (
        (stored.keys, CheckedFacts(keys=[*stored.keys.values()])),
        (stored.tags, CheckedFacts(tags=[*stored.tags.values()])),
    ):
        ids = np.array([*texts], np.int64)
        rows.set_facts(ids, rows.pages.index(ids), facts)
    left = [(task["state"] <= ACKED_WITH_STEP) | (task["state"] == KEPT_STALE) for task in stored.tasks.values()]
    rows.tasks_left.a[at] = np.sum(left, axis=0) if left else 0
