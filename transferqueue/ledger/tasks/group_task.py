"""State of a task that takes whole groups: a complete row waits (WAITING_FOR_GROUP) until its group is whole.

Each group has, for each such task, one of these states:

    FORMING --all members complete--> QUEUED --lease--> OUT --ack--> OVER
       ^                                |                |
       +------a member was dropped------+----release-----+

The members of a group whose lease failed wait (RETRYING) in a FORMING group, which is whole again when they are ready.
A FORMING group becomes *incomplete* if its deadline passes, a member is dropped, or the table is sealed and the group
can never be whole. `rules.groups_and_staleness` then applies the declared policy. Members that arrive for a group that
is OVER are ABSENT for this task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from transferqueue.ledger.arrays import BoolArray, Index, IntArray
from transferqueue.ledger.attributes import COUNT_MAX, Attribute, Columns, columns_of, rows_of
from transferqueue.ledger.effects import Deadlines
from transferqueue.ledger.rows import GroupIndex, RowStore
from transferqueue.ledger.tasks.predicates import matches
from transferqueue.ledger.tasks.ready_queue import ORDER, STAMP, UNIT, in_order
from transferqueue.ledger.tasks.selectors import Ranker, UnitFacts
from transferqueue.ledger.tasks.task_state import (
    ABSENT,
    DONE,
    GONE,
    LEASED,
    PENDING,
    READY,
    RETRYING,
    WAITING_FOR_GROUP,
    LiveTask,
    TaskState,
)
from transferqueue.policies import Complete, Predicate, Task

FORMING, QUEUED, OUT, OVER = range(4)
ATTRIBUTES: Final = {
    "unit": Attribute("unit", "i8"),
    "state": Attribute("state", "u1", FORMING, FORMING, OVER),
    "lost": Attribute("lost", "i8", 0, 0, COUNT_MAX),
    "late": Attribute("late", "?"),
    "order": Attribute("order", "i8", 0, 0, COUNT_MAX),
    "deadline": Attribute("left_s", "f8", time="left"),
}
"""What is stored of a `FormingGroup`. The others follow from its members, and from the queue."""


class FormingGroup:
    """The state of one group in one task; a subject of `Deadlines`."""

    __slots__ = ("deadline", "late", "lost", "order", "ready", "stamp", "state", "table", "task", "unit")

    def __init__(self, table: str, task: str, unit: int) -> None:
        self.table, self.task = table, task
        self.unit = unit
        self.state = FORMING
        self.ready = 0
        """Members that are complete (WAITING_FOR_GROUP or READY)."""
        self.stamp = 0
        self.order = 0
        self.lost = 0
        """Members that were dropped and not requested again."""
        self.late = False
        self.deadline: float | None = None


class GroupTaskState(TaskState):
    """A task whose units are groups."""

    def __init__(
        self, task: Task, rows: RowStore, ranker: Ranker, rule: Complete, groups: GroupIndex, deadlines: Deadlines
    ) -> None:
        super().__init__(task, rows, ranker)
        self.rule = rule
        self.groups = groups
        self.forming: dict[int, FormingGroup] = {}
        self.changed: dict[int, None] = {}
        """Groups that changed and must be checked before the request ends."""
        self.latecomers: list[IntArray] = []
        """Members that came too late. Those that no other task wants are dropped before the request ends."""
        self._deadlines = deadlines
        self._queued = 0

    # ------------------------------------------------------------ rows change state

    def arrive(self, rows: IntArray, at: Index, *, complete: bool, now: float) -> None:
        """Add new rows. Members of a group that is over are absent for this task."""
        self.counts[PENDING] += rows.size
        late = self._over(rows, at)
        if late.any():
            places = self.rows.pages.index(rows)
            self.mark_absent(rows[late], places[late])
            rows, at = rows[~late], places[~late]
        if complete and rows.size:
            self.complete(rows, at, now)

    def _over(self, rows: IntArray, at: Index) -> BoolArray:
        units = self.groups.units(rows, at)
        known = self.forming.keys() & units.tolist()  # of most puts none is
        over = {unit for unit in known if self.forming[unit].state == OVER}
        return np.isin(units, list(over)) if over else np.zeros(rows.size, np.bool_)

    def mark_absent(self, rows: IntArray, at: IntArray) -> None:
        """Mark members as absent: their group was leased without them."""
        self._set_state(at, ABSENT)
        self.rows.tasks_left.a[at] -= 1
        self.latecomers.append(rows)

    def complete(self, rows: IntArray, at: Index, now: float) -> None:
        """Mark pending members as complete, and note that their groups changed."""
        self.move(at, rows.size, PENDING, WAITING_FOR_GROUP)
        for unit, count in self.groups.counts(self.groups.units(rows, at)):
            group = self.forming.get(unit)
            if group is None:
                group = self._form(unit)
            group.ready += count
            self.changed[unit] = None
            if self.rule.deadline_s:
                self.start_deadline(group, now)

    def _form(self, unit: int) -> FormingGroup:
        group = self.forming[unit] = FormingGroup(self.rows.table, self.task.name, unit)
        return group

    def group_is_late(self, group: FormingGroup) -> None:
        """The deadline of a group has passed. The group rules decide what becomes of it."""
        group.late = True
        self.changed[group.unit] = None

    def start_deadline(self, group: FormingGroup, now: float) -> None:
        """Start the deadline of a group that has ready members and no deadline yet."""
        if (
            group.state == FORMING
            and group.ready
            and not group.late
            and group.deadline is None
            and self.rule.deadline_s
        ):
            self._deadlines.add(group, now + self.rule.deadline_s)

    def return_rows(self, rows: IntArray, at: IntArray, now: float, before: int = LEASED) -> None:
        """Mark leased (or acked) members as complete again. The group rules decide whether their group is whole."""
        self.move(at, rows.size, before, WAITING_FOR_GROUP)
        for unit, count in self.groups.counts(self.groups.units(rows, at)):
            group = self.forming[unit]
            self._unqueue([group])  # it was queued again without these, which it lost for a while
            group.state = FORMING
            group.ready += count
            self.changed[unit] = None

    def postpone(self, rows: IntArray, at: IntArray, until: float | None) -> None:
        """Make leased members wait. Their groups form again."""
        super().postpone(rows, at, until)
        for unit, _ in self.groups.counts(self.groups.units(rows, at)):
            self._unqueue([self.forming[unit]])
            self.forming[unit].state = FORMING
            self.changed[unit] = None

    def rerank(self, rows: IntArray, at: IntArray) -> None:
        """Rank queued groups again after facts of their members changed."""
        units = [unit for unit, _ in self.groups.counts(self.groups.units(rows, at)) if self._state(unit) == QUEUED]
        if units:
            self._enqueue_units(units)

    def finish(self, rows: IntArray, at: Index, before: int = LEASED) -> None:
        """Mark leased (or acked) groups as done."""
        super().finish(rows, at, before)
        units = [unit for unit, _ in self.groups.counts(self.groups.units(rows, at))]
        for unit in units:
            self.close(unit)
        self._mark_latecomers_absent(units)

    def _mark_latecomers_absent(self, units: Sequence[int]) -> None:
        """Mark members as absent that arrived while the others were leased."""
        rows = np.array(self.groups.members_of(units)[0], np.int64)
        at = self.rows.pages.index(rows)
        late = self.state.a[at] < READY
        if late.any():
            self.mark_absent(rows[late], at[late])

    def close(self, unit: int) -> None:
        """Mark the group as over: the task is done with it."""
        group = self.forming.get(unit)
        if group is None:
            group = self._form(unit)
        self._leave_queue(group)
        group.state, group.ready, group.deadline = OVER, 0, None
        group.lost, group.late = 0, False

    def remove(self, rows: IntArray, at: IntArray, to: int = GONE) -> None:
        """Remove members. The group rules decide what that does to their groups."""
        states = self.state.a[at]
        units = self.groups.units(rows, at)
        super().remove(rows, at, to)
        ready = dict(self.groups.counts(units[(states == WAITING_FOR_GROUP) | (states == READY)]))
        self._unqueue(
            [
                self._lose_members(unit, ready.get(unit, 0), lost)
                for unit, lost in self.groups.counts(units[states < DONE])
            ]
        )

    def _lose_members(self, unit: int, ready: int, lost: int) -> FormingGroup:
        group = self.forming.get(unit)
        if group is None:
            group = self._form(unit)
        group.ready -= ready
        group.lost += lost
        self.changed[unit] = None
        return group

    def _unqueue(self, groups: Sequence[FormingGroup]) -> None:
        """Take those of the groups out of the queue that are in it: they are incomplete. Their ready members wait
        again."""
        members: list[int] = []
        for group in groups:
            if group.state == QUEUED:
                self._leave_queue(group)
                group.state = FORMING
                members += self.groups.members(group.unit)
        if members:
            at = self.rows.pages.index(np.array(members))
            at = at[self.state.a[at] == READY]
            self.move(at, at.size, READY, WAITING_FOR_GROUP)

    def set_pending(self, rows: IntArray, at: IntArray) -> None:
        """Make members pending again, and their groups forming: they lost fields that the task needs."""
        states = self.state.a[at]
        units = self.groups.units(rows, at)
        ready = dict(self.groups.counts(units[(states == WAITING_FOR_GROUP) | (states == READY)]))
        known = [group for unit, _ in self.groups.counts(units) if (group := self.forming.get(unit)) is not None]
        self._unqueue(known)
        for group in known:
            group.ready -= ready.get(group.unit, 0)
            group.state, group.order = FORMING, 0
        super().set_pending(rows, at)

    def forget(self, unit: int) -> None:
        """Remove a group that has no live row left."""
        group = self.forming.pop(unit, None)
        if group is not None:
            self._leave_queue(group)
            group.deadline = None
        self.changed.pop(unit, None)

    def stored_groups(self, now: float) -> Columns:
        """The stored columns of the groups."""
        return columns_of(self.forming.values(), ATTRIBUTES, now)

    def restore_groups(self, forming: Columns, rows: IntArray, at: IntArray, now: float) -> None:
        """Restore stored groups (`forming`, as columns); after `restore`, and after `GroupIndex.restore`."""
        states = self.state.a[at]
        ready = dict(self.groups.counts(self.groups.units(rows, at)[(states == WAITING_FOR_GROUP) | (states == READY)]))
        for stored in rows_of(forming, ATTRIBUTES, now):
            unit, deadline = stored["unit"], stored.pop("deadline")
            group = self._form(unit)
            for name, value in stored.items():
                setattr(group, name, value)
            group.ready = ready.get(unit, 0) if group.state in (FORMING, QUEUED) else 0
            if deadline is not None:
                self._deadlines.add(group, deadline)
            self._queued += group.state == QUEUED
        self._stamp = max(self._stamp, int(forming["order"].max(initial=0)))

    def live(self, at: IntArray) -> LiveTask:
        """See `TaskState.live`."""
        live = super().live(at)
        live.stamps = [group.stamp for group in self.forming.values() if group.state == QUEUED]
        return live

    def _queue_again(self, live: LiveTask, rows: IntArray, at: IntArray) -> None:
        units = [unit for unit, group in self.forming.items() if group.state == QUEUED]
        if units:
            self._push_units(units, np.array(live.stamps, np.int64))

    # ------------------------------------------------------------ the queue of groups

    def enqueue(self, units: list[int]) -> None:
        """Queue groups that may be leased: whole, or as large as their policy accepts."""
        for unit in units:
            group = self.forming[unit]
            group.state, group.deadline = QUEUED, None
        self._queued += len(units)
        at = self.rows.pages.index(np.array(self.groups.members_of(units)[0], np.int64))
        at = at[self.state.a[at] == WAITING_FOR_GROUP]
        self.move(at, at.size, WAITING_FOR_GROUP, READY)
        self._enqueue_units(units)

    def _enqueue_units(self, units: list[int]) -> None:
        self._push_units(units, self.stamps(len(units)))

    def _push_units(self, units: list[int], stamps: IntArray) -> None:
        rows, sizes = self._queued_members(units)
        at = self.rows.pages.index(rows)
        starts = np.cumsum(sizes) - sizes
        seen = UnitFacts(self.rows, rows, at, starts)
        entries = np.empty((4, len(units)), np.int64)
        entries[0] = self.ranker.keys(seen)
        entries[STAMP] = stamps
        entries[UNIT] = units
        for unit, stamp in zip(units, stamps.tolist(), strict=True):
            group = self.forming[unit]
            group.stamp, group.order = stamp, group.order or stamp
        entries[ORDER] = -seen.last_row if self.ranker.newest_first else [self.forming[unit].order for unit in units]
        self.push(in_order(entries))

    def _queued_members(self, units: list[int]) -> tuple[IntArray, IntArray]:
        rows, sizes = (np.array(values, np.int64) for values in self.groups.members_of(units))
        good: BoolArray = self.state.a[self.rows.pages.index(rows)] == READY
        if good.all():
            return rows, sizes
        return rows[good], np.add.reduceat(good.astype(np.int64), np.cumsum(sizes) - sizes)

    def _leave_queue(self, group: FormingGroup) -> None:
        if group.state == QUEUED:
            self._queued -= 1
            group.stamp = 0

    @property
    def ready_units(self) -> int:
        """Number of groups that can be leased."""
        return self._queued

    def was_leased(self, units: IntArray) -> BoolArray:
        """Which units are leased or over."""
        return np.array([self._state(unit) >= OUT for unit in units.tolist()], np.bool_)

    def _state(self, unit: int) -> int:
        group = self.forming.get(unit)
        return FORMING if group is None else group.state

    def alive(self, units: IntArray, stamps: IntArray) -> BoolArray:
        """Which queue entries are valid."""
        forming = self.forming
        return np.fromiter(
            (
                (group := forming.get(unit)) is not None and group.stamp == stamp
                for unit, stamp in zip(units.tolist(), stamps.tolist(), strict=True)
            ),
            np.bool_,
            units.size,
        )

    def matching(self, units: IntArray, where: Sequence[Predicate]) -> BoolArray:
        """Which groups satisfy all predicates with every member."""
        if not units.size:
            return np.empty(0, np.bool_)
        rows, sizes = self._queued_members(units.tolist())
        good = matches(self.rows, where, rows, self.rows.pages.index(rows))
        return np.logical_and.reduceat(good, np.cumsum(sizes) - sizes)

    def members(self, units: IntArray) -> tuple[IntArray, IntArray]:
        """Rows of queued groups, group by group, and the number of rows of each."""
        return self._queued_members(units.tolist())

    def lease(self, rows: IntArray, at: Index, lease: int | IntArray) -> None:
        """Mark queued groups as leased."""
        super().lease(rows, at, lease)
        for unit, count in self.groups.counts(self.groups.units(rows, at)):
            group = self.forming[unit]
            self._leave_queue(group)
            group.state = OUT
            group.ready -= count

    # ------------------------------------------------------------ incomplete groups

    def pending(self, units: Sequence[int]) -> list[int]:
        """Of each known group, the number of members that may become ready (pending, or after a failure)."""
        rows, sizes = (np.array(values, np.int64) for values in self.groups.members_of(units))
        to_come = self.to_come(self.rows.pages.index(rows)).astype(np.int64)
        summed: list[int] = np.add.reduceat(to_come, np.cumsum(sizes) - sizes).tolist()
        return summed

    def to_come(self, at: IntArray) -> BoolArray:
        """Which members are pending, or wait after a failure."""
        states = self.state.a[at]
        to_come: BoolArray = (states == PENDING) | (states == RETRYING)
        return to_come
