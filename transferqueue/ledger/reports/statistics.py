"""Answers for people and metrics: stats, audit, the life of a row, stuck rows.

`transferqueue.wire.answers` declares their figures. Stats and audit cost O(tables x tasks), and a scan of the rows of
tables that lack copies; the life of a row and the doctor walk a bounded history or sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from msgspec.structs import asdict, replace

from transferqueue.errors import NotFound
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.reports.pipelines import pipeline
from transferqueue.ledger.requests.flow_control import why_clock_is_held
from transferqueue.ledger.requests.pending_versions import deltas_by_field
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.rows import DONE, DROPPED, LIVE, TableEvent, blocks_below
from transferqueue.ledger.rows.blocks import BlockRegistry
from transferqueue.ledger.rules.explain import (
    absence,
    drop_rates,
    explain_lease,
    explain_stranded,
    lost_rows,
    next_try_s,
    retrying,
    rows_by_holder,
    session_name,
)
from transferqueue.ledger.rules.lease_selection import first_units
from transferqueue.ledger.rules.requeue import LOST
from transferqueue.ledger.rules.required_results import stranded
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.table_state import SharedState, TableState
from transferqueue.ledger.tasks.group_task import FORMING, GroupTaskState
from transferqueue.ledger.tasks.task_state import (
    ACKED_WITH_STEP,
    KEPT_STALE,
    LEASED,
    PENDING,
    READY,
    RETRYING,
    STATES,
    WAITING_FOR_GROUP,
    TaskState,
)
from transferqueue.limits import COPY_POSTPONED_S
from transferqueue.wire.answers.doctor import DoctorAnswer, TaskDiagnosis
from transferqueue.wire.answers.row import RowEvent, RowField, RowLife, RowTask
from transferqueue.wire.answers.sessions import HeldLease, Sessions, SessionStats
from transferqueue.wire.answers.stats import BytesStats, ChannelStats, TableAudit, TableStats, TaskStats
from transferqueue.wire.messages import LeaseRequest

FATES = {LIVE: "live", DONE: "done", DROPPED: "dropped"}
_COUNTED: Final = (PENDING, WAITING_FOR_GROUP, RETRYING, READY, LEASED, ACKED_WITH_STEP, KEPT_STALE)
"""States whose rows `TaskStats` counts, under their names in `STATES`."""

# ---------------------------------------------------------------- stats


def table_stats(table: TableState, now: float) -> TableStats:
    """How full a table is, and in which states its rows are."""
    pacing = table.pacing
    return TableStats(
        **_counts(table),
        rows_resident=table.rows_resident,
        rows_limit=table.limits.rows,
        bytes=table.usage.bytes,
        bytes_limit=table.limits.bytes_max,
        rows_to_record=0 if table.record is None else table.record.waiting,
        rows_recorded=table.rows_recorded,
        rows_unrecorded=table.rows_unrecorded,
        columns_freed=table.columns_freed,
        column_bytes_freed=table.column_bytes_freed,
        fields={name: field.describe() for name, field in table.rows.fields.items()},
        extra_fields=table.extra_fields is not False,
        groups=len(table.groups),
        version=table.clock,
        cursor=table.ordinals.cursor(),
        sealed=table.sealed,
        replicas=table.usage.replicas,
        rows_one_copy=rows_with_one_copy(table),
        age_s=_oldest(table, now),
        staleness=_by_lag(table.staleness),
        staleness_in_flight=_by_lag(table.staleness_in_flight),
        staleness_in_queue=_by_lag(table.staleness_in_queue),
        max_staleness=None if pacing is None else pacing.max_staleness,
        reserved=table.flow.reserved,
        refills=table.flow.refill_rows,
        outstanding=table.outstanding,
        outstanding_limit=None if pacing is None else pacing.rows_ahead_max,
        pacing_task=None if pacing is None else pacing.task,
        tasks={name: _task_stats(table, task, now) for name, task in table.tasks.items()},
    )


def rows_with_one_copy(table: TableState) -> int:
    """Resident rows with a value that lies in one shard only, though the table keeps more copies."""
    blocks = table.core.blocks
    lacking = [blocks.blocks[number] for number in blocks.missing.blocks() if number in blocks.blocks]
    numbers = [block.at.block for block in lacking if block.usage is table.usage and len(block.extents) == 1]
    if not numbers:
        return 0
    at = table.rows.pages.index(table.rows.pages.resident_rows())
    return int(table.column_groups.lies_in(at, blocks_below(table.usage.continued, numbers)).sum())


def _by_lag(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(lag): rows for lag, rows in sorted(counts.items())}


def _task_stats(table: TableState, task: TaskState, now: float) -> TaskStats:
    leases = [
        lease
        for lease in table.core.leases.by_id.values()
        if lease.table == table.name and lease.task == task.task.name
    ]
    gone = absence(table, task, now)
    grouped = isinstance(task, GroupTaskState)
    return TaskStats(
        **{STATES[state]: task.counts[state] for state in _COUNTED},
        **asdict(task.counters),
        retry_s=next_try_s(task, now),
        paused_s=task.circuit.paused_s(now),
        errors=task.errors.view(now),
        leases=len(leases),
        age_s=_next_in_line(table, task, now),
        oldest_lease_s=max((now - lease.since for lease in leases), default=None),
        holders=sorted({session_name(table, session) for lease in leases for session in lease.holders.values()}),
        groups_ready=task.ready_units if grouped else None,
        groups_forming=_forming(task),
        stranded=_never_progresses(table, task),
        unattended_s=gone.since_s if gone else None,
        unattended=gone.text if gone else "",
    )


def _forming(task: TaskState) -> int | None:
    if not isinstance(task, GroupTaskState):
        return None
    return sum(group.state == FORMING for group in task.forming.values())


def _next_in_line(table: TableState, task: TaskState, now: float) -> float | None:
    """Age of the row that would be leased next."""
    units = first_units(table, task.queue(()), 1)
    if not units.size:
        return None
    rows, _ = task.members(units)
    return now - float(table.rows.put_at.a[table.rows.pages.index(rows)].min())


def _oldest(table: TableState, now: float) -> float | None:
    """Age of the oldest resident row. Rows are put in order of time."""
    for page in table.rows.pages.pages():
        rows = table.rows.pages.rows_of(page)
        if rows.size:
            return now - float(table.rows.put_at.a[table.rows.pages.index(rows[:1])][0])
    return None


def table_audit(table: TableState, now: float) -> TableAudit:
    """Where every row is that was ever put, and why leases failed."""
    errors = {name: seen for name, task in table.tasks.items() if (seen := task.errors.view(now))}
    return TableAudit(**_counts(table), errors=errors)


def _counts(table: TableState) -> dict[str, Any]:
    """The figures of `RowFates`."""
    live = sum(_live_rows(table, page) for page in table.rows.pages.pages())
    dropped = sum(table.rows_dropped.values())
    return {
        "rows_put": table.rows_put,
        "rows_live": live,
        "rows_done": table.rows_done,
        "rows_dropped": dropped,
        "dropped": dict(sorted(table.rows_dropped.items())),
        "rows_lost": table.rows_dropped.get(LOST, 0),
        "balanced": table.rows_put == live + table.rows_done + dropped,
    }


def _live_rows(table: TableState, page: int) -> int:
    pages = table.rows.pages
    return int((pages.fate.a[pages.index(pages.rows_of(page))] == LIVE).sum())


def channel_stats(channel: WeightChannelState, now: float) -> ChannelStats:
    """Versions of a channel, and which sessions generate with them."""
    newest = channel.versions.get(channel.latest)
    return ChannelStats(
        newest=channel.latest,
        kept=list(channel.versions),
        lost={str(version): why for version, why in channel.lost.items()},
        bytes=channel.usage.bytes,
        deltas=0 if newest is None else sum(map(len, deltas_by_field(newest.ranges).values())),
        deltas_refused=channel.deltas_refused,
        age_s=None if newest is None else now - newest.at,
        applied={str(session): applied.version for session, applied in channel.applied.items()},
        applied_age_s={str(session): now - applied.at for session, applied in channel.applied.items()},
        publish_lag_s={str(session): applied.lag_s for session, applied in channel.applied.items()},
        turns={str(session): turn.deadline - now for session, turn in channel.update_slots.items() if turn.deadline},
    )


def bytes_stats(blocks: BlockRegistry) -> BytesStats:
    """Counts of extents, blocks and pins of all tables and channels."""
    extents = blocks.extents.values()
    return BytesStats(
        extents=len(extents),
        extents_open=sum(extent.open for extent in extents),
        granted=sum(extent.nbytes for extent in extents),
        blocks=len(blocks.blocks),
        blocks_pinned=len(set().union(*blocks.pins.values())),
        to_copy=sum(sum(members.values()) for members in blocks.missing.waiting.values()),
        being_copied=blocks.missing.bytes_ordered,
    )


def sessions_stats(
    sessions: Iterable[SessionState], tables: Iterable[TableState], core: SharedState, now: float
) -> Sessions:
    """The holdings of each session. Reads each reservation and each grant once, for any number of sessions."""
    reserved = Counter[int]()
    for table in tables:
        for reservation in table.flow.reservations.values():
            reserved[reservation.session] += reservation.left
    grants = Counter(extent.session for extent in core.blocks.extents.values() if extent.open)
    return Sessions(
        {
            str(session.id): _session_stats(session, core, reserved[session.id], grants[session.id], now)
            for session in sessions
        }
    )


def _session_stats(session: SessionState, core: SharedState, reserved: int, grants: int, now: float) -> SessionStats:
    leases = core.leases.of(session.id)
    return SessionStats(
        session=session.id,
        label=session.label,
        client=session.client[:4].hex(),
        state="open" if session.open else "ended",
        opened_s=now - session.opened,
        silent_s=core.silent_s(session.id, now),
        leases=[HeldLease(lease=lease.id, table=lease.table, task=lease.task, rows=lease.left) for lease in leases],
        rows_leased=sum(lease.left for lease in leases),
        reserved=reserved,
        grants=grants,
        pins=len(core.blocks.pins.get(session.id, {})),
        replies=session.replies.kept,
    )


# ---------------------------------------------------------------- one row's whole life


def row_life(table: TableState, row: int, now: float) -> RowLife:
    """The events of a row and its current state. Of a freed row, only the recent events are known."""
    if not 0 <= row < table.rows.pages.next_row:
        raise NotFound(
            f'row {row} was never put into table "{table.name}"; ids so far end at {table.rows.pages.next_row - 1}'
        )
    events = table.history.of(row)
    at, resident = table.rows.pages.find(np.array([row], np.int64))
    return RowLife(
        table=table.name,
        row=row,
        **(_resident(table, row, at, now) if resident[0] else _forgotten(events, now)),
        put_by=next((event.session for event in events if event.what == "put" and event.session), None),
        events=[_event(event, now) for event in events],
        events_complete=any(event.what == "put" for event in events),
    )


def _event(event: TableEvent, now: float) -> RowEvent:
    return RowEvent(ago_s=now - event.at, what=event.what, task=event.task, session=event.session, detail=event.detail)


def _forgotten(events: list[TableEvent], now: float) -> dict[str, Any]:
    """How a freed row ended, from its events."""
    put = next((event for event in events if event.what == "put"), None)
    end = next((event for event in reversed(events) if event.what in ("done", "dropped")), None)
    return {
        "state": end.what if end else "forgotten",
        "reason": end.detail if end and end.what == "dropped" else "",
        "age_s": now - put.at if put else None,
        "resident": False,
    }


def _resident(table: TableState, row: int, at: IntArray, now: float) -> dict[str, Any]:
    fate = FATES[int(table.rows.pages.fate.a[at[0]])]
    ends = [event.detail for event in table.history.of(row) if event.what == "dropped"] if fate == "dropped" else []
    return {
        "state": fate,
        "reason": ends[-1] if ends else "",
        "age_s": now - float(table.rows.put_at.a[at[0]]),
        "key": table.rows.keys.get(row),
        "tags": dict(table.rows.tags.get(row, {})),
        **{name: column.a[at[0]].item() for name, column in table.rows.facts.items()},
        "fields": {name: _field(table, name, at) for name in table.rows.fields},
        "tasks": {name: _task_view(table, task, at, now) for name, task in table.tasks.items()},
    }


def _field(table: TableState, name: str, at: IntArray) -> RowField:
    """Whether a row has a field, and its value or the location of its bytes."""
    column = table.rows.inline.get(name)
    view = RowField(
        set=bool(table.rows.has_all(at, table.rows.mask((name,)))[0]),
        inline=column is not None,
        freed=bool(table.rows.were_freed(at, name)[0]),
    )
    if not view.set:
        return view
    if column is not None:
        value = column.a[at[0]].item()
        return replace(view, value=str(value) if isinstance(value, complex) else value)
    (place,) = table.column_groups.locate([name], at)
    block = table.core.blocks.blocks[int(place.blocks[0])].at
    return replace(view, block=block.block, slot=int(place.slots[0]), shard=block.shard, bytes=block.nbytes)


def _task_view(table: TableState, task: TaskState, at: IntArray, now: float) -> RowTask:
    """The state of a row in a task."""
    state = int(task.state.a[at[0]])
    lease = table.core.leases.by_id.get(int(task.hold.a[at[0]])) if state == LEASED else None
    holders = list(lease.holders.values()) if lease else []
    lacks = [
        name
        for name in task.task.needs
        if name not in table.rows.fields or not bool(table.rows.has_all(at, table.rows.mask((name,)))[0])
    ]
    return RowTask(
        state=STATES[state],
        lacks=lacks if state == PENDING else [],
        attempts=int(task.attempts.a[at[0]]),
        lease=lease.id if lease else None,
        session=holders[0] if holders else None,
        held_s=now - lease.since if lease else None,
        left_s=lease.deadline - now if lease and lease.deadline is not None else None,
    )


# ---------------------------------------------------------------- what stalls


def doctor(tables: Mapping[str, TableState], channels: dict[str, list[str]], now: float) -> DoctorAnswer:
    """For each table, in words: why each task waits and for whom, and why producers wait; and its pipeline. `channels`
    has sentences about each channel."""
    return DoctorAnswer(
        now_s=now,
        tables={name: _diagnose(table, now) for name, table in tables.items()},
        pipelines={name: pipeline(table) for name, table in tables.items()},
        channels=channels,
    )


def _diagnose(table: TableState, now: float) -> list[TaskDiagnosis]:
    lines = [_of_task(table, task, now) for task in table.tasks.values()]
    return lines + [TaskDiagnosis(task="", text=text) for text in _of_table(table, now)]


def _of_task(table: TableState, task: TaskState, now: float) -> TaskDiagnosis:
    gone = absence(table, task, now)
    return TaskDiagnosis(
        task=task.task.name,
        text=_task_line(table, task, now) + (f"; {gone.text}" if gone else ""),
        stranded=_never_progresses(table, task),
        unattended_s=gone.since_s if gone else None,
        died=gone is not None and gone.died,
        errors=task.errors.view(now),
        failing=task.failing,
    )


def _never_progresses(table: TableState, task: TaskState) -> bool:
    return not task.at_work and stranded(table, task)


def _of_table(table: TableState, now: float) -> list[str]:
    """Causes that block producers, the clock, and the end of the table; and which rows it loses."""
    lines = lost_rows(table) + _copies_lines(table)
    if table.rows_resident + table.flow.reserved >= table.limits.rows:
        lines.append(
            f"puts wait: {counted(table.limits.rows, 'row', 'is', 'are')} resident or reserved, which is the limit; "
            f"{rows_by_holder(table, now)}"
        )
    most = table.limits.bytes_max
    if most is not None and table.usage.bytes >= most:
        lines.append(
            f"puts wait: {table.usage.bytes} bytes are in use, of at most {most}; {rows_by_holder(table, now)}"
        )
    if table.pacing is not None and table.outstanding >= table.pacing.rows_ahead_max:
        lines.append(
            f"reservations wait: {table.outstanding} of {counted(table.pacing.rows_ahead_max, 'row', 'is', 'are')} "
            f'ahead of task "{table.pacing.task}"'
        )
    if held := why_clock_is_held(table, table.clock + 1):
        lines.append(held)
    return lines + (_end_lines(table) if table.sealed else []) + drop_rates(table)


def _copies_lines(table: TableState) -> list[str]:
    """How many rows would be lost with one more shard, and whether they are being copied."""
    if not (rows := rows_with_one_copy(table)):
        return []
    missing = table.core.blocks.missing
    if missing.orders:
        progress = f"shards copy {missing.bytes_ordered:,} bytes now"
    elif len(missing.postponed) < sum(map(len, missing.waiting.values())):
        progress = "no shard has room for a copy: start a further one (transferqueue shard), or consume rows"
    else:
        blocks = counted(len(missing.postponed), "block")
        progress = (
            f"copies of {blocks} failed from each place; they are tried again within {COPY_POSTPONED_S:g} s, and shard "
            "processes log why"
        )
    return [f"{counted(rows, 'row', 'has', 'have')} one copy left of {table.usage.replicas}: {progress}"]


def _task_line(table: TableState, task: TaskState, now: float) -> str:
    if not task.open_rows:
        state = "sealed" if table.sealed else "still open"
        return f'task "{task.task.name}" has nothing to do: no unfinished rows; the table is {state}'
    if _never_progresses(table, task):
        return explain_stranded(table, task, now)
    if task.failing:
        return "; ".join([f'task "{task.task.name}" fails: {task.errors.latest(now)}', *retrying(task, now)])
    if task.ready_units:
        ready = counted(task.ready_units, "group" if isinstance(task, GroupTaskState) else "row")
        return f'task "{task.task.name}" has {ready} ready, and {counted(task.counts[LEASED], "row")} leased'
    grouped = isinstance(task, GroupTaskState)
    request = LeaseRequest(table.name, task.task.name, rows=int(not grouped), groups=int(grouped))
    return explain_lease(table, task, request, now)


def _end_lines(table: TableState) -> list[str]:
    """Why a sealed table has not ended: tasks with a pending, held, ready or leased row."""
    return [
        f'the end of the table waits for task "{task.task.name}": {counted(task.open_rows, "row", "is", "are")} not '
        "done"
        for task in table.tasks.values()
        if task.open_rows
    ]
