"""Checks that a ledger could have written a snapshot: ids, bounds, states, groups and counts that fit each other.

Snapshot files are foreign input. Their checksums prove that they are unchanged since they were written, not that a
ledger wrote them. `check` examines every value before `restored` builds anything, and raises `Corruption` with table,
value and rule. The code that reads the files checks values of columns and their places
(`server.durability.snapshot_files`); `restored` checks terms, as of any new table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from transferqueue.errors import Corruption, UsageError
from transferqueue.ledger.arrays import AnyArray, BoolArray, IntArray, numbered
from transferqueue.ledger.persistence.snapshot import ChannelSnapshot, LedgerSnapshot, TableSnapshot, VersionSnapshot
from transferqueue.ledger.requests.flow_control import VERSION_MAX
from transferqueue.ledger.requests.pending_versions import check_fields, check_whole
from transferqueue.ledger.rows.indexes import SPANS_MAX
from transferqueue.ledger.rows.row_metadata import DTYPES, check_ranges
from transferqueue.ledger.rows.row_pages import DROPPED, LIVE, SHIFT
from transferqueue.ledger.tasks.group_task import FORMING, OUT, OVER, QUEUED
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
    STATES,
    WAITING_FOR_GROUP,
)
from transferqueue.limits import KEY_CHARS_MAX, REASONS_MAX, TABLES_MAX, TEXT_CHARS_MAX, check_name
from transferqueue.policies import Task, check_tags

COUNT_MAX: Final = 1 << 53
"""Most rows, orders, steps and counts: exact in a float64, and far below the end of int64."""
AGE_S_MAX: Final = 1e12
"""Longest age or deadline: thirty thousand years."""
REASONS_OURS_MAX: Final = 64
"""Reasons of the ledger itself for which rows are dropped. The limit for callers does not count them."""
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
    for name, rows in snapshot.dropped_tables.items():
        _within(f"dropped_tables: {name[:40]!r}", [rows], 0)


def _once(kind: str, names: list[str]) -> None:
    for name in names:
        try:
            check_name(kind, name)
        except UsageError as error:
            raise Corruption(str(error)) from error
    if len(set(names)) != len(names):
        raise Corruption(f"two {kind}s have the same name; the names are {', '.join(sorted(names))}")


def _within(what: str, values: Iterable[int], lowest: int, highest: int = COUNT_MAX) -> None:
    wrong = next((value for value in values if not lowest <= value <= highest), None)
    if wrong is not None:
        raise Corruption(f"{what} is {wrong}; it must be {lowest} to {highest}")


def _check_channel(channel: ChannelSnapshot) -> None:
    subject = f'channel "{channel.name}"'
    _within(f"{subject}: keep", [channel.keep], 1)
    _within(f"{subject}: latest", [channel.latest], -1, VERSION_MAX)
    numbers = [version.version for version in channel.versions]
    _within(f"{subject}: a version", numbers, 0, channel.latest)
    if sorted(set(numbers)) != numbers or len(numbers) > channel.keep:
        raise Corruption(
            f"{subject}: its versions are {numbers}; they must ascend, and at most {channel.keep} are kept"
        )
    for version in channel.versions:
        names = [field.name for field in version.fields]
        if not names or len(set(names)) != len(names):
            raise Corruption(
                f"{subject}: version {version.version} has the fields {names}; it must have at least one, each once"
            )
        _check_slices(f"{subject}: version {version.version}", version)
        if not abs(version.age_s) <= AGE_S_MAX:
            raise Corruption(
                f"{subject}: version {version.version} is {version.age_s} s old; ages are at most {AGE_S_MAX:g} s"
            )


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
        self._check_facts()
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

    def _numbers(self, what: str, values: Iterable[int], lowest: int = 0, highest: int = COUNT_MAX) -> None:
        _within(f'table "{self._terms.name}": {what}', values, lowest, highest)

    # ------------------------------------------------------------ counts and rows

    def _check_counts(self) -> None:
        counts = self._counts
        self._numbers("the clock", [self._terms.version], 0, VERSION_MAX)
        self._numbers("a count of rows", [counts.next_row, counts.rows_put, counts.rows_done, counts.cursor])
        self._numbers("a count of dropped rows", counts.rows_dropped.values())
        self._numbers("a count of freed columns", [counts.columns_freed, counts.column_bytes_freed])
        for lags in (counts.staleness, counts.staleness_in_flight, counts.staleness_in_queue):
            self._numbers("a lag", lags, -VERSION_MAX, VERSION_MAX)
            self._numbers("rows of a lag", lags.values())
        if set(counts.tasks) != set(self._tasks):
            raise self._wrong(
                f"it has counters of the tasks {sorted(counts.tasks)}, but the tasks {sorted(self._tasks)}"
            )
        for task in counts.tasks.values():
            self._numbers("a checkpoint", [task.checkpoint], -1)
            self._numbers("a count of a task", [task.given, task.done, task.failed, task.dropped, task.worker_deaths])
        if len(counts.rows_dropped) > REASONS_MAX + REASONS_OURS_MAX or any(
            len(reason) > TEXT_CHARS_MAX for reason in counts.rows_dropped
        ):
            raise self._wrong(
                f"rows were dropped for {len(counts.rows_dropped)} reasons; at most {REASONS_MAX}, each short"
            )
        ended = counts.rows_done + sum(counts.rows_dropped.values())
        if counts.rows_put != counts.next_row or counts.rows_put != int(self._live.sum()) + ended:
            raise self._wrong(
                f"rows put {counts.rows_put} (the next is {counts.next_row}) != {int(self._live.sum())} live + {ended} "
                "ended"
            )

    def _check_rows(self) -> None:
        ids, next_row = self._ids, self._counts.next_row
        if ids.size and (ids[0] < 0 or ids[-1] >= next_row or (ids[1:] <= ids[:-1]).any()):
            raise self._wrong(f"its rows do not ascend from 0 to {next_row - 1}, as the manifest states")
        if ids.size and (int(ids[-1]) >> SHIFT) - (int(ids[0]) >> SHIFT) >= PAGES_MAX:
            raise self._wrong(f"its rows are {ids[0]} to {ids[-1]}, which takes more than {PAGES_MAX} pages")
        fate = self._snapshot.rows["fate"]
        self._rows((fate < LIVE) | (fate > DROPPED), "has an unknown fate")
        self._rows(~(np.abs(self._snapshot.rows["age_s"]) <= AGE_S_MAX), "has an age out of range")
        stamped = self._snapshot.rows["stamped"]
        self._rows((stamped < -1) | (stamped > VERSION_MAX), "was stamped at a version out of range")

    def _check_facts(self) -> None:
        try:
            check_ranges({name: self._snapshot.rows[name] for name in DTYPES})
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
        groups, ids = self._snapshot.groups, self._snapshot.rows["group_id"]
        known, sizes, present = (groups[name] for name in ("group_id", "group_size", "present"))
        if np.unique(known).size != known.size or (known < 0).any():
            raise self._wrong("a group is listed twice, or has a negative id")
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
        state, step = columns["state"], columns["step"]
        if state.size and int(state.max()) >= len(STATES):
            raise self._wrong(f'task "{name}" has a row in no state')
        self._rows(columns["attempts"] < 0, f'has a negative number of attempts in task "{name}"')
        order = columns["order"]
        self._rows((order < 0) | (order > COUNT_MAX), f'has an order out of range in task "{name}"')
        stepped = state == ACKED_WITH_STEP
        checkpoint = self._counts.tasks[name].checkpoint
        self._rows(
            stepped & ((step <= checkpoint) | (step > COUNT_MAX)),
            f'was acked in "{name}" with a step that is covered or out of range',
        )
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
        every = {key: column.tolist() for key, column in self._snapshot.forming[name].items()}
        known = dict(zip(every["unit"], every["state"], strict=True))
        if len(known) != len(every["unit"]):
            raise self._wrong(f'task "{name}" has a group twice')
        self._numbers(f'task "{name}": a group\'s state', every["state"], FORMING, OVER)
        self._numbers(f'task "{name}": members lost', every["lost"])
        self._numbers(f'task "{name}": the order of a group', every["order"])
        left = self._snapshot.forming[name]["left_s"]
        if not (np.isnan(left) | (np.abs(left) <= AGE_S_MAX)).all():
            raise self._wrong(f'task "{name}": a group has a deadline out of range')
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
