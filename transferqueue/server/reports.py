"""The reports of a coordinator: the ledger's own, and the facts that only the server knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from msgspec.structs import replace

from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.reports.answers import Observation
from transferqueue.ledger.table_state import Absence
from transferqueue.server.identity import ServerIdentity
from transferqueue.server.loop_latency import Turns
from transferqueue.server.parts import Part
from transferqueue.server.sessions.session_table import OpenSession, SessionTable, Workers
from transferqueue.server.sessions.waiting import WaitingRequest, WaitQueue, wait_of
from transferqueue.server.shards.registry import ShardRegistry
from transferqueue.server.shards.remote_shard import RemoteShard
from transferqueue.transport.control.unix_socket import UnixPeer
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import Departed, DoctorAnswer, PipelineStage, TablePipeline
from transferqueue.wire.answers.events import EventsAnswer
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.sessions import Sessions, SessionStats
from transferqueue.wire.answers.stats import ServerStats, ShardStats, Stats, Waiting
from transferqueue.wire.home_coordinator import CoordinatorIndex

IDLE_S: Final = 3.0
"""A worker that asked for rows within this time is assumed to work on them, or to be about to ask again."""
WAITING_SHOWN_MAX: Final = 100
"""A report explains at most this many waiting requests, the oldest first: about a screen."""


class Counters:
    """Events since the server started, for `stats`. Each counter only grows."""

    def __init__(self) -> None:
        self.calls = 0
        self.garbage = 0
        self.unauthenticated_peers = 0
        self.repeated = 0
        self.leases_ended = 0
        self.sessions_dropped = 0
        self.internal_errors = 0


@dataclass(frozen=True, slots=True)
class ReportSources:
    """The parts of a coordinator that its reports read.

    Args:
        explain: why a request still waits, at the given time.
        bulk_port: of the own shard; 0: it does not listen.
        bulk_sent: bytes of reads there, by carrier.
        bulk_received: bytes of writes there, by carrier.
    """

    identity: ServerIdentity
    index: CoordinatorIndex
    ledger: Ledger
    sessions: SessionTable
    waiting: WaitQueue
    workers: Workers
    shards: ShardRegistry
    counters: Counters
    turns: Turns
    explain: Callable[[WaitingRequest, float], str]
    bulk_port: Callable[[], int]
    bulk_sent: Callable[[], dict[str, int]]
    bulk_received: Callable[[], dict[str, int]]
    parts: Sequence[Part]


def observe(sources: ReportSources, request: m.Observe, now: float) -> Observation:
    """The report that `request` asks for. `UsageError` for an unknown report."""
    report = sources.ledger.observe(request, now)
    match report:
        case Stats():
            return _stats(sources, report, request.table, now)
        case DoctorAnswer():
            return _doctor(sources, report, request.table, now)
        case RowLife():
            return replace(report, labels=_labels(sources, report))
        case Sessions():
            return _sessions(sources, report, now)
        case _:
            return report


def events(sources: ReportSources, request: m.ListEvents, now: float) -> EventsAnswer:
    """The events of rows of a table, by the clock of this life of the coordinator."""
    return replace(sources.ledger.events(request, now), epoch=sources.identity.epoch)


def absence(sources: ReportSources, table: str, task: str, now: float) -> Absence | None:
    """The time since when no worker has leased from a task, and the last worker. None if a session holds or waits for
    rows of it, or asked for rows less than `IDLE_S` ago."""
    if sources.waiting.is_waited_for(("task", table, task)) or sources.ledger.has_leased(table, task):
        return None
    asked, gone = sources.workers.last_to_ask(table, task), sources.workers.last_gone(table, task)
    if asked is not None:
        number, at = asked
        text = (
            f'no worker asks for "{task}": {sources.sessions.label_of(number)} is connected, and last asked for rows '
            f"{now - at:.0f} s ago"
        )
        return Absence(text, now - at) if now - at >= IDLE_S else None
    if gone is not None:
        left_s = now - gone.at
        last = f"left {left_s:.0f} s ago ({gone.label}, {gone.ending.text})"
        text = f'no worker of "{task}" is connected; the last {last}; start it again'
        return Absence(text, left_s, died=not gone.ending.was_announced)
    up_s = now - sources.identity.started_at
    return Absence(f'no worker of "{task}" has connected since this server started {up_s:.0f} s ago; start it', up_s)


def holders(sources: ReportSources, now: float) -> str:
    """The tables and sessions that hold bytes of the arena, the largest first, for error texts."""
    tables = _largest({f'table "{name}"': size for name, size in sources.ledger.bytes_of_tables().items()})
    sessions = _largest_holders(sources, now)
    return "; ".join(part for part in (tables, sessions) if part) or "extents that are granted and not yet written"


def _largest(sizes: dict[str, int]) -> str:
    ranked = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    return ", ".join(f"{name} ({size:,} bytes)" for size, name in ranked[:6])


def _largest_holders(sources: ReportSources, now: float) -> str:
    ranked = sorted(sources.ledger.sessions(now).values(), key=lambda session: -session.grants - session.pins)
    return ", ".join(
        f"{session.label} ({session.grants} grants, {session.pins} blocks in view)"
        for session in ranked[:6]
        if session.grants or session.pins
    )


def _labels(sources: ReportSources, life: RowLife) -> dict[str, str]:
    """The labels of the sessions in the life of a row, by session number as text."""
    numbers = {life.put_by, *(event.session for event in life.events)}
    numbers |= {task.session for task in life.tasks.values()}
    return {str(number): sources.sessions.label_of(number) for number in numbers if number}


def _doctor(sources: ReportSources, report: DoctorAnswer, table: str, now: float) -> DoctorAnswer:
    return replace(
        report,
        pipelines={name: _with_workers(sources, name, pipeline, now) for name, pipeline in report.pipelines.items()},
        waiting=_all_waiting(sources, table, now),
        sessions=_sessions(sources, sources.ledger.sessions(now), now),
    )


def _with_workers(sources: ReportSources, table: str, pipeline: TablePipeline, now: float) -> TablePipeline:
    """Add to each stage of a table its workers, and the last that left."""
    return replace(pipeline, stages=[_with_worker(sources, table, stage, now) for stage in pipeline.stages])


def _with_worker(sources: ReportSources, table: str, stage: PipelineStage, now: float) -> PipelineStage:
    gone = sources.workers.last_gone(table, stage.task)
    left = gone and Departed(
        label=gone.label, ago_s=now - gone.at, how=gone.ending.text, died=not gone.ending.was_announced
    )
    return replace(stage, workers=sources.workers.of(table, stage.task), left=left)


def _stats(sources: ReportSources, report: Stats, table: str, now: float) -> Stats:
    return replace(
        report,
        now_s=now,
        epoch=sources.identity.epoch,
        sessions=len(sources.sessions),
        waiting=_all_waiting(sources, table, now),
        server=_server(sources, now),
    )


_POLLS: Final = frozenset({m.PollCommands, m.TakeCopies})
"""Shards wait for work by these requests. Reports leave them out, since they miss nothing."""


def _all_waiting(sources: ReportSources, table: str, now: float) -> list[Waiting]:
    asked = (waiting for waiting in sources.waiting if type(waiting.request) not in _POLLS)
    requests = (waiting for waiting in asked if not table or _table_of(waiting) == table)
    return [_waiting(sources, waiting, now) for waiting in islice(requests, WAITING_SHOWN_MAX)]


def _server(sources: ReportSources, now: float) -> ServerStats:
    counters, identity, memory = sources.counters, sources.identity, sources.shards.own
    return ServerStats(
        address=identity.address,
        coordinator=str(sources.index),
        version=identity.version,
        pid=identity.pid,
        bulk_port=sources.bulk_port(),
        bulk_sent_bytes=sources.bulk_sent(),
        bulk_received_bytes=sources.bulk_received(),
        uptime_s=now - identity.started_at,
        capacity_bytes=memory.allocator.capacity,
        used_bytes=memory.used,
        backed_bytes=memory.arena.backed,
        extents=memory.extents,
        shards=[_shard(shard) for shard in sources.shards],
        calls=counters.calls,
        garbage=counters.garbage,
        repeated=counters.repeated,
        leases_ended=counters.leases_ended,
        sessions_dropped=counters.sessions_dropped,
        internal_errors=counters.internal_errors,
        turns=sources.turns.stats(),
        **{name: figure for part in sources.parts for name, figure in part.statistics().items()},
    )


def _shard(shard: RemoteShard) -> ShardStats:
    return ShardStats(
        shard=shard.number,
        label=shard.session.label,
        host=shard.session.hello.host,
        endpoint=shard.offer.endpoint,
        capacity_bytes=shard.offer.capacity,
        used_bytes=shard.used,
        backed_bytes=shard.used + shard.allocator.warm,
        drains=shard.draining,
        bulk_sent_bytes=shard.sent_bytes,
        bulk_received_bytes=shard.received_bytes,
    )


def _waiting(sources: ReportSources, waiting: WaitingRequest, now: float) -> Waiting:
    session = sources.sessions.get(waiting.session)
    return Waiting(
        session=waiting.session,
        label=session.label if session else "",
        request=m.tag_of(waiting.request),
        table=_table_of(waiting),
        task=str(getattr(waiting.request, "task", "")),
        waited_s=now - waiting.since,
        left_s=max(waiting.since + wait_of(waiting.request) - now, 0.0),
        why=sources.explain(waiting, now),
    )


def _table_of(waiting: WaitingRequest) -> str:
    request = waiting.request
    return str(getattr(request, "table", getattr(request, "name", "")))


def _sessions(sources: ReportSources, reports: Sessions, now: float) -> Sessions:
    """The ledger's report of each session, with the server's facts about its client."""
    states = [("open", session) for session in sources.sessions]
    states += [("ended", session) for session in sources.sessions.lingering]
    return Sessions(
        {
            str(session.number): _session(sources, reports[str(session.number)], session, state, now)
            for state, session in states
        }
    )


def _session(
    sources: ReportSources, report: SessionStats, session: OpenSession, state: str, now: float
) -> SessionStats:
    return replace(
        report,
        label=session.hello.label,
        pid=session.hello.pid,
        host=session.hello.host,
        opened_s=now - session.opened_at,
        silent_s=now - session.last_message_at,
        state=state,
        remote=session.remote,
        waits=sources.waiting.count(session.number),
        unsent_bytes=session.peer.stream.unsent_bytes if isinstance(session.peer, UnixPeer) else 0,
    )
