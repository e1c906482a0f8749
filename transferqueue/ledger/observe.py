"""Plain values for people and metrics: stats, audit, one row's life, what stalls.

Keys are documented in docs/OBSERVING.md. Stats and audit cost O(tables x tasks); a row's life and the doctor
walk a bounded history or sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from transferqueue.errors import NotFound
from transferqueue.ledger.blocks import Blocks
from transferqueue.ledger.channels import Channel
from transferqueue.ledger.explain import explain_lease, session_name, who_holds_rows
from transferqueue.ledger.flowing import clock_held
from transferqueue.ledger.gathering import FORMING, GroupTaskState
from transferqueue.ledger.pages import DONE, DROPPED, LIVE
from transferqueue.ledger.sessions import Session
from transferqueue.ledger.table import Core, Table
from transferqueue.ledger.tasks import LEASED, READY, STATES, TaskState
from transferqueue.wire.messages import Lease as LeaseRequest

Plain = dict[str, Any]
FATES = {LIVE: "live", DONE: "done", DROPPED: "dropped"}

# ---------------------------------------------------------------- stats


def table_stats(table: Table, now: float) -> Plain:
    """How full a table is, and where its rows are."""
    return {
        **table_audit(table),
        "rows_resident": table.rows.pages.resident,
        "rows_limit": table.limits.rows,
        "rows_reserved": table.flow.reserved,
        "rows_outstanding": table.outstanding,
        "refills": table.flow.owed_rows,
        "bytes": table.usage.bytes,
        "bytes_limit": table.limits.bytes_max,
        "groups": len(table.groups),
        "fields": {name: field.describe() for name, field in table.rows.fields.items()},
        "clock": table.clock,
        "sealed": table.sealed,
        "oldest_row_s": _oldest(table, now),
        "pacing": None if table.pacing is None else table.pacing.task,
        "rows_ahead_max": None if table.pacing is None else table.pacing.rows_ahead_max,
        "max_staleness": None if table.pacing is None else table.pacing.max_staleness,
        "tasks": {name: _task_stats(table, task, now) for name, task in table.tasks.items()},
    }


def _task_stats(table: Table, task: TaskState, now: float) -> Plain:
    leases = [one for one in table.core.leases.by_id.values() if one.table == table.name and one.task == task.task.name]
    stats: Plain = {STATES[state]: task.counts[state] for state in range(READY + 3)}
    stats["kept"] = task.counts[STATES.index("kept")]
    stats["leases"] = len(leases)
    stats["oldest_lease_s"] = max((now - one.since for one in leases), default=0.0)
    stats["holders"] = sorted({session_name(table, one) for lease in leases for one in lease.holders.values()})
    if isinstance(task, GroupTaskState):
        stats["groups_ready"] = task.ready_units
        stats["groups_forming"] = sum(one.state == FORMING for one in task.forming.values())
    return stats


def _oldest(table: Table, now: float) -> float:
    """Age of the oldest resident row; rows are put in order of time."""
    for page in table.rows.pages.pages():
        rows = table.rows.pages.rows_of(page)
        if rows.size:
            return now - float(table.rows.put_at.a[table.rows.pages.index(rows[:1])][0])
    return 0.0


def table_audit(table: Table) -> Plain:
    """Where every row that was ever put is now. balanced: the sum is right, counted twice independently."""
    fates = table.rows.pages.fate.a
    live = sum(
        int((fates[table.rows.pages.index(table.rows.pages.rows_of(page))] == LIVE).sum())
        for page in table.rows.pages.pages()
    )
    dropped = sum(table.rows_dropped.values())
    return {
        "rows_put": table.rows_put,
        "rows_live": live,
        "rows_done": table.rows_done,
        "rows_dropped": dict(sorted(table.rows_dropped.items())),
        "balanced": table.rows_put == live + table.rows_done + dropped,
    }


def channel_stats(channel: Channel, now: float) -> Plain:
    """Versions of a channel and who generates with which."""
    return {
        "latest": channel.latest,
        "kept": list(channel.versions),
        "bytes": channel.usage.bytes,
        "age_s": {version: now - one.at for version, one in channel.versions.items()},
        "applied": dict(channel.applied),
    }


def bytes_stats(blocks: Blocks) -> Plain:
    """Extents, blocks and pins of all tables and channels."""
    extents = blocks.extents.values()
    return {
        "extents": len(extents),
        "extents_open": sum(extent.open for extent in extents),
        "bytes_granted": sum(extent.nbytes for extent in extents),
        "blocks": len(blocks.blocks),
        "blocks_pinned": sum(block.pins > 0 for block in blocks.blocks.values()),
    }


def session_stats(session: Session, tables: Iterable[Table], core: Core, now: float) -> Plain:
    """What a session holds."""
    leases, blocks = core.leases.of(session.id), core.blocks
    return {
        "label": session.label,
        "client": session.client.hex(),
        "open": session.open,
        "age_s": now - session.opened,
        "silent_s": now - session.heard,
        "leases": [{"lease": one.id, "table": one.table, "task": one.task, "rows": one.left} for one in leases],
        "rows_leased": sum(one.left for one in leases),
        "rows_reserved": sum(one.left for table in tables for one in table.flow.of(session.id)),
        "blocks_pinned": len(blocks.pins.get(session.id, {})),
        "extents_granted": sum(extent.session == session.id for extent in blocks.extents.values()),
    }


# ---------------------------------------------------------------- one row's whole life


def row_life(table: Table, row: int, now: float) -> Plain:
    """What happened to a row, and where it is now. A finished row is known by its recent history only."""
    events = [
        {"at": event.at, "ago_s": now - event.at, "what": event.what, "task": event.task,
         "by": session_name(table, event.session) if event.session else "", "detail": event.detail}
        for event in table.history.of(row)
    ]  # fmt: skip
    if not 0 <= row < table.rows.pages.next_row:
        raise NotFound(
            f'row {row} was never put into table "{table.name}"; ids so far end at {table.rows.pages.next_row - 1}'
        )
    at, there = table.rows.pages.find(np.array([row], np.int64))
    life: Plain = {"row": row, "table": table.name, "events": events, "events_forgotten": table.history.forgotten}
    if not there[0]:
        return {**life, "fate": _fate_of(events), "resident": False}
    return {**life, **_resident(table, row, int(at[0]), now)}


def _fate_of(events: list[Plain]) -> str:
    ends = [event for event in events if event["what"] in ("done", "dropped")]
    if not ends:
        return "finished"
    return f"dropped({ends[-1]['detail']})" if ends[-1]["what"] == "dropped" else "done"


def _resident(table: Table, row: int, at: int, now: float) -> Plain:
    place = np.array([at], np.int64)
    has = [name for name in table.rows.fields if bool(table.rows.has_all(place, table.rows.mask((name,)))[0])]
    return {
        "fate": FATES[int(table.rows.pages.fate.a[at])],
        "resident": True,
        "age_s": now - float(table.rows.put_at.a[at]),
        "fields": has,
        "lacks": [name for name in table.rows.fields if name not in has],
        "key": table.rows.keys.get(row, ""),
        "tags": dict(table.rows.tags.get(row, {})),
        **{name: column.a[at].item() for name, column in table.rows.facts.items()},
        "tasks": {name: _state_of(table, task, at) for name, task in table.tasks.items()},
    }


def _state_of(table: Table, task: TaskState, at: int) -> Plain:
    state: Plain = {"state": STATES[int(task.state.a[at])], "attempts": int(task.attempts.a[at])}
    lease = table.core.leases.by_id.get(int(task.hold.a[at])) if state["state"] == STATES[LEASED] else None
    if lease is not None:
        state["lease"] = lease.id
        state["by"] = [session_name(table, session) for session in lease.holders.values()]
        state["since"] = lease.since
        state["deadline"] = lease.deadline
    return state


# ---------------------------------------------------------------- what stalls


def doctor(tables: Mapping[str, Table], now: float) -> Plain:
    """For each table, in words: what each task waits for, who holds it, and why producers wait."""
    return {name: _diagnose(table, now) for name, table in tables.items()}


def _diagnose(table: Table, now: float) -> list[str]:
    told = [_task_line(table, task, now) for task in table.tasks.values()]
    if table.rows.pages.resident + table.flow.reserved >= table.limits.rows:
        told.append(
            f"puts wait: {table.limits.rows} rows are there or reserved, the most there may be; {who_holds_rows(table)}"
        )
    most = table.limits.bytes_max
    if most is not None and table.usage.bytes >= most:
        told.append(f"puts wait: {table.usage.bytes} bytes are there, of at most {most}; {who_holds_rows(table)}")
    if table.pacing is not None and table.outstanding >= table.pacing.rows_ahead_max:
        told.append(
            f'reserves wait for task "{table.pacing.task}": {table.outstanding} rows are outstanding, of at most '
            f"{table.pacing.rows_ahead_max}"
        )
    if held := clock_held(table, table.clock + 1):
        told.append(held)
    if table.sealed:
        told += _end_lines(table)
    return told


def _task_line(table: Table, task: TaskState, now: float) -> str:
    if not task.open_rows:
        return f'task "{task.task.name}" has nothing to do'
    if task.ready_units:
        unit = "groups" if isinstance(task, GroupTaskState) else "rows"
        return f'task "{task.task.name}" has {task.ready_units} {unit} ready, and {task.counts[LEASED]} rows leased'
    return explain_lease(table, task, LeaseRequest(table.name, task.task.name, rows=1), now)


def _end_lines(table: Table) -> list[str]:
    """A sealed table ends for a task when it has no pending, held, ready or leased row."""
    return [
        f'the end of the table waits for task "{task.task.name}": {task.open_rows} rows are not done'
        for task in table.tasks.values()
        if task.open_rows
    ]
