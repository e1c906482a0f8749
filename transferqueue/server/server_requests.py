"""Requests that the server carries out itself, because they need its memory, its shards or its files.

The ledger carries out all others (`transferqueue.ledger.dispatch`). The server tries a request again after each change
that it may wait for, so an operation that answers `Blocked` changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from transferqueue.errors import Full, OutOfMemory, UsageError
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.requests.registry import Outcome
from transferqueue.limits import TEXT_CHARS_MAX
from transferqueue.server import reports
from transferqueue.server.parts import Operation, Part
from transferqueue.server.reports import ReportSources
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.sessions.waiting import WakeKey
from transferqueue.server.shards.block_fetches import BlockFetches
from transferqueue.server.shards.copies import CopyOrders
from transferqueue.server.shards.own_memory import SHARD
from transferqueue.wire import codec
from transferqueue.wire import messages as m

_MEMORY: Final[WakeKey] = ("memory",)


class ServerRequests:
    """One method for each request. `by_type` and `explanations` find them by the request's class."""

    def __init__(self, sources: ReportSources) -> None:
        self._sources = sources
        self._ledger, self._shards, self._workers = sources.ledger, sources.shards, sources.workers
        self.fetches: Final = BlockFetches(sources.ledger, sources.shards, sources.waiting.wake)
        """Fetches the blocks of a snapshot from remote shards."""
        self._copies: Final = CopyOrders(sources.ledger, sources.shards, self.fetches)
        self.by_type: Final[dict[type[m.Request], Operation]] = {
            m.Grant: self._grant,
            m.ListShards: self._list_shards,
            m.Drain: self._drain,
            m.PollCommands: self._poll_commands,
            m.TakeCopies: self._take_copies,
            **dict.fromkeys((m.SnapshotRequest, m.Restore, m.WatchJob), _no_snapshots),
            m.Observe: self._observe,
            m.ListEvents: self._list_events,
            m.ExplainWait: self._explain_wait,
            m.CreateTable: self._create_table,
            m.DropTable: self._drop_table,
        }
        self._explanations: Final[dict[type[m.Request], Callable[[Any, float], str]]] = {
            m.Grant: self._explain_grant,
            m.PollCommands: lambda request, now: "there are no orders",
            m.TakeCopies: lambda request, now: "there is nothing for this shard to copy",
        }

    def attach(self, part: Part) -> None:
        """Have the part carry out its requests, and explain their waits."""
        for kind, operation in part.requests().items():
            self.by_type[kind] = operation
            self._explanations[kind] = lambda request, now: ""

    def explain(self, request: m.Request, now: float) -> str:
        """Why a request waits: the missing thing and its holder."""
        explain = self._explanations.get(type(request), self._ledger.explain)
        text = explain(request, now)
        return "; ".join(filter(None, [text, *(part.explain(request) for part in self._sources.parts)]))

    # ------------------------------------------------------------ memory and shards

    def _grant(self, session: OpenSession, call: int, request: m.Grant, now: float) -> Outcome:
        if (before := self._ledger.replied(session.number, call)) is not None:
            return before
        try:
            taken = self._shards.take(session, request.nbytes, request.apart, request.use)
        except OutOfMemory:
            if not (request.wait_s and self._shards.used):
                raise
            taken = None
        if taken is not None:
            if taken[0] == SHARD:
                for part in self._sources.parts:
                    part.memory_granted()
            with self._shards.granting(*taken, now):
                return self._ledger.grant(session.number, *taken, now, call=call)
        if self._sources.parts and self._shards.own_may_have(request.nbytes, request.apart, request.use):
            for part in self._sources.parts:
                part.memory_lacking(request.nbytes, request.use)
        if request.wait_s:
            return Blocked(keys=(_MEMORY,))
        raise Full(self.explain(request, now))

    def _explain_grant(self, request: m.Grant, now: float) -> str:
        return self._shards.explain(request.nbytes, reports.holders(self._sources, now), request.use)

    def _list_shards(self, session: OpenSession, call: int, request: m.ListShards, now: float) -> Outcome:
        return self._shards.list_for(session)

    def _drain(self, session: OpenSession, call: int, request: m.Drain, now: float) -> Outcome:
        return self._shards.drain(request.shard)

    def _poll_commands(self, session: OpenSession, call: int, request: m.PollCommands, now: float) -> Outcome:
        return self._shards.shard_of(session).commands(request, now)

    def _take_copies(self, session: OpenSession, call: int, request: m.TakeCopies, now: float) -> Outcome:
        return self._copies.take(session, request, now)

    # ------------------------------------------------------------ before or after the ledger

    def _observe(self, session: OpenSession, call: int, request: m.Observe, now: float) -> Outcome:
        return codec.encode_observed(reports.observe(self._sources, request, now))

    def _list_events(self, session: OpenSession, call: int, request: m.ListEvents, now: float) -> Outcome:
        return codec.encode_observed(reports.events(self._sources, request, now))

    def _explain_wait(self, session: OpenSession, call: int, request: m.ExplainWait, now: float) -> Outcome:
        waiting = self._sources.waiting.of_call(session.number, request.call)
        return m.WaitExplained("" if waiting is None else self._sources.explain(waiting, now)[:TEXT_CHARS_MAX])

    def _create_table(self, session: OpenSession, call: int, request: m.CreateTable, now: float) -> Outcome:
        if not self._ledger.has_table(request.name):
            self._shards.check_replicas(request.name, request.replicas)
        return self._ledger.apply(request, session=session.number, call=call, now=now)

    def _drop_table(self, session: OpenSession, call: int, request: m.DropTable, now: float) -> Outcome:
        reply = self._ledger.apply(request, session=session.number, call=call, now=now)
        self._workers.forget_table(request.name)
        return reply


def _no_snapshots(session: OpenSession, call: int, request: m.Request, now: float) -> Outcome:
    raise UsageError("this server writes no snapshots: it was assembled without transferqueue.server.durability")
