"""The reports of a coordinator: the ledger's own, and the facts that only the server knows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from msgspec.structs import replace

from transferqueue.ledger.reports.answers import Observation
from transferqueue.ledger.table_state import Absence
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.sessions.waiting import WaitingRequest, wait_of
from transferqueue.server.state import ServerState
from transferqueue.transport.control.unix_socket import UnixPeer
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import Departed, DoctorAnswer, PipelineStage, TablePipeline
from transferqueue.wire.answers.events import EventsAnswer
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.sessions import Sessions, SessionStats
from transferqueue.wire.answers.stats import ServerStats, Stats, Waiting

IDLE_S: Final = 3.0
"""A worker that asked for rows within this time is assumed to work on them, or to be about to ask again."""
WAITING_SHOWN_MAX: Final = 100
"""A report explains at most this many waiting requests, the oldest first: about a screen."""
Explain = Callable[[WaitingRequest, float], str]
"""Why a request still waits, at the given time."""


def observe(state: ServerState, explain: Explain, request: m.Observe, now: float) -> Observation:
    """The report that `request` asks for. `UsageError` for an unknown report."""
    report = state.ledger.observe(request, now)
    match report:
        case Stats():
            return _stats(state, explain, report, request.table, now)
        case DoctorAnswer():
            return _doctor(state, explain, report, request.table, now)
        case RowLife():
            return replace(report, labels=_labels(state, report))
        case Sessions():
            return _sessions(state, report, now)
        case _:
            return report


def events(state: ServerState, request: m.ListEvents, now: float) -> EventsAnswer:
    """The events of rows of a table, by the clock of this life of the coordinator."""
    return replace(state.ledger.events(request, now), epoch=state.identity.epoch)


def absence(state: ServerState, table: str, task: str, now: float) -> Absence | None:
    """The time since when no worker has leased from a task, and the last worker. None if a session holds or waits for
    rows of it, or asked for rows less than `IDLE_S` ago."""
    if state.waiting.is_waited_for(("task", table, task)) or state.ledger.has_leased(table, task):
        return None
    asked, gone = state.workers.last_to_ask(table, task), state.workers.last_gone(table, task)
    if asked is not None:
        number, at = asked
        text = (
            f'no worker asks for "{task}": {state.sessions.label_of(number)} is connected, and last asked for rows '
            f"{now - at:.0f} s ago"
        )
        return Absence(text, now - at) if now - at >= IDLE_S else None
    if gone is not None:
        left_s = now - gone.at
        last = f"left {left_s:.0f} s ago ({gone.label}, {gone.ending.text})"
        text = f'no worker of "{task}" is connected; the last {last}; start it again'
        return Absence(text, left_s, died=not gone.ending.was_announced)
    up_s = now - state.identity.started_at
    return Absence(f'no worker of "{task}" has connected since this server started {up_s:.0f} s ago; start it', up_s)


def holders(state: ServerState, now: float) -> str:
    """The tables and sessions that hold bytes of the arena, the largest first, for error texts."""
    tables = _largest({f'table "{name}"': size for name, size in state.ledger.bytes_of_tables().items()})
    sessions = _largest_holders(state, now)
    return "; ".join(part for part in (tables, sessions) if part) or "extents that are granted and not yet written"


def _largest(sizes: dict[str, int]) -> str:
    ranked = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    return ", ".join(f"{name} ({size:,} bytes)" for size, name in ranked[:6])


def _largest_holders(state: ServerState, now: float) -> str:
    ranked = sorted(state.ledger.sessions(now).values(), key=lambda session: -session.grants - session.pins)
    return ", ".join(
        f"{session.label} ({session.grants} grants, {session.pins} blocks in view)"
        for session in ranked[:6]
        if session.grants or session.pins
    )


def _labels(state: ServerState, life: RowLife) -> dict[str, str]:
    """The labels of the sessions in the life of a row, by session number as text."""
    numbers = {life.put_by, *(event.session for event in life.events)}
    numbers |= {task.session for task in life.tasks.values()}
    return {str(number): state.sessions.label_of(number) for number in numbers if number}


def _doctor(state: ServerState, explain: Explain, report: DoctorAnswer, table: str, now: float) -> DoctorAnswer:
    return replace(
        report,
        pipelines={name: _with_workers(state, name, pipeline, now) for name, pipeline in report.pipelines.items()},
        waiting=_all_waiting(state, explain, table, now),
        sessions=_sessions(state, state.ledger.sessions(now), now),
    )


def _with_workers(state: ServerState, table: str, pipeline: TablePipeline, now: float) -> TablePipeline:
    """Add to each stage of a table its workers, and the last that left."""
    return replace(pipeline, stages=[_with_worker(state, table, stage, now) for stage in pipeline.stages])


def _with_worker(state: ServerState, table: str, stage: PipelineStage, now: float) -> PipelineStage:
    gone = state.workers.last_gone(table, stage.task)
    left = gone and Departed(
        label=gone.label, ago_s=now - gone.at, how=gone.ending.text, died=not gone.ending.was_announced
    )
    return replace(stage, workers=state.workers.of(table, stage.task), left=left)


def _stats(state: ServerState, explain: Explain, report: Stats, table: str, now: float) -> Stats:
    return replace(
        report,
        now_s=now,
        epoch=state.identity.epoch,
        sessions=len(state.sessions),
        waiting=_all_waiting(state, explain, table, now),
        server=_server(state, now),
    )


_POLLS: Final = frozenset({m.PollCommands, m.TakeCopies})
"""Shards wait for work by these requests. Reports leave them out, since they miss nothing."""


def _all_waiting(state: ServerState, explain: Explain, table: str, now: float) -> list[Waiting]:
    asked = (waiting for waiting in state.waiting if type(waiting.request) not in _POLLS)
    requests = (waiting for waiting in asked if not table or _table_of(waiting) == table)
    return [_waiting(state, explain, waiting, now) for waiting in islice(requests, WAITING_SHOWN_MAX)]


def _server(state: ServerState, now: float) -> ServerStats:
    counters, identity, memory = state.counters, state.identity, state.lending.own
    return ServerStats(
        address=identity.address,
        coordinator=str(state.index),
        version=identity.version,
        pid=identity.pid,
        uptime_s=now - identity.started_at,
        capacity_bytes=memory.allocator.capacity,
        used_bytes=memory.used,
        backed_bytes=memory.arena.backed,
        extents=memory.extents,
        calls=counters.calls,
        garbage=counters.garbage,
        repeated=counters.repeated,
        leases_ended=counters.leases_ended,
        sessions_dropped=counters.sessions_dropped,
        internal_errors=counters.internal_errors,
        turns=state.turns.stats(),
        **{name: figure for part in state.parts for name, figure in part.statistics().items()},
    )


def _waiting(state: ServerState, explain: Explain, waiting: WaitingRequest, now: float) -> Waiting:
    session = state.sessions.get(waiting.session)
    return Waiting(
        session=waiting.session,
        label=session.label if session else "",
        request=m.tag_of(waiting.request),
        table=_table_of(waiting),
        task=str(getattr(waiting.request, "task", "")),
        waited_s=now - waiting.since,
        left_s=max(waiting.since + wait_of(waiting.request) - now, 0.0),
        why=explain(waiting, now),
    )


def _table_of(waiting: WaitingRequest) -> str:
    request = waiting.request
    return str(getattr(request, "table", getattr(request, "name", "")))


def _sessions(state: ServerState, reports: Sessions, now: float) -> Sessions:
    """The ledger's report of each session, with the server's facts about its client."""
    sessions = [("open", session) for session in state.sessions]
    sessions += [("ended", session) for session in state.sessions.lingering]
    return Sessions(
        {
            str(session.number): _session(state, reports[str(session.number)], session, stage, now)
            for stage, session in sessions
        }
    )


def _session(state: ServerState, report: SessionStats, session: OpenSession, stage: str, now: float) -> SessionStats:
    return replace(
        report,
        label=session.hello.label,
        pid=session.hello.pid,
        host=session.hello.host,
        opened_s=now - session.opened_at,
        silent_s=now - session.last_message_at,
        state=stage,
        remote=session.remote,
        waits=state.waiting.count(session.number),
        unsent_bytes=session.peer.stream.unsent_bytes if isinstance(session.peer, UnixPeer) else 0,
    )
