"""Applies the policies for incomplete groups and for rows over the staleness bound.

Incomplete groups. The policy of a forming group is applied when the group changed and (a) a member was dropped, (b) its
deadline passed, or (c) the table is sealed:

- `DropGroup`: on (a) and (b), all members are dropped at once.
- `DeliverPartial`: the group is dropped as soon as it can no longer reach `min_size`. Otherwise it is queued when every
  member that was put is ready or dropped, or when its deadline passes. Members that are not ready then are dropped.
- `Refill`: on (a), it asks for the dropped members again. On (b), it asks for all absent members, ends the leases that
  other tasks hold on members that are not ready, and starts the deadline again.
- On (c), when no member is pending and the group is not whole, `DeliverPartial` applies as above. The other two drop
  the group, since no further row comes. So every table ends.

Stale rows. A row is over the bound when ``clock - policy_version > max_staleness``. `on_stale` is applied when the
clock moves, when the row gets a version, and when it returns from a lease of the pacing task. So no row over the bound
is ever in the queue of that task. Rows that the task has on lease were leased within the bound, and stay.
"""

from __future__ import annotations

import numpy as np

from transferqueue.ledger.arrays import BoolArray, IntArray
from transferqueue.ledger.rows import LIVE
from transferqueue.ledger.rules.column_ends import end_columns
from transferqueue.ledger.rules.finish import drop_rows, lose_leases
from transferqueue.ledger.rules.requeue import redo_or_drop_missing, requeue_rows
from transferqueue.ledger.rules.retry import postpone_failed
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import FORMING, FormingGroup, GroupTaskState
from transferqueue.ledger.tasks.task_order import downstream
from transferqueue.ledger.tasks.task_state import KEPT_STALE, LEASED, OPEN, PENDING, READY, TaskState
from transferqueue.policies import DeliverPartial, KeepStale, Refill, Requeue

INCOMPLETE = "group_incomplete"


def apply_group_and_stale_rules(table: TableState, now: float) -> None:
    """Apply the rules until every changed group is resolved and no row is left to drop."""
    group_tasks = table.group_tasks
    while group_tasks or table.to_drop:
        for task in group_tasks:
            _drop_late_members(table, task, now)
        if table.to_drop:
            drop_rows(table, *_next_to_drop(table), now)
            continue
        unsettled = [task for task in group_tasks if task.changed]
        if not unsettled:
            return
        _resolve_groups(table, unsettled[0], now)


def _next_to_drop(table: TableState) -> tuple[IntArray, str]:
    """The rows that will be dropped first, and all others with their reason: a drop for each of thousands of groups
    takes long."""
    reason = table.to_drop[0][1]
    chosen = [rows for rows, why in table.to_drop if why == reason]
    table.to_drop[:] = [left for left in table.to_drop if left[1] != reason]
    return (chosen[0] if len(chosen) == 1 else np.unique(np.concatenate(chosen))), reason


# ---------------------------------------------------------------- groups


def _drop_late_members(table: TableState, task: GroupTaskState, now: float) -> None:
    """Drop members that came too late for `task` and that no other task wants."""
    for rows in task.latecomers:
        at, live = table.rows.pages.find(rows)
        live &= table.rows.pages.fate.a[at] == LIVE
        unwanted = live & (table.rows.tasks_left.a[at] == 0)
        end_columns(table, task, rows[live & ~unwanted], now)
        if unwanted.any():
            table.to_drop.append((rows[unwanted], INCOMPLETE))
    if task.latecomers and table.sealed:
        table.wake_tasks()  # other tasks no longer expect results of these members
    task.latecomers.clear()


def _resolve_groups(table: TableState, task: GroupTaskState, now: float) -> None:
    changed = [group for unit in task.changed if (group := task.forming.get(unit)) and group.state == FORMING]
    task.changed.clear()
    whole, incomplete = [], []
    for group in changed:
        if group.ready == table.groups.size_of(group.unit):
            group.lost, group.late = 0, False
            whole.append(group.unit)
        elif group.lost or group.late or table.sealed:
            incomplete.append(group)
    if incomplete:
        _apply_incomplete_policy(table, task, incomplete, now)
    if whole:
        task.enqueue(whole)
        table.wake_task(task.task.name)


def _apply_incomplete_policy(table: TableState, task: GroupTaskState, groups: list[FormingGroup], now: float) -> None:
    rule = task.rule.incomplete
    partial: list[int] = []
    ended: list[int] = []
    for group, pending in zip(groups, task.pending([group.unit for group in groups]), strict=True):
        if isinstance(rule, DeliverPartial):
            if not _can_suffice(table, task, group, pending):
                ended.append(group.unit)
            elif group.late or not (pending or _to_come(table, group)):
                partial.append(group.unit)
                continue
            task.start_deadline(group, now)
        elif isinstance(rule, Refill) and not table.sealed:
            _refill(table, task, group, now)
        elif (table.sealed and not pending) or (not isinstance(rule, Refill) and (group.lost or group.late)):
            ended.append(group.unit)
    if ended:
        mark_groups_to_drop(table, ended)
    if partial:
        _queue_groups(table, task, partial)


def _can_suffice(table: TableState, task: GroupTaskState, forming: FormingGroup, pending: int) -> bool:
    """Whether the group can still reach its least size."""
    least = task.rule.min_size or table.groups.size_of(forming.unit)
    reach = forming.ready if forming.late else forming.ready + pending + _to_come(table, forming)
    return reach >= least


def _to_come(table: TableState, forming: FormingGroup) -> int:
    """How many members may still be put."""
    group = table.groups.get(forming.unit)
    if group is None or forming.late or table.sealed:
        return 0
    return max(0, group.size - group.present - forming.lost)


def _queue_groups(table: TableState, task: GroupTaskState, units: list[int]) -> None:
    """Queue the ready members of each group as one unit, and drop the others."""
    rows = np.array(table.groups.members_of(units)[0], np.int64)
    waiting = task.to_come(table.rows.pages.index(rows))
    task.enqueue(units)
    table.wake_task(task.task.name)
    if waiting.any():
        # Withdraw them first. Otherwise their drop would make the group incomplete again.
        rows = rows[waiting]
        task.mark_absent(rows, table.rows.pages.index(rows))
        table.to_drop.append((rows, INCOMPLETE))


def _refill(table: TableState, task: GroupTaskState, forming: FormingGroup, now: float) -> None:
    group = table.groups.get(forming.unit)
    if group is None:
        return
    absent = group.size - group.present
    table.flow.ask_refills(forming.unit, absent if forming.late else forming.lost, absent)
    table.wake_room()
    if forming.late:
        rows = np.array(list(group.rows), np.int64)
        waiting = rows[task.state.a[table.rows.pages.index(rows)] == PENDING]
        _end_other_leases(table, task, waiting, now)
    forming.lost, forming.late = 0, False
    task.start_deadline(forming, now)


def _end_other_leases(table: TableState, but: TaskState, rows: IntArray, now: float) -> None:
    """End the leases that other tasks hold on rows. It is no failure, as an expiry is none."""
    for task in table.tasks.values():
        if task is not but:
            at = table.rows.pages.index(rows)
            lost = lose_leases(table, task, rows, at, "its group waited past the deadline")
            return_rows(table, task, lost, failed=False, now=now)


def mark_groups_to_drop(table: TableState, units: list[int]) -> None:
    """Mark all members of groups to be dropped."""
    table.to_drop.append((np.array(table.groups.members_of(units)[0], np.int64), INCOMPLETE))


def return_rows(
    table: TableState, task: TaskState, rows: IntArray, *, failed: bool, now: float, before: int = LEASED
) -> None:
    """Make leased (or acked) rows ready again for `task`: at once, or after the wait of their `Retry` if the lease
    failed. Rows that failed too often are dropped, stale rows get the stale policy, and rows that lost a field
    meanwhile are requeued.
    """
    if not rows.size:
        return
    at = table.rows.pages.index(rows)
    if failed:
        postpone_failed(table, task, rows, at, now)
    else:
        task.return_rows(rows, at, now, before)
    if not task.completed(at).all():
        redo_or_drop_missing(table, task, rows, now)
    if task is table.pacing_task:
        apply_stale_policy(table, rows, now)
        table.wake_room()
    table.wake_task(task.task.name)


# ---------------------------------------------------------------- stale rows


def apply_stale_policy(table: TableState, rows: IntArray, now: float) -> None:
    """Apply `on_stale` to those of `rows` that are live, over the bound and not leased."""
    if table.versions is None or table.pacing is None or table.oldest_fresh_version <= 0:
        return
    pacing_task = table.tasks[table.pacing.task]
    at, resident = table.rows.pages.find(rows)
    version = table.rows.version.a[at]
    stale: BoolArray = (
        resident & (version >= 0) & (version < table.oldest_fresh_version) & (pacing_task.state.a[at] <= READY)
    )
    if not stale.any():
        return
    rows = rows[stale]
    policy = table.pacing.on_stale
    if isinstance(policy, KeepStale):
        _keep(table, pacing_task, _whole_groups(table, pacing_task, rows), now)
    elif isinstance(policy, Requeue):
        requeue(table, pacing_task, policy.task, rows, now)
    else:
        table.to_drop.append((rows, "stale"))


def _whole_groups(table: TableState, pacing_task: TaskState, rows: IntArray) -> IntArray:
    """`rows`, with all members of their groups that the pacing task could still get."""
    units = table.groups.units(rows, table.rows.pages.index(rows))
    members = [row for unit, _ in table.groups.counts(units) for row in table.groups.members(unit)]
    candidates = np.array(members, np.int64)
    chosen: IntArray = candidates[pacing_task.state.a[table.rows.pages.index(candidates)] <= READY]
    return chosen


def _keep(table: TableState, pacing_task: TaskState, rows: IntArray, now: float) -> None:
    at = table.rows.pages.index(rows)
    if not isinstance(pacing_task, GroupTaskState):
        stale = table.rows.version.a[at]
        chosen = (stale >= 0) & (stale < table.oldest_fresh_version)
        rows, at = rows[chosen], at[chosen]
    pacing_task.remove(rows, at, KEPT_STALE)
    if isinstance(pacing_task, GroupTaskState):
        for unit, _ in table.groups.counts(table.groups.units(rows, at)):
            pacing_task.close(unit)
    table.history.add(now, "kept though stale", rows, pacing_task.task.name)
    table.wake_room()
    if table.sealed:
        table.wake_tasks()
    else:
        table.wake_task(pacing_task.task.name)


def requeue(table: TableState, pacing_task: TaskState, target: str, rows: IntArray, now: float) -> None:
    """Requeue stale rows to `target`, and clear their versions.

    If a task takes whole groups, all members of the group are requeued together.
    """
    _, names = downstream([state.task for state in table.tasks.values()], table.tasks[target].task)
    if any(
        isinstance(task, GroupTaskState)
        for task in (table.tasks[target], pacing_task, *(table.tasks[name] for name in names))
    ):
        rows = _whole_groups(table, pacing_task, rows)
    at = table.rows.pages.index(rows)
    for name in ("policy_version", "policy_version_max"):
        table.rows.facts[name].a[at] = -1
    requeue_rows(table, target, rows, "requeued as stale", now)


def can_be_requeued(table: TableState, task: TaskState) -> bool:
    """Whether rows that `task` is done with may still be requeued to it, or to a task before it.

    That is so while the pacing task has open rows. Until then the table has not ended for `task`: no other task could
    regenerate a stale row's columns.
    """
    pacing, pacing_task = table.pacing, table.pacing_task
    if pacing is None or pacing_task is None or task is pacing_task or pacing.max_staleness is None:
        return False
    if not isinstance(pacing.on_stale, Requeue) or not any(pacing_task.counts[state] for state in OPEN):
        return False
    first = table.tasks[pacing.on_stale.task]
    _, names = downstream([state.task for state in table.tasks.values()], first.task)
    return task is first or task.task.name in names
