"""Carries out the calls of open sessions: at once, or when what they wait for may have come.

- A call that arrives twice is carried out once. While it waits, it keeps its place, and its deadline can only become
  earlier. Once answered, it gets the same answer until the client says that it has `seen` it. After that it is ignored.
- After every change the requests are tried that the change may concern (`sessions.waiting`), before the next frame is
  read. The loop sends the answers of a few before the next few are tried.
- While the disk of the state has no room, requests that add work are refused, also those that wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from transferqueue.errors import (
    DeadlineExceeded,
    Full,
    InternalError,
    JournalFailed,
    TransferQueueError,
)
from transferqueue.ledger.effects import Blocked, FreeExtent, LeaseEnded, WakeWaiters
from transferqueue.limits import CALLS_PARKED_MAX, COUNT_MAX
from transferqueue.server.answers import Answers, failed
from transferqueue.server.clients import Clients
from transferqueue.server.defects import Defects, torn
from transferqueue.server.event_log import TABLE_EVENTS, log_event, log_table_event
from transferqueue.server.server_requests import ServerRequests, earlier
from transferqueue.server.sessions.session_table import PRODUCERS, OpenSession
from transferqueue.server.sessions.waiting import WaitingRequest, wait_of
from transferqueue.server.state import ServerState
from transferqueue.wire import messages as m
from transferqueue.wire.messages.declarations import Declaration

_ADD_WORK: Final = frozenset(
    {m.PutRequest, m.ContinueRequest, m.CreateTable, m.AddTask, m.Reserve, m.Publish, m.BeginVersion, m.Restore}
)
"""A server whose state disk is full refuses these requests, and grants of memory for anything but results."""


class Calls:
    """The calls of one coordinator. `operations` carries out those that the ledger does not."""

    def __init__(
        self, state: ServerState, answers: Answers, defects: Defects, clients: Clients, operations: ServerRequests
    ) -> None:
        self.unfinished = False
        """Whether requests are due that `run` has not tried."""
        self._state, self._answers, self._defects = state, answers, defects
        self._clients, self._operations = clients, operations
        self._ledger, self._waiting = state.ledger, state.waiting

    def repeated(self, session: OpenSession, call: int, request: m.Request, now: float) -> None:
        """A call came again whose client has the answer, or which waits already."""
        self._state.counters.repeated += 1
        self._ledger.message_received(session.number, now)
        self._waiting.shorten_wait(session.number, call, now + wait_of(request))

    def accept(self, session: OpenSession, call: int, request: m.Request, declared: Declaration, now: float) -> None:
        """Carry out a call and answer it, or have it wait."""
        if type(request) is m.LeaseRequest:
            if self._ledger.has_task(request.table, request.task):
                self._state.workers.record_request(session.number, request.table, request.task, now)
        elif (
            type(request) is m.PutRequest or type(request) is m.ContinueRequest or type(request) is m.Reserve
        ) and self._ledger.has_table(request.table):
            self._state.workers.record_request(session.number, request.table, PRODUCERS, now)
        ahead = self._waiting.count_ahead(request) if self._waiting.requests else 0
        if ahead and (call in session.refused or self._ledger.is_repeat(request, session.number, call)):
            ahead = 0  # the client lost the reply; the requests ahead may wait for the rows that it leased
        if ahead or type(request) in self._operations.by_type:
            self._ledger.message_received(session.number, now)  # `Ledger.apply` records the others
        outcome = self._queue_or_refuse(request, ahead, now) if ahead else self._execute(session, call, request, now)
        if isinstance(outcome, Blocked):
            if self._waiting.count(session.number) < CALLS_PARKED_MAX:
                waiting = self._waiting.join(session.number, call, request, now)
                self._waiting.wait_on(waiting, outcome.keys)
                return
            outcome = failed(Full(f"{CALLS_PARKED_MAX} requests of this session wait already, which is the most"))
        if declared.reply is not None or isinstance(outcome, m.Failed):  # a notice is answered only if it is refused
            self._answers.reply(session, call, request, outcome)

    def _queue_or_refuse(self, request: m.Request, ahead: int, now: float) -> Blocked | m.Failed:
        """The outcome of a new request with `ahead` others before it in its lane."""
        if wait_of(request) > 0:
            return Blocked(keys=())
        why = f"{earlier(ahead)} for the same, and this one may not wait: {self._operations.explain(request, now)}"
        return failed(DeadlineExceeded(why) if isinstance(request, m.LeaseRequest) else Full(why))

    def _execute(self, session: OpenSession, call: int, request: m.Request, now: float) -> m.Reply | Blocked:
        """Carry out a request. Returns its reply, which may be a refusal, or the keys on which it must wait."""
        if (refused := session.refused.get(call)) is not None:
            return refused
        if (
            (shortage := self._shortage(request))
            and _adds_work(request)
            and not self._ledger.is_repeat(request, session.number, call)
        ):
            return failed(Full(shortage))
        try:
            handler = self._operations.by_type.get(type(request))
            if handler is not None:
                reply = handler(session, call, request, now)
            else:
                reply = self._ledger.apply(request, session=session.number, call=call, now=now)
            if type(request) in TABLE_EVENTS:
                log_table_event(request, session.number)
            return reply
        except (InternalError, JournalFailed) as error:
            return self._defects.caught(m.tag_of(request), error, session)
        except TransferQueueError as error:
            return failed(error)
        except Exception as error:  # noqa: BLE001  (logged with its cause, and sent to the client)
            return self._defects.caught(m.tag_of(request), error, session)

    def _shortage(self, request: m.Request) -> str:
        """Why a request that adds work is refused now; "": it is not."""
        parts = self._state.parts
        if not parts.durable and not parts.short_tables:
            return ""
        return parts.shortage or parts.short_tables.get(_table_of(request), "")

    # ------------------------------------------------------------ requests that wait

    def run(self, now: float, most: int = COUNT_MAX, *, after: str = "a tick") -> None:
        """Apply the ledger's effects and try due requests, until nothing is left or `most` were served. A defect here
        ends the server, with an error that says `after` what it came."""
        self.unfinished = False
        waiting = self._waiting
        try:
            while True:
                effects = self._ledger.take_effects()
                if effects and (waiting.requests or type(effects[0]) is not WakeWaiters):  # else: no request waits
                    self._apply_effects(effects, now)
                if self._defects.sessions:
                    self._end_next_failed(now)
                    continue  # it has effects
                due = waiting.next_due() if waiting.requests else None
                if due is None:
                    may_go_on = False
                    for part in self._state.parts.going_on:
                        may_go_on |= part.go_on(now)
                    if not may_go_on and not (waiting.requests and waiting.may_have_due):
                        return
                    continue
                most -= self._try_again(due, now)
                if not most:
                    self.unfinished = True
                    return
        except JournalFailed:
            raise
        except Exception as error:
            raise torn(f"what follows {after}", error) from error

    def _apply_effects(self, effects: Iterable[WakeWaiters | FreeExtent | LeaseEnded], now: float) -> None:
        for effect in effects:
            if type(effect) is WakeWaiters:
                if self._waiting.requests:
                    self._waiting.wake(effect.key)
            elif type(effect) is FreeExtent:
                self._defects.must("the return of memory", partial(self._state.lending.give_back, effect, now))
            elif type(effect) is LeaseEnded:
                self._state.counters.leases_ended += 1
                log_event("lease_lost", lease=effect.lease, session=effect.session, why=effect.why)

    def _end_next_failed(self, now: float) -> None:
        number, reason = self._defects.sessions.pop()
        if (session := self._state.sessions.get(number)) is not None:
            self._clients.end(session, now, reason)

    def _try_again(self, waiting: WaitingRequest, now: float) -> bool:
        """Whether the request was served or refused."""
        session = self._state.sessions.of_call(waiting.session)
        outcome = self._execute(session, waiting.call, waiting.request, now)
        if isinstance(outcome, Blocked):
            self._waiting.wait_on(waiting, outcome.keys)
            return False
        self._complete(waiting, outcome)
        return True

    def _complete(self, waiting: WaitingRequest, reply: m.Reply) -> None:
        self._waiting.remove(waiting)
        session = self._state.sessions.get(waiting.session)
        if session is None:
            return
        answer = partial(self._answers.reply, session, waiting.call, waiting.request, reply)
        defect = self._defects.guard(m.tag_of(waiting.request), answer, session)
        if defect is not None:
            self._answers.send(session.peer, waiting.call, defect)

    # ------------------------------------------------------------ waits that end in a refusal

    def expire(self, now: float) -> None:
        """Try the due requests, and refuse those whose deadline has come."""
        self.run(now)
        while (waiting := self._waiting.next_expired(now)) is not None:
            reply = self._defects.guard(m.tag_of(waiting.request), partial(self._deadline_reply, waiting, now))
            self._complete(waiting, reply)  # even after a defect: otherwise each tick would refuse it again
            self.run(now)

    def _deadline_reply(self, waiting: WaitingRequest, now: float) -> m.Failed:
        waited = f"{m.tag_of(waiting.request)} waited {now - waiting.since:.3g} s: "
        until = "until the table ends" if hasattr(waiting.request, "table") else "without a limit"
        why = self._operations.explain_wait(waiting, now)
        return failed(DeadlineExceeded(f"{waited}{why}; timeout_s=None waits {until}"))

    def refuse_all(self, error: TransferQueueError, *, work_only: bool = False, table: str = "") -> None:
        """Refuse the requests that wait; work_only: those that add work; `table`: to this table."""
        for waiting in list(self._waiting):
            if (not work_only or _adds_work(waiting.request)) and table in ("", _table_of(waiting.request)):
                self._complete(waiting, failed(error))


def _table_of(request: m.Request) -> str:
    return str(getattr(request, "table", ""))


def _adds_work(request: m.Request) -> bool:
    return request.use != "results" if type(request) is m.Grant else type(request) in _ADD_WORK
