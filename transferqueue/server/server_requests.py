"""Requests that the server carries out itself, because they need its memory, its sessions or its parts.

The ledger carries out all others (`transferqueue.ledger.dispatch`). The server tries a request again after each change
that it may wait for, so an operation that answers `Blocked` changes nothing.
"""

from __future__ import annotations

from typing import Final

from transferqueue.errors import Full, OutOfMemory, UsageError
from transferqueue.ledger.effects import Blocked, WakeKey
from transferqueue.ledger.requests.registry import Outcome
from transferqueue.limits import TEXT_CHARS_MAX
from transferqueue.server import reports
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.server.parts import Handler, Part
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.sessions.waiting import WaitingRequest
from transferqueue.server.state import ServerState
from transferqueue.wire import codec
from transferqueue.wire import messages as m

_MEMORY: Final[WakeKey] = ("memory",)
_OF_PARTS: Final[dict[type[m.Request], str]] = {
    **dict.fromkeys((m.ListShards, m.Drain, m.PollCommands, m.TakeCopies), "shards"),
    **dict.fromkeys((m.SnapshotRequest, m.Restore, m.WatchJob), "durability"),
}
"""The part that carries out a request."""


class ServerRequests:
    """One method for each request. `by_type` finds them by the request's class."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._ledger, self._lending, self._workers = state.ledger, state.lending, state.workers
        self._of_parts: set[type[m.Request]] = set()
        self.by_type: Final[dict[type[m.Request], Handler]] = {
            **dict.fromkeys(_OF_PARTS, _no_part),
            m.Grant: self._grant,
            m.Observe: self._observe,
            m.ListEvents: self._list_events,
            m.ExplainWait: self._explain_wait,
            m.CreateTable: self._create_table,
            m.DropTable: self._drop_table,
        }

    def attach(self, part: Part) -> None:
        """Have the part carry out its requests, and explain their waits."""
        self.by_type.update(part.requests())
        self._of_parts.update(part.requests())

    def explain(self, request: m.Request, now: float) -> str:
        """Why a request waits: the missing thing and its holder."""
        text = ""
        if type(request) is m.Grant:
            text = self._lending.explain(request.nbytes, reports.holders(self._state, now), request.use)
        elif type(request) not in self._of_parts:
            text = self._ledger.explain(request, now)
        return "; ".join(filter(None, [text, *(part.explain(request) for part in self._state.parts)]))

    def explain_wait(self, waiting: WaitingRequest, now: float) -> str:
        """Why a request still waits: the missing thing, its holder, and the number of requests before it."""
        ahead = self._state.waiting.ahead_of(waiting)
        return self.explain(waiting.request, now) + (f"; {earlier(ahead)} before it" if ahead else "")

    # ------------------------------------------------------------ memory

    def _grant(self, session: OpenSession, call: int, request: m.Grant, now: float) -> Outcome:
        if (before := self._ledger.replied(session.number, call)) is not None:
            return before
        try:
            taken = self._lending.take(session, request.nbytes, request.apart, request.use)
        except OutOfMemory:
            if not (request.wait_s and self._lending.used):
                raise
            taken = None
        if taken is not None:
            if taken[0] == SHARD:
                for part in self._state.parts:
                    part.memory_granted()
            with self._lending.granting(*taken, now):
                return self._ledger.grant(session.number, *taken, now, call=call)
        if self._lending.own_may_have(request.nbytes, request.apart, request.use):
            for channel in self._ledger.channels_with_history:  # first what can be done without
                self._ledger.apply(m.DropDeltas(channel=channel), session=session.number, call=0, now=now)
            for part in self._state.parts:
                part.memory_lacking(request.nbytes, request.use)
        if request.wait_s:
            return Blocked(keys=(_MEMORY,))
        raise Full(self.explain(request, now))

    # ------------------------------------------------------------ before or after the ledger

    def _observe(self, session: OpenSession, call: int, request: m.Observe, now: float) -> Outcome:
        return codec.encode_observed(reports.observe(self._state, self.explain_wait, request, now))

    def _list_events(self, session: OpenSession, call: int, request: m.ListEvents, now: float) -> Outcome:
        return codec.encode_observed(reports.events(self._state, request, now))

    def _explain_wait(self, session: OpenSession, call: int, request: m.ExplainWait, now: float) -> Outcome:
        waiting = self._state.waiting.of_call(session.number, request.call)
        return m.WaitExplained("" if waiting is None else self.explain_wait(waiting, now)[:TEXT_CHARS_MAX])

    def _create_table(self, session: OpenSession, call: int, request: m.CreateTable, now: float) -> Outcome:
        if not self._ledger.has_table(request.name):
            self._lending.check_replicas(request.name, request.replicas)
            self._state.parts.check_table(request)
        return self._ledger.apply(request, session=session.number, call=call, now=now)

    def _drop_table(self, session: OpenSession, call: int, request: m.DropTable, now: float) -> Outcome:
        reply = self._ledger.apply(request, session=session.number, call=call, now=now)
        self._workers.forget_table(request.name)
        return reply


def earlier(ahead: int) -> str:
    """So many requests, as the subject of a sentence."""
    return "1 earlier request waits" if ahead == 1 else f"{ahead} earlier requests wait"


def _no_part(session: OpenSession, call: int, request: m.Request, now: float) -> Outcome:
    raise UsageError(
        f"{m.tag_of(request)} refused: this server was assembled without transferqueue.server."
        f"{_OF_PARTS[type(request)]}; install the whole package"
    )
