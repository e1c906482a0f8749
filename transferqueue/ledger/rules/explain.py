"""Texts that explain waits: missing rows or memory, and their holders.

These functions walk a bounded sample of rows. They are for errors and for `doctor`, and run only for requests that do
not proceed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from transferqueue.errors import listing
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import BoolArray, IntArray, tally
from transferqueue.ledger.rows import LIVE
from transferqueue.ledger.rules.requeue import LOST
from transferqueue.ledger.rules.required_results import no_task_gives
from transferqueue.ledger.table_state import Absence, TableState
from transferqueue.ledger.tasks.group_task import FORMING, GroupTaskState
from transferqueue.ledger.tasks.leases import LeaseState
from transferqueue.ledger.tasks.task_state import (
    ACKED_WITH_STEP,
    LEASED,
    OPEN,
    PENDING,
    READY,
    RETRYING,
    WAITING_FOR_GROUP,
    TaskState,
)
from transferqueue.limits import HEARTBEAT_S
from transferqueue.policies import Manual
from transferqueue.wire.messages import LeaseRequest

PAGES_SAMPLED = 16
"""Number of pages sampled: the oldest ones, which hold the rows that are stuck."""
LEASES_SAMPLED = 256
"""Number of leases sampled, the oldest first. Otherwise a thousand waits that end together would walk thousands of
leases each.
"""
GROUPS_SHOWN = 3
REASONS_SHOWN = 3
SILENT_AFTER_S = 2 * HEARTBEAT_S
"""A live client sends something every `HEARTBEAT_S`; one late message is not reported."""


def session_name(table: TableState, session: int) -> str:
    """The name of a session in texts."""
    return table.core.labels.get(session) or f"session {session}"


def explain_lease(table: TableState, task: TaskState, request: LeaseRequest, now: float) -> str:
    """Why a lease waits."""
    ready = counted(task.ready_units, "group" if isinstance(task, GroupTaskState) else "row", "is", "are")
    wanted = _wanted(request)
    matching = " that match where" if request.where else ""
    text = f'task "{task.task.name}" of table "{table.name}" waits for {wanted}{matching}: {ready} ready'
    return "; ".join([text, *_lacking(table, task, now)])


def explain_stranded(table: TableState, task: TaskState, now: float) -> str:
    """Why no pending row of a sealed table can become ready for the task, and what to do."""
    name = task.task.name
    missing = [field for field in task.task.needs if no_task_gives(table, field, ())]
    return (
        f'task "{name}" of table "{table.name}" can never progress: the table is sealed, and '
        f"{'; '.join(_pending(table, task, now))}. Give {listing(missing)} with update(), or "
        "end the rows with drop()"
    )


def lost_rows(table: TableState) -> list[str]:
    """How many rows ended because bytes were lost, by cause."""
    return [f"{counted(count, 'row')} ended: {why}" for why, count in table.lost.items()]


def _wanted(request: LeaseRequest) -> str:
    unit = "rows" if request.rows else "tokens" if request.tokens else "groups"
    number = request.rows or request.tokens or request.groups
    least = f" (at least {request.at_least})" if request.at_least else ""
    ranks = f" for {request.world} ranks" if request.world > 1 else ""
    return f"{number} {'complete ' if unit == 'groups' else ''}{unit[:-1] if number == 1 else unit}{least}{ranks}"


def _lacking(table: TableState, task: TaskState, now: float) -> list[str]:
    reasons = [
        *_failures(task, now),
        *_leased(table, [task], now),
        *_pending(table, task, now),
        *_waiting_for_checkpoint(task),
    ]
    if isinstance(task, GroupTaskState):
        reasons += _forming(table, task)
    if not reasons and not task.open_rows:
        end = "the table is sealed" if table.sealed else "the table is still open"
        return ["nothing to do: no unfinished rows", *_dropped(table), *lost_rows(table), end]
    return reasons + lost_rows(table)


def _failures(task: TaskState, now: float) -> list[str]:
    """That leases of the task fail, why, and when they are tried again."""
    return ([f"it fails: {task.errors.latest(now)}"] if task.circuit.failures else []) + retrying(task, now)


def _fails(task: TaskState, now: float) -> str:
    return f", which fails: {task.errors.latest(now)}" if task.circuit.failures else ""


def retrying(task: TaskState, now: float) -> list[str]:
    """How many rows wait after a failure, and until when, or that the task is paused."""
    lines = []
    if count := task.counts[RETRYING]:
        wait_s = next_try_s(task, now)
        when = "" if wait_s is None else f", the first in {wait_s:.0f} s"
        lines.append(f"{counted(count, 'row', 'waits', 'wait')} to be tried again{when}")
    if (paused_s := task.circuit.paused_s(now)) is not None:
        trial = f"in {paused_s:.0f} s" if paused_s else "now"
        lines.append(f"all its leases fail, so it is paused: one lease at a time is tried, the next {trial}")
    return lines


def next_try_s(task: TaskState, now: float) -> float | None:
    """Seconds until the first of the rows that wait after a failure is tried again; None if none waits."""
    if not task.counts[RETRYING]:
        return None
    paused_s, at = task.circuit.paused_s(now), task.retries.next
    times = [paused_s] if paused_s is not None else []
    return min([*times, *([max(0.0, at - now)] if at is not None else [])], default=None)


def _dropped(table: TableState) -> list[str]:
    """Why a table may be empty though rows were put. `lost_rows` reports rows that ended because bytes were lost."""
    reasons = sorted((-count, reason) for reason, count in table.rows_dropped.items() if reason != LOST)
    text = ", ".join(f"{reason} {-count}" for count, reason in reasons[:REASONS_SHOWN])
    count = -sum(count for count, _ in reasons)
    return [f"{count} {'was' if count == 1 else 'were'} dropped: {text}"] if text else []


def drop_rates(table: TableState) -> list[str]:
    """Which share of the rows that ended was dropped for each reason. `lost_rows` reports lost ones."""
    ended = table.rows_done + sum(table.rows_dropped.values())
    reasons = sorted((-count, reason) for reason, count in table.rows_dropped.items() if reason != LOST)
    shares = ", ".join(f"{reason} {-count / ended:.1%}" for count, reason in reasons[:REASONS_SHOWN])
    return [f"of {counted(ended, 'ended row')}, some were dropped: {shares}"] if shares else []


def _leased(table: TableState, tasks: Iterable[TaskState], now: float) -> list[str]:
    """How many rows (or groups) are leased, by which session, for how long, and whether the session is silent."""
    lines = []
    for task in tasks:
        held: dict[str, tuple[int, float]] = {}
        unseen = task.counts[LEASED]
        for lease in islice(_leases_of(table, task), LEASES_SAMPLED):
            unseen -= lease.left
            units = _units_left(table, task, lease)
            for session in dict.fromkeys(lease.holders.values()) or (0,):
                holder = _holder(table, session, now)
                count, since = held.get(holder, (0, now))
                held[holder] = (count + units, min(since, lease.since))
        noun = "group" if isinstance(task, GroupTaskState) else "row"
        lines += [
            f'{counted(count, noun, "is", "are")} leased for "{task.task.name}" by {holder}, for {now - since:.0f} s'
            for holder, (count, since) in held.items()
        ]
        if unseen:
            lines.append(counted(unseen, "more row", "is", "are") + f' leased for "{task.task.name}"')
    return lines


def _waiting_for_checkpoint(task: TaskState) -> list[str]:
    """How many rows wait for a checkpoint, and of which step."""
    count = task.counts[ACKED_WITH_STEP]
    if not count:
        return []
    name, step = task.task.name, task.stepped.latest
    call = f'call checkpointed({step}, task="{name}") once the model is saved'
    return [f"{counted(count, 'row', 'is', 'are')} kept until a checkpoint covers step {step}: {call}"]


def _holder(table: TableState, session: int, now: float) -> str:
    if not session:
        return "a rank that has not asked yet"
    silent = table.core.silent_s(session, now)
    return session_name(table, session) + (f" (silent {silent:.0f} s)" if silent >= SILENT_AFTER_S else "")


def _units_left(table: TableState, task: TaskState, lease: LeaseState) -> int:
    if not isinstance(task, GroupTaskState):
        return lease.left
    rows = lease.rows[lease.held]
    return int(np.unique(table.groups.units(rows, table.rows.pages.index(rows))).size)


def _leases_of(table: TableState, task: TaskState) -> Iterator[LeaseState]:
    if task.counts[LEASED]:
        for lease in table.core.leases.by_id.values():
            if lease.table == table.name and lease.task == task.task.name and lease.left:
                yield lease


def _pending(table: TableState, task: TaskState, now: float) -> list[str]:
    """Which fields rows lack, and which tasks could give them."""
    if not task.counts[PENDING]:
        return []
    at = table.rows.pages.index(sample(table))
    lines = _lacks(table, task, at[task.state.a[at] == PENDING], now, frozenset())
    return lines or [counted(task.counts[PENDING], "row", "is not complete", "are not complete")]


def _lacks(table: TableState, task: TaskState, at: IntArray, now: float, followed: frozenset[str]) -> list[str]:
    """Which fields the rows at `at` lack for the task. `followed`: tasks whose needs the text names already."""
    lines = []
    for name in task.task.needs:
        if lacking := int(_without(table, name, at).sum()):
            rows = "row lacks" if lacking == 1 else "rows lack"
            lines.append(f'{lacking} {rows} "{name}"{_givers(table, name, at, now, followed | {task.task.name})}')
    return lines


def _without(table: TableState, name: str, at: IntArray) -> np.typing.NDArray[np.bool_]:
    if name not in table.rows.fields:
        return np.ones(at.size, np.bool_)
    return ~table.rows.has_all(at, table.rows.mask((name,)))


def _givers(table: TableState, name: str, at: IntArray, now: float, followed: frozenset[str]) -> str:
    givers = [task for task in table.tasks.values() if name in task.task.gives]
    if not givers:
        return " (given by no task: put or update must bring it)"
    lacking = at[_without(table, name, at)]
    details = [
        *_for_givers(table, givers, lacking, now, followed),
        *_leased(table, givers, now),
        *_given_by_none(name, givers, lacking),
    ]
    names = ", ".join(f'"{task.task.name}"{_fails(task, now)}' for task in givers)
    return f" (given by {names}{': ' if details else ''}{', '.join(details)})"


def absence(table: TableState, task: TaskState, now: float) -> Absence | None:
    """Since when rows are ready for a task while no session works on it; None if a session does, or it is not known."""
    return table.core.absence(table.name, task.task.name, now) if task.ready_units else None


def _and_no_worker(table: TableState, task: TaskState, now: float) -> str:
    gone = table.core.absence(table.name, task.task.name, now)
    return f", and {gone.text}" if gone else ""


def _for_givers(
    table: TableState, givers: Iterable[TaskState], at: IntArray, now: float, followed: frozenset[str]
) -> list[str]:
    """The states of the rows at `at` in the tasks that give their missing fields, and why these tasks wait."""
    lines = []
    for task in givers:
        states = task.state.a[at]
        if ready := int((states == READY).sum()):
            lines.append(f"{ready} ready and not leased{_and_no_worker(table, task, now)}")
        if int((states == RETRYING).sum()):
            lines += retrying(task, now)
        if pending := int((states == PENDING).sum()):
            known = task.task.name in followed
            lacks = [] if known else _lacks(table, task, at[states == PENDING], now, followed)
            lines.append(
                f'{pending} without what "{task.task.name}" needs' + (f": {'; '.join(lacks)}" if lacks else "")
            )
    return lines


def _given_by_none(name: str, givers: Sequence[TaskState], at: IntArray) -> list[str]:
    """How many of the rows at `at` lack a field that no task will give."""
    has: BoolArray = np.zeros(at.size, np.bool_)
    for task in givers:
        has |= np.isin(task.state.a[at], OPEN)
    gone = int((~has).sum())
    return [f'no task will give "{name}" of {counted(gone, "row")}'] if gone else []


def _forming(table: TableState, task: GroupTaskState) -> list[str]:
    """Groups that have some ready members."""
    forming = [group for group in task.forming.values() if group.state == FORMING and group.ready]
    lines = []
    for group in forming[:GROUPS_SHOWN]:
        (pending,), ready = task.pending([group.unit]), group.ready
        size = table.groups.size_of(group.unit)
        known = table.groups.get(group.unit)
        absent = size - (known.present if known else 1)
        parts = [f"{ready} of {size} ready"]
        parts += [f"{pending} not complete"] if pending else []
        parts += [f"{absent} not put"] if absent else []
        lines.append(f"group {group.unit}: {', '.join(parts)}")
    if len(forming) > GROUPS_SHOWN:
        lines.append(f"{len(forming) - GROUPS_SHOWN} more groups are not whole")
    return lines


def sample(table: TableState) -> IntArray:
    """Live rows of the oldest pages."""
    pages = [table.rows.pages.rows_of(page) for page in table.rows.pages.pages()[:PAGES_SAMPLED]]
    rows = np.concatenate(pages) if pages else np.empty(0, np.int64)
    live: IntArray = rows[table.rows.pages.fate.a[table.rows.pages.index(rows)] == LIVE]
    return live


def explain_room(table: TableState, why: str, now: float) -> str:
    """Why a put waits for room."""
    return f'table "{table.name}" has no room: {why}; {rows_by_holder(table, now)}'


def rows_by_holder(table: TableState, now: float) -> str:
    """Which tasks are not done with the rows of the table, whether a worker leases from them, and who has reserved
    rows."""
    lines = []
    for task in table.tasks.values():
        counts = task.counts
        if task.open_rows:
            lines.append(
                f'task "{task.task.name}" has {counts[READY]} ready, '
                f"{counts[LEASED]} leased, {counts[PENDING] + counts[WAITING_FOR_GROUP]} not complete"
                + (f", {counts[RETRYING]} waiting after a failure" if counts[RETRYING] else "")
                + _and_no_worker(table, task, now)
            )
        lines += [f'task "{task.task.name}": {text}' for text in _waiting_for_checkpoint(task)]
    if table.flow.reserved:
        holders = tally(np.array([reservation.session for reservation in table.flow.reservations.values()], np.int64))
        lines.append(
            f"{counted(table.flow.reserved, 'row', 'is', 'are')} reserved by "
            f"{listing(session_name(table, reservation) for reservation, _ in holders)}"
        )
    ended = table.rows_resident - table.rows_live
    if ended and isinstance(table.retention, Manual):
        lines.append(
            f"{counted(ended, 'row', 'has', 'have')} ended, and will be kept until table.delete(rows), since the "
            "table's retention is Manual"
        )
    if ended and table.record is not None:
        lines.append(f"{counted(ended, 'row', 'has', 'have')} ended, but no file contains them yet")
    return "; ".join(lines) or ("no task takes its rows" if table.rows_live else "it is empty")
