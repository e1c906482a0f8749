"""Answers to `Observe`, and texts that say why a request waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.errors.text import counted
from transferqueue.ledger.reports import statistics
from transferqueue.ledger.reports.weight_channels import channel_lines
from transferqueue.ledger.requests import flow_control, weight_channels
from transferqueue.ledger.requests.put import no_room
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.rules.explain import explain_lease, explain_room, rows_by_holder
from transferqueue.ledger.state import LedgerState
from transferqueue.ledger.table_state import TableState
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.row import RowLife
from transferqueue.wire.answers.sessions import Sessions
from transferqueue.wire.answers.stats import AuditAnswer, Stats

# ---------------------------------------------------------------- observations


def observed(state: LedgerState, request: m.Observe) -> Observation:
    """The ledger's part of the answer; `UsageError` lists the subjects."""
    view = _VIEWS.get(request.what)
    if view is None:
        raise UsageError(f"{request.what!r} cannot be observed; ask for {listing(_VIEWS)}")
    chosen: Mapping[str, TableState] = {request.table: state.table(request.table)} if request.table else state.tables
    return view(state, request, chosen)


def _stats(state: LedgerState, request: m.Observe, tables: Mapping[str, TableState]) -> Stats:
    return Stats(
        now_s=state.now,
        tables={name: statistics.table_stats(table, state.now) for name, table in tables.items()},
        channels={name: statistics.channel_stats(channel, state.now) for name, channel in state.channels.items()},
        bytes=statistics.bytes_stats(state.core.blocks),
        sessions=sum(session.open for session in state.sessions.values()),
    )


def _audit(state: LedgerState, request: m.Observe, tables: Mapping[str, TableState]) -> AuditAnswer:
    audits = {name: statistics.table_audit(table, state.now) for name, table in tables.items()}
    balanced = all(audit.balanced for audit in audits.values())
    return AuditAnswer(balanced=balanced, tables=audits, dropped_tables=dict(state.dropped_tables))


def _row(state: LedgerState, request: m.Observe, tables: Mapping[str, TableState]) -> RowLife:
    if not request.table:
        raise UsageError(f"a row is observed in a table; name one of {listing(state.tables)}")
    return statistics.row_life(tables[request.table], request.row, state.now)


def _doctor(state: LedgerState, request: m.Observe, tables: Mapping[str, TableState]) -> DoctorAnswer:
    channels = {} if request.table else state.channels
    lines = {name: channel_lines(channel, state.core, state.now) for name, channel in channels.items()}
    return statistics.doctor(tables, lines, state.now)


def sessions(state: LedgerState) -> Sessions:
    """The holdings of each session."""
    return statistics.sessions_stats(state.sessions.values(), state.tables.values(), state.core, state.now)


Observation = Stats | AuditAnswer | RowLife | DoctorAnswer | Sessions
View = Callable[[LedgerState, m.Observe, Mapping[str, TableState]], Observation]
_VIEWS: Final[dict[str, View]] = {
    "stats": _stats,
    "audit": _audit,
    "row": _row,
    "doctor": _doctor,
    "sessions": lambda state, request, tables: sessions(state),
}

# ---------------------------------------------------------------- why a request waits


def explained(state: LedgerState, request: m.Request) -> str:
    """Why the request waits and for whom, or that it does not wait."""
    explain = _EXPLANATIONS.get(type(request))
    try:
        return explain(state, request) if explain else f"{type(request).__name__} does not wait"
    except NotFound as gone:
        return str(gone)


def _of_lease(state: LedgerState, request: m.LeaseRequest) -> str:
    table, task = state.task(request.table, request.task)
    return explain_lease(table, task, request, state.now)


def _of_put(state: LedgerState, request: m.PutRequest) -> str:
    table = state.table(request.table)
    nbytes = sum(block.nbytes for block in request.columns.blocks if block.extent)  # a reference takes none
    why = no_room(table, request.rows, table.usage.replicas * nbytes)
    return explain_room(table, why or "there is room now", state.now)


def _of_reserve(state: LedgerState, request: m.Reserve) -> str:
    table = state.table(request.table)
    why = flow_control.why_reserve_waits(table, request) or "nothing prevents it now"
    return (
        f'the reservation of {counted(request.rows, "row")} in table "{table.name}" waits: {why}; '
        f"{rows_by_holder(table, state.now)}"
    )


def _of_advance(state: LedgerState, request: m.AdvanceClock) -> str:
    return flow_control.why_clock_is_held(state.table(request.table), request.version) or "the clock may advance now"


def _of_publish(state: LedgerState, request: m.Publish) -> str:
    channel = state.channels.get(request.channel)
    missing = weight_channels.missing_parts(channel, request) if channel is not None else ""
    held = [flow_control.why_clock_is_held(table, request.version) for table in state.followers(request.channel)]
    return missing or "; ".join(why for why in held if why) or "nothing holds the clock now"


def _of_pull(state: LedgerState, request: m.Pull) -> str:
    return weight_channels.explain_pull(
        state.channels.get(request.channel) or WeightChannelState(request.channel), request
    )


def _of_turn(state: LedgerState, request: m.AcquireUpdateSlot) -> str:
    return weight_channels.explain_turn(
        state.channels.get(request.channel) or WeightChannelState(request.channel), request, state.core.labels
    )


def _of_open(state: LedgerState, request: m.OpenTable) -> str:
    return f'table "{request.name}" was not created; there are {listing(state.tables)}'


_EXPLANATIONS: Final[dict[type, Callable[[LedgerState, Any], str]]] = {
    m.LeaseRequest: _of_lease,
    m.PutRequest: _of_put,
    m.ContinueRequest: _of_put,
    m.Reserve: _of_reserve,
    m.AdvanceClock: _of_advance,
    m.Publish: _of_publish,
    m.Pull: _of_pull,
    m.AcquireUpdateSlot: _of_turn,
    m.OpenTable: _of_open,
}
