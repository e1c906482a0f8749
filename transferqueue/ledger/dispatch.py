"""What each request does: one function a request, by type. Shared signature: state, request, session, call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from transferqueue.errors import AlreadyExists, DeadlineExceeded, Full, NotFound, ProtocolError, UsageError, listing
from transferqueue.ledger.effects import MustWait
from transferqueue.ledger.reports.answers import observed
from transferqueue.ledger.requests import ack as returns
from transferqueue.ledger.requests import checkpoints as stepped
from transferqueue.ledger.requests import flow_control as flowing
from transferqueue.ledger.requests import lease as handover
from transferqueue.ledger.requests import put as intake
from transferqueue.ledger.requests import read as reading
from transferqueue.ledger.requests import tables as terms
from transferqueue.ledger.requests import weight_channels as channels
from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.ledger.rows.arrays import decode_ids
from transferqueue.ledger.sessions import SessionState
from transferqueue.ledger.state import LedgerState
from transferqueue.limits import TABLES_MAX, check_name
from transferqueue.wire import messages as m

Answer = m.Reply | MustWait

# ---------------------------------------------------------------- tables


def _create(state: LedgerState, request: m.CreateTable, session: SessionState, call: int) -> Answer:
    terms.check_create(state.core, request)
    there = state.tables.get(request.name)
    if there is not None:
        if not request.exist_ok:
            raise AlreadyExists(f'table "{request.name}" exists already; pass exist_ok=True to open it')
        if other := terms.other_terms(there, request):
            raise AlreadyExists(
                f'table "{request.name}" exists with other terms: {listing(other)}; give the terms that it was made with, open it by '
                "Queue.table, or end it by drop_table"
            )
        return there.terms()
    if len(state.tables) >= TABLES_MAX:
        raise Full(f"{TABLES_MAX} tables exist, the most there may be; drop some")
    table = state.tables[request.name] = terms.create_table(state.core, request)
    if table.pacing is not None and table.pacing.channel in state.channels:
        table.clock = max(0, state.channels[table.pacing.channel].latest)
    state.core.effects.wake("table", request.name)
    return table.terms()


def _open(state: LedgerState, request: m.OpenTable, session: SessionState, call: int) -> Answer:
    if request.name not in state.tables and request.wait_s > 0:
        return MustWait((("table", request.name),))
    return state.table(request.name).terms()


def _add_task(state: LedgerState, request: m.AddTask, session: SessionState, call: int) -> Answer:
    return terms.add_task(state.table(request.table), request.task, state.now)


def _add_fields(state: LedgerState, request: m.AddFields, session: SessionState, call: int) -> Answer:
    table = state.table(request.table)
    known = table.rows.check_fields(request.fields)
    for field in known.values():
        table.rows.add_field(field)
    return table.terms()


def _drop_table(state: LedgerState, request: m.DropTable, session: SessionState, call: int) -> Answer:
    table = state.table(request.name)
    rows = table.rows_live
    resident = len(table.rows.pages.resident_rows()) if request.empty else 0
    if resident:
        raise UsageError(f'table "{table.name}" has {resident} rows and is dropped only when empty; delete them first')
    terms.drop_table(table, state.now)
    del state.tables[request.name]
    kept = state.dropped_tables
    counts = {"put": table.rows_put, "done": table.rows_done, "dropped": sum(table.rows_dropped.values())}
    for name, count in counts.items():
        kept[name] = kept.get(name, 0) + count
    return m.DoneReply(rows)


def _list_tables(state: LedgerState, request: m.ListTables, session: SessionState, call: int) -> Answer:
    return m.Tables(sorted(state.tables))


def _seal(state: LedgerState, request: m.Seal, session: SessionState, call: int) -> Answer:
    return flowing.seal(state.table(request.table), state.now)


def _advance(state: LedgerState, request: m.AdvanceClock, session: SessionState, call: int) -> Answer:
    table = state.table(request.table)
    if table.pacing is not None and table.pacing.channel is not None:
        raise UsageError(
            f'the clock of table "{table.name}" is weight channel "{table.pacing.channel}"; publish a version there'
        )
    return flowing.advance(table, request, state.now)


# ---------------------------------------------------------------- bytes and sessions


def _unpin(state: LedgerState, request: m.Unpin, session: SessionState, call: int) -> Answer:
    blocks, counts = decode_ids("blocks", request.blocks), decode_ids("counts", request.counts)
    if blocks.size != counts.size:
        raise ProtocolError(f"{blocks.size} blocks are unpinned with {counts.size} counts; give one a block")
    total: dict[int, int] = {}
    for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
        if count < 1:
            raise ProtocolError(f"block {block} is unpinned {count} times; counts are positive")
        total[block] = total.get(block, 0) + count
    state.core.blocks.unpin(session.id, total)
    return m.DoneReply(len(total))


def _return_grant(state: LedgerState, request: m.ReturnGrant, session: SessionState, call: int) -> Answer:
    state.core.blocks.return_grant(session.id, request.extent)
    return m.DoneReply()


def _heartbeat(state: LedgerState, request: m.Heartbeat, session: SessionState, call: int) -> Answer:
    return m.DoneReply()


def _goodbye(state: LedgerState, request: m.Goodbye, session: SessionState, call: int) -> Answer:
    state.close_session(session.id)
    state.end_pins(session.id)
    return m.DoneReply()


# ---------------------------------------------------------------- rows


def _put(state: LedgerState, request: m.PutRequest, session: SessionState, call: int) -> Answer:
    return intake.put(state.table(request.table), request, session.id, (session.client, call), state.now)


def _update(state: LedgerState, request: m.Update, session: SessionState, call: int) -> Answer:
    return intake.update(state.table(request.table), request, session.id, state.now)


def _lease(state: LedgerState, request: m.LeaseRequest, session: SessionState, call: int) -> Answer:
    table, task = state.task(request.table, request.task)
    return handover.lease(table, task, request, session.id, state.now)


def _ack(state: LedgerState, request: m.Ack, session: SessionState, call: int) -> Answer:
    return returns.ack(state.table(request.table), request, session.id, state.now)


def _checkpointed(state: LedgerState, request: m.CommitCheckpoint, session: SessionState, call: int) -> Answer:
    return stepped.checkpointed(state.table(request.table), request, state.now)


def _rollback(state: LedgerState, request: m.Rollback, session: SessionState, call: int) -> Answer:
    return stepped.rollback(state.table(request.table), request, state.now)


def _cursor(state: LedgerState, request: m.Cursor, session: SessionState, call: int) -> Answer:
    return m.CursorValue(state.table(request.table).ordinals.cursor(request.start))


def _release(state: LedgerState, request: m.ReleaseRequest, session: SessionState, call: int) -> Answer:
    return returns.release(state.table(request.table), request, session.id, state.now)


def _renew(state: LedgerState, request: m.Renew, session: SessionState, call: int) -> Answer:
    return returns.renew(state.table(request.table), request, session.id, state.now)


def _reserve(state: LedgerState, request: m.Reserve, session: SessionState, call: int) -> Answer:
    return flowing.reserve(state.table(request.table), request, session.id)


def _unreserve(state: LedgerState, request: m.Unreserve, session: SessionState, call: int) -> Answer:
    return flowing.unreserve(state.table(request.table), request, session.id)


def _drop(state: LedgerState, request: m.Drop, session: SessionState, call: int) -> Answer:
    return intake.drop(state.table(request.table), request, state.now)


def _delete(state: LedgerState, request: m.Delete, session: SessionState, call: int) -> Answer:
    return intake.delete(state.table(request.table), request, state.now)


def _find(state: LedgerState, request: m.Find, session: SessionState, call: int) -> Answer:
    return reading.find(state.table(request.table), request)


def _read(state: LedgerState, request: m.ReadRequest, session: SessionState, call: int) -> Answer:
    return reading.read(state.table(request.table), request, session.id)


# ---------------------------------------------------------------- weights


def _publish(state: LedgerState, request: m.Publish, session: SessionState, call: int) -> Answer:
    channel = state.channels.get(request.channel) or WeightChannelState(check_name("channel", request.channel))
    channels.check_publish(channel, state.core.blocks, session.id, request)
    followers = state.followers(request.channel)
    held = [table for table in followers if flowing.why_clock_is_held(table, request.version)]
    if held and request.wait_s > 0:
        return MustWait(tuple(("clock", table.name) for table in held))
    if held:
        raise DeadlineExceeded(flowing.why_clock_is_held(held[0], request.version))
    state.channels[request.channel] = channel
    channels.publish(channel, state.core.blocks, request, state.now)
    for table in followers:
        flowing.set_clock(table, request.version, state.now)
    state.core.effects.wake("channel", request.channel)
    return m.DoneReply(len(request.fields))


def _pull(state: LedgerState, request: m.Pull, session: SessionState, call: int) -> Answer:
    channel = state.channels.get(request.channel) or WeightChannelState(request.channel)
    return channels.pull(channel, state.core.blocks, request, session.id)


def _applied(state: LedgerState, request: m.ReportApplied, session: SessionState, call: int) -> Answer:
    channel = state.channels.get(request.channel)
    if channel is None:
        raise NotFound(f'channel "{request.channel}" does not exist; there are {listing(state.channels)}')
    channels.apply_version(channel, request, session.id, state.now)
    return m.DoneReply()


def _basis(state: LedgerState, request: m.GetLatestVersion, session: SessionState, call: int) -> Answer:
    channel = state.channels.get(request.channel) or WeightChannelState(check_name("channel", request.channel))
    return channels.basis(channel, state.core.blocks)


def _turn(state: LedgerState, request: m.AcquireUpdateSlot, session: SessionState, call: int) -> Answer:
    channel = state.channels.get(request.channel)
    if channel is None:
        raise NotFound(f'channel "{request.channel}" does not exist; there are {listing(state.channels)}')
    return channels.take_turn(channel, request, session.id, state.core.deadlines, state.now)


def _end_turn(state: LedgerState, request: m.ReleaseUpdateSlot, session: SessionState, call: int) -> Answer:
    channel = state.channels.get(request.channel)
    ended = channel is not None and channels.end_turn(channel, session.id, state.core.effects)
    return m.DoneReply(int(ended))


def _observe(state: LedgerState, request: m.Observe, session: SessionState, call: int) -> Answer:
    return m.Observed(msgspec.Raw(msgspec.msgpack.encode(observed(state, request))))


Operation = Callable[[LedgerState, Any, SessionState, int], Answer]

OPERATIONS: Final[dict[type, Operation]] = {
    m.CreateTable: _create,
    m.OpenTable: _open,
    m.AddTask: _add_task,
    m.AddFields: _add_fields,
    m.DropTable: _drop_table,
    m.ListTables: _list_tables,
    m.Seal: _seal,
    m.AdvanceClock: _advance,
    m.Unpin: _unpin,
    m.ReturnGrant: _return_grant,
    m.Heartbeat: _heartbeat,
    m.Goodbye: _goodbye,
    m.PutRequest: _put,
    m.Update: _update,
    m.LeaseRequest: _lease,
    m.Ack: _ack,
    m.CommitCheckpoint: _checkpointed,
    m.Rollback: _rollback,
    m.Cursor: _cursor,
    m.ReleaseRequest: _release,
    m.Renew: _renew,
    m.Reserve: _reserve,
    m.Unreserve: _unreserve,
    m.Drop: _drop,
    m.Delete: _delete,
    m.Find: _find,
    m.ReadRequest: _read,
    m.Publish: _publish,
    m.Pull: _pull,
    m.ReportApplied: _applied,
    m.GetLatestVersion: _basis,
    m.AcquireUpdateSlot: _turn,
    m.ReleaseUpdateSlot: _end_turn,
    m.Observe: _observe,
}
