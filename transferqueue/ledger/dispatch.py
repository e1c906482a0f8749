"""Operations that need more than one table: on tables themselves, on sessions, memory and weight channels.

Those on the rows of one table are in `transferqueue.ledger.requests`. Import `HANDLERS` from here: then all are
registered.
"""

from __future__ import annotations

from typing import Final

from transferqueue.errors import AlreadyExists, DeadlineExceeded, Full, NotFound, ProtocolError, UsageError, listing
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import decode_ids
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.reports.answers import observed
from transferqueue.ledger.requests import (
    ack,
    checkpoints,
    dropped,
    flow_control,
    lease,
    put,
    read,
    tables,
    weight_channels,
)
from transferqueue.ledger.requests.registry import HANDLERS, Outcome, carries_out
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.rows import life_of
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.state import LedgerState
from transferqueue.limits import ROW_MEMORY_BYTES, TABLES_MAX, check_name
from transferqueue.wire import codec
from transferqueue.wire import messages as m

__all__ = ["HANDLERS"]

_FAMILIES: Final = (ack, checkpoints, dropped, flow_control, lease, put, read)
"""Modules that register operations on the rows of one table."""

# ---------------------------------------------------------------- tables


@carries_out(m.CreateTable)
def _create(state: LedgerState, request: m.CreateTable, session: SessionState, call: int) -> Outcome:
    tables.check_create(state.core, request)
    there = state.tables.get(request.name)
    if there is not None:
        if not request.exist_ok:
            raise AlreadyExists(f'table "{request.name}" exists already; pass exist_ok=True to open it')
        if other := tables.other_terms(there, request):
            raise AlreadyExists(
                f'table "{request.name}" exists with other terms: {listing(other)}; give the terms that it was made '
                "with, open it by Queue.table, or end it by drop_table"
            )
        return there.terms()
    if len(state.tables) >= TABLES_MAX:
        raise Full(f"{TABLES_MAX} tables exist, the most there may be; drop some")
    state.core.begin()
    table = state.add(tables.create_table(state.core, request))
    if table.record is not None:
        table.record.life = life_of(session.client, session.id, call, state.now, request.name)
    if table.pacing is not None and table.pacing.channel in state.channels:
        table.clock = max(0, state.channels[table.pacing.channel].latest)
    state.core.effects.wake("table", request.name)
    return table.terms()


@carries_out(m.OpenTable)
def _open(state: LedgerState, request: m.OpenTable, session: SessionState, call: int) -> Outcome:
    if request.name not in state.tables and request.wait_s > 0:
        return Blocked((("table", request.name),))
    return state.table(request.name).terms()


@carries_out(m.AddTask)
def _add_task(state: LedgerState, request: m.AddTask, session: SessionState, call: int) -> Outcome:
    return tables.add_task(state.table(request.table), request.task, state.now)


@carries_out(m.AddFields)
def _add_fields(state: LedgerState, request: m.AddFields, session: SessionState, call: int) -> Outcome:
    table = state.table(request.table)
    known = table.rows.check_fields(request.fields)
    table.begin(columns=len(request.fields))
    for field in known.values():
        table.rows.add_field(field)
    return table.terms()


@carries_out(m.DropTable)
def _drop_table(state: LedgerState, request: m.DropTable, session: SessionState, call: int) -> Outcome:
    table = state.table(request.name)
    rows = table.rows_live
    tables.check_all_recorded(table)
    resident = len(table.rows.pages.resident_rows()) if request.empty else 0
    if resident:
        raise UsageError(
            f'table "{table.name}" has {counted(resident, "row")} and is dropped only when empty; delete them first'
        )
    table.begin(table.rows.pages.resident)
    tables.drop_table(table, state.now)
    state.remove(request.name)
    kept = state.dropped_tables
    counts = {"put": table.rows_put, "done": table.rows_done, "dropped": sum(table.rows_dropped.values())}
    for name, count in counts.items():
        kept[name] = kept.get(name, 0) + count
    return m.DoneReply(rows)


@carries_out(m.ListTables)
def _list_tables(state: LedgerState, request: m.ListTables, session: SessionState, call: int) -> Outcome:
    return m.Tables(sorted(state.tables))


# ---------------------------------------------------------------- bytes and sessions


@carries_out(m.Unpin)
def _unpin(state: LedgerState, request: m.Unpin, session: SessionState, call: int) -> Outcome:
    blocks, counts = decode_ids("blocks", request.blocks), decode_ids("counts", request.counts)
    if blocks.size != counts.size:
        raise ProtocolError(f"{blocks.size} blocks are unpinned with {counts.size} counts; give one a block")
    total: dict[int, int] = {}
    for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
        if count < 1:
            raise ProtocolError(f"block {block} is unpinned {count} times; counts are positive")
        total[block] = total.get(block, 0) + count
    state.core.blocks.check_unpin(session.id, total)
    state.core.begin()
    state.core.blocks.unpin(session.id, total)
    return m.DoneReply(len(total))


@carries_out(m.ReturnGrant)
def _return_grant(state: LedgerState, request: m.ReturnGrant, session: SessionState, call: int) -> Outcome:
    if state.core.blocks.may_return(session.id, request.extent):
        state.core.begin()
        state.core.blocks.return_grant(request.extent)
    return m.DoneReply()


@carries_out(m.Heartbeat)
def _heartbeat(state: LedgerState, request: m.Heartbeat, session: SessionState, call: int) -> Outcome:
    return m.DoneReply()


@carries_out(m.Goodbye)
def _goodbye(state: LedgerState, request: m.Goodbye, session: SessionState, call: int) -> Outcome:
    state.core.begin()
    state.close_session(session.id)
    state.end_pins(session.id)
    return m.DoneReply()


# ---------------------------------------------------------------- weights


@carries_out(m.Publish)
def _publish(state: LedgerState, request: m.Publish, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel) or WeightChannelState(check_name("channel", request.channel))
    weight_channels.check_publish(channel, state.core.blocks, session.id, request)
    if request.part:
        state.core.begin()
        weight_channels.keep_part(channel, state.core.blocks, request, state.core.deadlines, state.now)
        state.core.effects.wake("parts", request.channel)
        return m.DoneReply(len(request.fields))
    if missing := weight_channels.missing_parts(channel, request):
        if request.wait_s > 0:
            return Blocked((("parts", request.channel),))
        raise DeadlineExceeded(missing)
    followers = state.followers(request.channel)
    held = [table for table in followers if flow_control.why_clock_is_held(table, request.version)]
    if held and request.wait_s > 0:
        return Blocked(tuple(("clock", table.name) for table in held))
    if held:
        raise DeadlineExceeded(flow_control.why_clock_is_held(held[0], request.version))
    state.core.begin(sum(table.rows.pages.resident for table in followers) * ROW_MEMORY_BYTES)
    state.channels[request.channel] = channel
    weight_channels.publish(channel, state.core.blocks, request, state.now)
    for table in followers:
        flow_control.set_clock(table, request.version, state.now)
    state.core.effects.wake("channel", request.channel)
    return m.DoneReply(len(request.fields))


@carries_out(m.BeginVersion)
def _begin(state: LedgerState, request: m.BeginVersion, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel) or WeightChannelState(check_name("channel", request.channel))
    begun = weight_channels.begin(channel, state.core, request, session.id, state.now)
    state.channels[request.channel] = channel
    state.core.effects.wake("parts", request.channel)
    return begun


@carries_out(m.GiveUpVersion)
def _give_up(state: LedgerState, request: m.GiveUpVersion, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel)
    pending = channel.pending if channel is not None else None
    if channel is None or pending is None or (pending.number, pending.session) != (request.pending, session.id):
        return m.DoneReply()
    state.core.begin()
    weight_channels.give_up(channel, state.core.blocks, "the session that began it gave it up")
    state.core.effects.wake("parts", request.channel)
    return m.DoneReply(1)


@carries_out(m.Pull)
def _pull(state: LedgerState, request: m.Pull, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel) or WeightChannelState(request.channel)
    return weight_channels.pull(channel, state.core, request, session.id)


@carries_out(m.ReportApplied)
def _applied(state: LedgerState, request: m.ReportApplied, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel)
    if channel is None:
        raise NotFound(f'channel "{request.channel}" does not exist; there are {listing(state.channels)}')
    weight_channels.apply_version(channel, request, session.id, state.now)
    return m.DoneReply()


@carries_out(m.GetLatestVersion)
def _basis(state: LedgerState, request: m.GetLatestVersion, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel) or WeightChannelState(check_name("channel", request.channel))
    return weight_channels.basis(channel, state.core.blocks)


@carries_out(m.DropDeltas)
def _drop_deltas(state: LedgerState, request: m.DropDeltas, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel)
    return m.DoneReply(0 if channel is None else weight_channels.drop_history(channel, state.core))


@carries_out(m.AcquireUpdateSlot)
def _turn(state: LedgerState, request: m.AcquireUpdateSlot, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel)
    if channel is None:
        raise NotFound(f'channel "{request.channel}" does not exist; there are {listing(state.channels)}')
    return weight_channels.take_turn(channel, state.core, request, session.id, state.now)


@carries_out(m.ReleaseUpdateSlot)
def _end_turn(state: LedgerState, request: m.ReleaseUpdateSlot, session: SessionState, call: int) -> Outcome:
    channel = state.channels.get(request.channel)
    state.core.begin()
    ended = channel is not None and weight_channels.end_turn(channel, session.id, state.core.effects)
    return m.DoneReply(int(ended))


@carries_out(m.Observe)
def _observe(state: LedgerState, request: m.Observe, session: SessionState, call: int) -> Outcome:
    return codec.encode_observed(observed(state, request))
