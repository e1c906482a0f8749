"""What a node says about itself: the ledger's account, and what only the node knows (docs/OBSERVING.md)."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from transferqueue.ledger.table import Absence
from transferqueue.server.sessions.sessions import OpenSession
from transferqueue.server.sessions.waiting import WaitingRequest, wait_of
from transferqueue.server.shards.remote_shard import RemoteShard
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from transferqueue.server.node import Coordinator

Plain = dict[str, Any]

IDLE_S: Final = 3.0
"""A worker that asked for rows this short ago works on them still, or asks again."""
WAITING_SHOWN_MAX: Final = 100
"""Requests that wait are explained one by one, the longest first; more than a screen shows helps nobody."""


def observe(node: Coordinator, request: m.Observe, now: float) -> object:
    """The dictionary that `request` asks for. `UsageError` for one that is not known."""
    account = node.ledger.observe(request, now)
    if request.what == "stats":
        return account | _stats(node, request.table, now)
    if request.what == "doctor":
        sessions = _sessions(node, node.ledger.observe(m.Observe("sessions"), now), now)
        return account | {"waiting": _all_waiting(node, request.table, now), "sessions": sessions}
    return _sessions(node, account, now) if request.what == "sessions" else account


def absence(node: Coordinator, table: str, task: str, now: float) -> Absence | None:
    """Since when nobody has worked on a task, and what is known of who did; None if somebody holds or waits for rows of it, or
    asked for some just now."""
    if node.parking.is_waited_for(("task", table, task)) or node.ledger.has_leased(table, task):
        return None
    asked, gone = node.workers.last_to_ask(table, task), node.workers.last_gone(table, task)
    if asked is not None:
        number, at = asked
        session = node.sessions.get(number)
        label = session.label if session else f"session {number}"
        text = f"nobody works on it: {label} is connected, and last asked for rows {now - at:.0f} s ago"
        return Absence(text, now - at) if now - at >= IDLE_S else None
    if gone is not None:
        left_s = now - gone.at
        text = f"nobody works on it; the last worker left {left_s:.0f} s ago ({gone.label}, {gone.ending.text})"
        return Absence(text, left_s, died=not gone.ending.was_announced)
    up_s = now - node.place.started_at
    return Absence(f"nobody works on it, nor has since this server started {up_s:.0f} s ago", up_s)


def holders(node: Coordinator, now: float) -> str:
    """Who has the bytes of the arena, the largest first: for an error message."""
    stats = node.ledger.observe(m.Observe("stats"), now)
    tables = _largest({f'table "{name}"': table["bytes"] for name, table in stats["tables"].items()})
    sessions = _largest_holders(node, now)
    return "; ".join(part for part in (tables, sessions) if part) or "extents that are granted and not yet written"


def _largest(sizes: dict[str, int]) -> str:
    ranked = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    return ", ".join(f"{name} ({size:,} bytes)" for size, name in ranked[:6])


def _largest_holders(node: Coordinator, now: float) -> str:
    accounts = node.ledger.observe(m.Observe("sessions"), now).values()
    ranked = sorted(accounts, key=lambda account: -account["grants"] - account["pins"])
    return ", ".join(
        f"{account['label']} ({account['grants']} grants, {account['pins']} blocks in view)"
        for account in ranked[:6]
        if account["grants"] or account["pins"]
    )


def _stats(node: Coordinator, table: str, now: float) -> Plain:
    return {
        "now_s": now,
        "epoch": node.place.epoch,
        "sessions": len(node.sessions),
        "waiting": _all_waiting(node, table, now),
        "server": _server(node, now),
    }


def _all_waiting(node: Coordinator, table: str, now: float) -> list[Plain]:
    waits = (parked for parked in node.parking if not table or _about(parked) == table)
    return [_waiting(node, parked, now) for parked in islice(waits, WAITING_SHOWN_MAX)]


def _server(node: Coordinator, now: float) -> Plain:
    counters = node.counters
    return {
        "address": node.place.address,
        "coordinator": str(node.seat),
        "version": node.place.version,
        "pid": node.place.pid,
        "bulk_port": node.bulk_port,
        "uptime_s": now - node.place.started_at,
        "capacity_bytes": node.memory.allocator.capacity,
        "used_bytes": node.memory.used,
        "backed_bytes": node.memory.arena.backed,
        "extents": node.memory.extents,
        "shards": [_shard(shard) for shard in node.shards],
        "calls": counters.calls,
        "garbage": counters.garbage,
        "repeated": counters.repeated,
        "leases_ended": counters.leases_ended,
        "sessions_dropped": counters.sessions_dropped,
        "internal_errors": counters.internal_errors,
        "turns": node.turns.plain(),
    }


def _shard(shard: RemoteShard) -> Plain:
    return {
        "shard": shard.number,
        "label": shard.session.label,
        "host": shard.session.hello.host,
        "endpoint": shard.offer.endpoint,
        "capacity_bytes": shard.offer.capacity,
        "used_bytes": shard.used,
        "backed_bytes": shard.used + shard.allocator.warm,
        "drains": shard.draining,
    }


def _waiting(node: Coordinator, parked: WaitingRequest, now: float) -> Plain:
    session = node.sessions.get(parked.session)
    return {
        "session": parked.session,
        "label": session.label if session else "",
        "request": m.tag_of(parked.request),
        "table": _about(parked),
        "task": str(getattr(parked.request, "task", "")),
        "waited_s": now - parked.since,
        "left_s": max(parked.since + wait_of(parked.request) - now, 0.0),
        "why": node.explain(parked, now),
    }


def _about(parked: WaitingRequest) -> str:
    request = parked.request
    return str(getattr(request, "table", getattr(request, "name", "")))


def _sessions(node: Coordinator, accounts: Plain, now: float) -> Plain:
    """What the ledger says each session holds, with who it is."""
    states = [("open", session) for session in node.sessions] + [("ended", one) for one in node.sessions.lingering]
    return {
        str(session.number): accounts[str(session.number)]
        | _session(session, state, now)
        | {"waits": node.parking.count(session.number)}
        for state, session in states
    }


def _session(session: OpenSession, state: str, now: float) -> Plain:
    return {
        "session": session.number,
        "label": session.hello.label,
        "pid": session.hello.pid,
        "host": session.hello.host,
        "opened_s": now - session.opened_at,
        "silent_s": now - session.heard_at,
        "state": state,
        "remote": session.remote,
    }
