"""Refuses requests that would take the server too long, before they change anything.

All clients wait while a request is carried out. Its cost follows from its rows and from the values, facts, keys, tags,
groups and tasks of each. So that is estimated and bounded (`limits.check_work`), and not the rows alone: a put of
65,536 rows of plain numbers is carried out, as is one of 16,384 rows with keys, in groups of eight.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import NO_ROWS, AnyArray, IntArray, ascends, runs_of
from transferqueue.ledger.rows import StagedCommit
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import LEASED, TaskState
from transferqueue.limits import (
    FEW_ROWS,
    GROUP_NS,
    KEY_NS,
    LEASE_NS,
    MEMBER_NS,
    RANK_NS,
    RANKED_NS,
    READ_KEY_NS,
    READ_TAG_NS,
    RERANKED_NS,
    ROW_NS,
    SHARED_NS,
    SPACE_NS,
    TAG_NS,
    TAGGED_NS,
    TASK_NS,
    UNIT_NS,
    VALUE_NS,
    VERSION_NS,
    check_work,
)
from transferqueue.wire.messages import LeaseRequest


def check_put_work(table: TableState, staged: StagedCommit) -> None:
    """Raise `UsageError` if these new rows are too many for one request."""
    if staged.rows <= FEW_ROWS:
        return
    row_ns = ROW_NS + SPACE_NS * len(table.rows.inline) + _values_ns(staged) + _tasks_ns(table.tasks.values())
    ids = staged.facts.numbers.get("group_id", NO_ROWS)
    members = ids[ids >= 0]
    groups, units = 0, staged.rows
    if members.size:
        groups = _distinct(members)
        units += groups - members.size
        row_ns += MEMBER_NS
    check_work(
        f"a put of {_described(staged, groups)} into {counted(len(table.tasks), 'task')}",
        staged.rows,
        row_ns * staged.rows
        + groups * GROUP_NS
        + units * UNIT_NS * len(table.group_tasks)
        + _versions_ns(table, staged)
        + _described_ns(staged),
    )


def check_change_work(table: TableState, staged: StagedCommit, rows: IntArray) -> None:
    """Raise `UsageError` if these columns or facts of rows that exist are too many for one request."""
    if staged.rows <= FEW_ROWS:
        return
    names, facts = frozenset(staged.names), frozenset(staged.facts.numbers)
    reached = [
        task for task in table.tasks.values() if task.needs & names or task.ranker.ranked_by & facts or task.views
    ]
    units = _units(table, rows) if any(task in reached for task in table.group_tasks) else 0
    check_work(
        f"a change of {_described(staged, 0)} for {counted(len(reached), 'task')}",
        staged.rows,
        (ROW_NS + _values_ns(staged) + sum(TASK_NS if task.ranker.by_arrival else RERANKED_NS for task in reached))
        * staged.rows
        + _versions_ns(table, staged)
        + units * UNIT_NS * len(table.group_tasks)
        + _described_ns(staged),
    )


def check_end_work(table: TableState, rows: IntArray) -> None:
    """Raise `UsageError` if these are too many rows to be dropped by one request. A group may end with each of them."""
    if rows.size <= FEW_ROWS and not table.group_tasks:
        return
    ended, units = rows.size, 0
    if table.group_tasks:
        at, resident = table.rows.pages.find(rows)
        ids = np.unique(table.rows.group_id.a[at[resident]])
        # Of a row that ended and stays, the group may be gone.
        known = [unit for unit in ids[ids >= 0].tolist() if table.groups.get(unit) is not None]
        units = rows.size - int(resident.sum()) + len(known)
        ended = max(ended, len(table.groups.members_of(known)[0]))
    check_work(
        f"the end of {rows.size:,} rows" + (f", with {ended:,} rows of their groups" if ended > rows.size else ""),
        rows.size,
        (ROW_NS + VALUE_NS + TASK_NS * len(table.tasks) + (MEMBER_NS if units else 0)) * ended
        + units * (GROUP_NS + UNIT_NS) * len(table.group_tasks)
        + _leases_of(table, rows) * LEASE_NS,
    )


def check_lease_work(table: TableState, request: LeaseRequest) -> None:
    """Raise `UsageError` if a lease of so many rows takes too long."""
    ranks = request.world if request.world > 1 else 0
    rows = min(request.rows or request.groups * table.groups.largest, table.rows_live)
    if rows <= FEW_ROWS and not ranks:
        return
    row_ns = read_ns(table, len(request.fields or ())) + (SHARED_NS if ranks else 0)
    check_work(
        f"a lease of {rows:,} rows" + (f" for {ranks:,} ranks" if ranks else ""), rows, row_ns * rows + ranks * RANK_NS
    )


def _leases_of(table: TableState, rows: IntArray) -> int:
    """How many leases have some of the rows; 0 if they are few."""
    most = min(len(table.core.leases.by_id), rows.size * len(table.tasks))
    if most <= FEW_ROWS:
        return 0
    at, _ = table.rows.pages.find(rows)
    holds = [task.hold.a[at][task.state.a[at] == LEASED] for task in table.tasks.values() if task.counts[LEASED]]
    return sum(map(_distinct, holds))


def read_ns(table: TableState, fields: int) -> float:
    """The cost of a row in a reply with so many fields."""
    rows = table.rows
    tags = TAGGED_NS + READ_TAG_NS * rows.tags_most if rows.tags else 0
    return ROW_NS + VALUE_NS * (fields + len(rows.facts_given)) + (READ_KEY_NS if rows.keys else 0) + tags


def _versions_ns(table: TableState, staged: StagedCommit) -> float:
    versions = staged.facts.numbers.get("policy_version")
    return 0 if versions is None or table.versions is None else VERSION_NS * _distinct(versions)


def _values_ns(staged: StagedCommit) -> float:
    return VALUE_NS * (len(staged.inline) + len(staged.placed) + len(staged.facts.numbers))


def _tasks_ns(tasks: Iterable[TaskState]) -> float:
    return sum(TASK_NS if task.ranker.by_arrival else RANKED_NS for task in tasks)


def _described_ns(staged: StagedCommit) -> float:
    keys, tags = staged.facts.keys, staged.facts.tags
    of_tags = TAGGED_NS * len(tags) + TAG_NS * sum(map(len, tags)) if tags is not None else 0
    return of_tags + (KEY_NS * len(keys) if keys is not None else 0)


def _described(staged: StagedCommit, groups: int) -> str:
    has = [f"{groups:,} groups"] if groups else []
    has += ["keys"] if staged.facts.keys is not None else []
    has += [f"{sum(map(len, staged.facts.tags)):,} tags"] if staged.facts.tags is not None else []
    return f"{staged.rows:,} rows" + (f" with {' and '.join(has)}" if has else "")


def _units(table: TableState, rows: IntArray) -> int:
    return _distinct(table.groups.units(rows, table.rows.pages.index(rows)))


def _distinct(values: AnyArray) -> int:
    if values.size and ascends(values):
        return runs_of(values)[0].size
    return int(np.unique(values).size)
