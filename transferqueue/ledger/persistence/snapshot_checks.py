"""Checks that a ledger could have written a snapshot: ids, bounds, states, groups and counts that fit each other.

Snapshot files are foreign input. Their checksums prove that they are unchanged since they were written, not that a
ledger wrote them. `check` examines every value before `restored` builds anything, and raises `Corruption` with table,
value and rule. The code that reads the files (`server.durability.snapshot_files`) checks the places of values, and the
single numbers, by the types of the structs that it decodes; `restored` checks terms, as of any new table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from transferqueue.errors import Corruption, UsageError
from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray, numbered
from transferqueue.ledger.attributes import COUNT_MAX, Attribute, Columns
from transferqueue.ledger.persistence.snapshot import ChannelSnapshot, LedgerSnapshot, TableSnapshot, VersionSnapshot
from transferqueue.ledger.requests.flow_control import VERSION_MAX
from transferqueue.ledger.requests.pending_versions import check_fields, check_whole
from transferqueue.ledger.rows import groups, row_state
from transferqueue.ledger.rows.indexes import SPANS_MAX
from transferqueue.ledger.rows.row_metadata import check_groups
from transferqueue.ledger.rows.row_pages import LIVE, SHIFT
from transferqueue.ledger.tasks import group_task
from transferqueue.ledger.tasks.group_task import FORMING, OUT, QUEUED
from transferqueue.ledger.tasks.task_state import (
    ABSENT,
    ACKED_WITH_STEP,
    DONE,
    GONE,
    KEPT_STALE,
    LEASED,
    PENDING,
    READY,
    RETRYING,
    STORED,
    WAITING_FOR_GROUP,
)
from transferqueue.limits import KEY_CHARS_MAX, TABLES_MAX, check_name
from transferqueue.policies import Task, check_tags

PAGES_MAX: Final = 1 << 24
"""Most pages from the first resident row to the last: a page table of 256 MiB, and 7e10 rows after the oldest one."""


def check(snapshot: LedgerSnapshot) -> None:
    """Raise `Corruption` unless a ledger could have written this snapshot. O(rows)."""
    if len(snapshot.tables) > TABLES_MAX:
        raise Corruption(f"the snapshot has {len(snapshot.tables)} tables; a deployment has at most {TABLES_MAX}")
    _once("table", [table.terms.name for table in snapshot.tables])
    _once("channel", [channel.name for channel in snapshot.channels])
    for table in snapshot.tables:
        _Checks(table).run()
    for channel in snapshot.channels:
        _check_channel(channel)


def _once(kind: str, names: list[str]) -> None:
    for name in names:
        try:
            check_name(kind, name)
        except UsageError as error:
            raise Corruption(str(error)) from error
    if len(set(names)) != len(names):
        raise Corruption(f"two {kind}s have the same name; the names are {', '.join(sorted(names))}")


def _check_channel(channel: ChannelSnapshot) -> None:
    subject = f'channel "{channel.name}"'
    numbers = [version.version for version in channel.versions]
    if sorted(set(numbers)) != numbers or len(numbers) > channel.keep or max(numbers, default=-1) > channel.latest:
        raise Corruption(
            f"{subject}: its versions are {numbers}; they must ascend up to {channel.latest}, and at most "
            f"{channel.keep} are kept"
        )
    for version in channel.versions:
        names = [field.name for field in version.fields]
        if not names or len(set(names)) != len(names):
            raise Corruption(
                f"{subject}: version {version.version} has the fields {names}; it must have at least one, each once"
            )
        _check_slices(f"{subject}: version {version.version}", version)


def _check_slices(subject: str, version: VersionSnapshot) -> None:
    try:
        check_fields(subject, version.fields, version.slices)
        check_whole(subject, {field.name: field for field in version.fields}, version.slices)
    except UsageError as error:
        raise Corruption(str(error)) from error


class _Checks:
    """Checks of one table."""

    def __init__(self, snapshot: TableSnapshot) -> None:
        self._snapshot, self._terms, self._counts = snapshot, snapshot.terms, snapshot.counts
        self._ids: IntArray = snapshot.rows["row_id"]
        self._live: BoolArray = snapshot.rows["fate"] == LIVE
        self._tasks: Mapping[str, Task] = {task.name: task for task in snapshot.terms.tasks}

    def run(self) -> None:
        """Run all checks. Each relies on those before it."""
        self._check_counts()
        self._check_rows()
        self._check_names()
        self._check_fields()
        self._check_groups()
        for name, task in self._tasks.items():
            self._check_task(name, task)
        self._check_open()
        self._check_ordinals()

    def _wrong(self, what: str) -> Corruption:
        return Corruption(f'table "{self._terms.name}": {what}')

    def _rows(self, wrong: BoolArray, what: str) -> None:
        if wrong.any():
            raise self._wrong(f"{numbered(self._ids[wrong])}: {what}")

    def _attributes(self, what: str, columns: Columns, attributes: Iterable[Attribute]) -> None:
        """Check that values are in the range that their attribute declares."""
        for one in attributes:
            values = columns[one.name]
            beyond = one.beyond(values)
            if beyond.any():
                raise self._wrong(f"{what} has {one.name} {values[beyond][0]}, which is out of range")

    # ------------------------------------------------------------ counts and rows

    def _check_counts(self) -> None:
        counts = self._counts
        if not 0 <= self._terms.version <= VERSION_MAX:
            raise self._wrong(f"its clock is {self._terms.version}; it must be 0 to {VERSION_MAX}")
        if set(counts.tasks) != set(self._tasks):
            raise self._wrong(
                f"it has counters of the tasks {sorted(counts.tasks)}, but the tasks {sorted(self._tasks)}"
            )
        put, ended = counts.table.rows_put, counts.table.rows_done + sum(counts.table.rows_dropped.values())
        if put != counts.next_row or put != int(self._live.sum()) + ended:
            raise self._wrong(
                f"rows put {put} (the next is {counts.next_row}) != {int(self._live.sum())} live + {ended} ended"
            )

    def _check_rows(self) -> None:
        ids, next_row = self._ids, self._counts.next_row
        if ids.size and (ids[0] < 0 or ids[-1] >= next_row or (ids[1:] <= ids[:-1]).any()):
            raise self._wrong(f"its rows do not ascend from 0 to {next_row - 1}, as the manifest states")
        if ids.size and (int(ids[-1]) >> SHIFT) - (int(ids[0]) >> SHIFT) >= PAGES_MAX:
            raise self._wrong(f"its rows are {ids[0]} to {ids[-1]}, which takes more than {PAGES_MAX} pages")
        self._attributes("a row", self._snapshot.rows, row_state.ATTRIBUTES)
        try:
            check_groups(self._snapshot.rows)
            for tags in self._snapshot.tags.values():
                check_tags(tags)
        except UsageError as error:
            raise self._wrong(str(error)) from error

    def _check_names(self) -> None:
        keys = list(self._snapshot.keys.values())
        if len(set(keys)) != len(keys):
            raise self._wrong("two rows have the same key")
        wrong = next((key for key in keys if not 0 < len(key) <= KEY_CHARS_MAX), None)
        if wrong is not None:
            raise self._wrong(f"a key has {len(wrong)} characters; 1 to {KEY_CHARS_MAX}")

    def _check_fields(self) -> None:
        fields = [field.name for field in self._terms.fields]
        if sorted(self._snapshot.has) != sorted(fields):
            raise self._wrong(f"its rows have the fields {sorted(self._snapshot.has)}, its terms {sorted(fields)}")
        for name, gone in self._snapshot.freed.items():
            if name not in self._snapshot.has:
                raise self._wrong(f"a field {name[:40]!r} was freed, which the table does not have")
            self._rows(gone & self._snapshot.has[name], f'has "{name}", which was freed')

    # ------------------------------------------------------------ groups

    def _check_groups(self) -> None:
        listed, ids = self._snapshot.groups, self._snapshot.rows["group_id"]
        self._attributes("a group", listed, groups.ATTRIBUTES.values())
        known, sizes, present = (listed[name] for name in ("group_id", "group_size", "present"))
        if np.unique(known).size != known.size:
            raise self._wrong("a group is listed twice")
        members = self._live & (ids >= 0)
        order = np.argsort(known, kind="stable")
        at = np.searchsorted(known, ids[members], sorter=order)
        at = order[np.minimum(at, known.size - 1)] if known.size else at
        missing = np.ones(at.size, np.bool_) if not known.size else known[at] != ids[members]
        if missing.any():
            raise self._wrong(f"the group of {numbered(self._ids[members][missing])} is not listed")
        if (sizes[at] != self._snapshot.rows["group_size"][members]).any():
            raise self._wrong("a row and its group state different group sizes")
        members_live = np.bincount(at, minlength=known.size)
        if ((members_live < 1) | (present < members_live) | (present > sizes)).any():
            raise self._wrong("a group has no row, or a wrong number of members")
        self._check_refills(dict(zip(known.tolist(), sizes.tolist(), strict=True)))

    def _check_refills(self, sizes: dict[int, int]) -> None:
        for (
            group,
            count,
        ) in self._counts.refills.items():  # may exceed the missing members: another put may have filled the group
            if not 0 < count <= sizes.get(group, 0):
                raise self._wrong(
                    f"{count} members of group {group} are asked for; it has {sizes.get(group, 0)} members"
                )

    # ------------------------------------------------------------ tasks

    def _check_task(self, name: str, task: Task) -> None:
        columns = self._snapshot.tasks[name]
        self._attributes(f'a row in task "{name}"', columns, STORED)
        state, step = columns["state"], columns["step"]
        stepped = state == ACKED_WITH_STEP
        checkpoint = self._counts.tasks[name].checkpoint
        self._rows(stepped & (step <= checkpoint), f'was acked in "{name}" with a step that is covered')
        self._rows(~stepped & (step != -1), f'has a step in "{name}", but was not acked with one')
        self._rows(self._live & (state == GONE), f'is live, but gone for task "{name}"')
        self._rows(~self._live & (state < DONE), f'has ended, but not for task "{name}"')
        complete = self._complete(task)
        self._rows(
            ~complete & ((state == READY) | (state == RETRYING) | (state == WAITING_FOR_GROUP)),
            f'is ready for "{name}" without the fields that it needs',
        )
        self._rows(complete & (state == PENDING), f'has the fields that "{name}" needs, but is pending')
        if task.groups is None:
            self._rows(state == WAITING_FOR_GROUP, f'waits for a group in "{name}", which takes single rows')
        else:
            self._check_forming(name, state)

    def _complete(self, task: Task) -> BoolArray:
        """Which rows have every field that the task needs."""
        has = self._snapshot.has
        if any(field not in has for field in task.needs):
            return np.zeros(self._ids.size, np.bool_)
        return np.all([has[field] for field in task.needs], axis=0) if task.needs else np.ones(self._ids.size, np.bool_)

    def _check_forming(self, name: str, state: AnyArray) -> None:
        forming = self._snapshot.forming[name]
        self._attributes(f'a group in task "{name}"', forming, group_task.ATTRIBUTES.values())
        known = dict(zip(forming["unit"].tolist(), forming["state"].tolist(), strict=True))
        if len(known) != forming["unit"].size:
            raise self._wrong(f'task "{name}" has a group twice')
        units = np.where(self._snapshot.rows["group_id"] < 0, -2 - self._ids, self._snapshot.rows["group_id"])
        strange = set(known) - set(units[self._live].tolist())
        if strange:
            raise self._wrong(f'task "{name}" knows group {min(strange)}, which has no row')
        self._check_members(name, known, units, state)

    def _check_members(self, name: str, known: Mapping[int, int], units: IntArray, state: AnyArray) -> None:
        def of(chosen: int) -> set[int]:
            return set(units[self._live & (state == chosen)].tolist())

        ready, queued = of(READY), {unit for unit, group_state in known.items() if group_state == QUEUED}
        if ready != queued:
            raise self._wrong(f'task "{name}": the groups with ready rows are not those that are queued')
        wrong = [unit for unit in of(WAITING_FOR_GROUP) if known.get(unit) not in (FORMING, OUT)]
        wrong += [unit for unit in of(RETRYING) if known.get(unit) != FORMING]
        wrong += [unit for unit in of(LEASED) | of(ACKED_WITH_STEP) if unit not in known]
        if wrong:
            raise self._wrong(f'task "{name}": the state of group {min(wrong)} contradicts its rows')

    def _check_open(self) -> None:
        """A live row with which no task has work would stay for ever."""
        if not self._snapshot.tasks:
            return
        states = np.stack([columns["state"] for columns in self._snapshot.tasks.values()])
        left = ((states <= ACKED_WITH_STEP) | (states == KEPT_STALE) | (states == ABSENT)).any(axis=0)
        self._rows(self._live & ~left, "is live, but no task has work with it")

    def _check_ordinals(self) -> None:
        spans = self._snapshot.ordinals
        flat = spans.reshape(-1)
        if len(spans) > SPANS_MAX or (spans[:, 0] > spans[:, 1]).any() or (spans[1:, 0] <= spans[:-1, 1] + 1).any():
            raise self._wrong("its spans of ordinals do not ascend with a gap between any two")
        if flat.size and (int(flat[0]) < 0 or int(flat[-1]) > COUNT_MAX):
            raise self._wrong(f"its ordinals are {flat[0]} to {flat[-1]}; they are 0 to {COUNT_MAX}")
