"""Waiting requests: which of them are tried after a change, and in which order. No I/O, no clock.

1. A request waits on the *wake keys* that the ledger named, such as ("task", "rollouts", "train"). `wake` makes all
   requests under a key due. Due requests are tried in order of arrival.
2. *Lanes are strictly first in, first out.* A lane holds the unconditional leases of one task, the puts without a
   reservation into one table, or the reservations at the table's current policy version. Only the first request of a
   lane is tried. A new request joins the end even if it could be served at once: otherwise a stream of small requests
   would starve a large one.
3. Every other request is tried on its own, in order of arrival: a lease with `where`, `awaited` or `but_held`, with a
   share of a batch (`world`) or for replicas; a reservation for a given version; a grant of memory. Whether one of them
   can be served says nothing about the next. A large grant at the head of a lane could block the very ack that would
   free memory for it.
4. When the first request of a lane leaves, for any reason, the next one is due at once.
5. Every wait ends: the request is served or refused, reaches its deadline, or loses its session. Then no index refers
   to it any more. A request that is sent again with a shorter wait gets an earlier deadline; with a longer one, it
   keeps its deadline.

Cost: a wake tries one request of each lane, the requests of rule 3 under the key, and as many more as it serves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from transferqueue.ledger.effects import WakeKey
from transferqueue.limits import LOAD_WAIT_S
from transferqueue.wire import messages as m

Lane = tuple[str, ...]

_HEAP_SLACK: Final = 64


class WaitingRequest:
    """One waiting request. `order` is its number in order of arrival. `since` and `deadline` are server times."""

    __slots__ = ("call", "deadline", "keys", "lane", "order", "request", "session", "since")

    def __init__(self, order: int, session: int, call: int, request: m.Request, since: float) -> None:
        self.order: Final = order
        self.session: Final = session
        self.call: Final = call
        self.request: Final = request
        self.since: Final = since
        self.deadline = since + wait_of(request)
        self.lane: Final = lane_of(request)
        self.keys: tuple[WakeKey, ...] = ()


def wait_of(request: m.Request) -> float:
    """Seconds for which a request may wait; 0 if it never waits."""
    return float(getattr(request, "wait_s", LOAD_WAIT_S if type(request) is m.ReadRequest else 0.0))


def lane_of(request: m.Request) -> Lane | None:
    """The lane of a request; None if it is tried on its own (rules 2 and 3)."""
    match request:
        case m.LeaseRequest(where=[], world=1, replicas=1, awaited=b"", but_held=False):
            return ("lease", request.table, request.task)
        case m.PutRequest(reservation=0):
            return ("put", request.table)
        case m.Reserve() if request.policy_version < 0:
            return ("reserve", request.table)
    return None


class WaitQueue:
    """All waiting requests of one coordinator."""

    def __init__(self) -> None:
        self._last_order = 0
        self.requests: Final[OrderedDict[int, WaitingRequest]] = OrderedDict()
        """In order of arrival. While it is empty, a caller need not ask for the next one or wake any."""
        self._by_call: dict[tuple[int, int], WaitingRequest] = {}
        self._by_session: dict[int, dict[int, WaitingRequest]] = {}
        self._by_key: dict[WakeKey, dict[int, WaitingRequest]] = {}
        self._lanes: dict[Lane, OrderedDict[int, WaitingRequest]] = {}
        self._due: list[int] = []
        self._is_due: set[int] = set()
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """All waiting requests, in order of arrival."""
        return iter(self.requests.values())

    def holds(self, session: int, call: int) -> bool:
        """Whether this call waits already, so that it was sent twice."""
        return (session, call) in self._by_call

    def of_call(self, session: int, call: int) -> WaitingRequest | None:
        """The request of this call, if it waits."""
        return self._by_call.get((session, call))

    def count(self, session: int) -> int:
        """The number of waiting requests of a session."""
        return len(self._by_session.get(session, ()))

    def count_ahead(self, request: m.Request) -> int:
        """The number of requests in the lane of `request`. If there are any, a new request joins without being
        tried."""
        if not self._lanes or (lane := lane_of(request)) is None:
            return 0
        return len(self._lanes.get(lane, ()))

    def ahead_of(self, waiting: WaitingRequest) -> int:
        """The number of requests before `waiting` in its lane."""
        lane = self._lanes.get(waiting.lane, ()) if waiting.lane is not None else ()
        return sum(order < waiting.order for order in lane)

    def join(self, session: int, call: int, request: m.Request, now: float) -> WaitingRequest:
        """Add a request at the end of its lane. If the lane was empty, the caller has it `wait_on` its keys."""
        self._last_order += 1
        waiting = WaitingRequest(self._last_order, session, call, request, now)
        self.requests[waiting.order] = waiting
        self._by_call[session, call] = waiting
        self._by_session.setdefault(session, {})[waiting.order] = waiting
        if waiting.lane is not None:
            self._lanes.setdefault(waiting.lane, OrderedDict())[waiting.order] = waiting
        heapq.heappush(self._deadlines, (waiting.deadline, waiting.order))
        return waiting

    def wait_on(self, waiting: WaitingRequest, keys: Iterable[WakeKey]) -> None:
        """`waiting` was tried and must wait until one of `keys` is woken."""
        self._leave_keys(waiting)
        waiting.keys = tuple(dict.fromkeys(keys))
        for key in waiting.keys:
            self._by_key.setdefault(key, {})[waiting.order] = waiting

    def shorten_wait(self, session: int, call: int, deadline: float) -> None:
        """Have a call wait no longer than until `deadline`. Does nothing if the call does not wait."""
        waiting = self._by_call.get((session, call))
        if waiting is not None and deadline < waiting.deadline:
            waiting.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, waiting.order))

    def is_waited_for(self, key: WakeKey) -> bool:
        """Whether a request waits on `key`."""
        return bool(self._by_key.get(key))

    def wake(self, key: WakeKey) -> None:
        """Make all requests due that wait on `key`."""
        for order in self._by_key.get(key, ()):
            self._make_due(order)

    @property
    def may_have_due(self) -> bool:
        """Whether `next_due` may return a request."""
        return bool(self._due)

    def next_due(self) -> WaitingRequest | None:
        """Take the earliest due request; None if there is none. The caller tries it, then calls `wait_on` or
        `remove`."""
        while self._due:
            order = heapq.heappop(self._due)
            self._is_due.discard(order)
            if order in self.requests:
                return self.requests[order]
        return None

    def remove(self, waiting: WaitingRequest) -> None:
        """Remove a request. If it was the first of its lane, the next one is due."""
        del self.requests[waiting.order], self._by_call[waiting.session, waiting.call]
        _discard(self._by_session, waiting.session, waiting.order)
        self._leave_keys(waiting)
        self._leave_lane(waiting)
        if len(self._deadlines) > 2 * len(self.requests) + _HEAP_SLACK:
            self._deadlines = [(waiting.deadline, waiting.order) for waiting in self.requests.values()]
            heapq.heapify(self._deadlines)

    def remove_session(self, session: int) -> list[WaitingRequest]:
        """Remove all requests of a session, and return them, each with the keys that it waited on."""
        removed = list(self._by_session.get(session, {}).values())
        for waiting in removed:
            self.remove(waiting)
        return removed

    def next_deadline(self) -> float | None:
        """The earliest deadline; None if no request waits."""
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def next_expired(self, now: float) -> WaitingRequest | None:
        """The request with the earliest deadline, if that has passed; else None. It is not removed."""
        deadline = self.next_deadline()
        return self.requests[self._deadlines[0][1]] if deadline is not None and deadline <= now else None

    def _make_due(self, order: int) -> None:
        if order not in self._is_due:
            self._is_due.add(order)
            heapq.heappush(self._due, order)

    def _leave_keys(self, waiting: WaitingRequest) -> None:
        for key in waiting.keys:
            _discard(self._by_key, key, waiting.order)

    def _leave_lane(self, waiting: WaitingRequest) -> None:
        if waiting.lane is None:
            return
        lane = self._lanes[waiting.lane]
        was_first = next(iter(lane)) == waiting.order
        del lane[waiting.order]
        if not lane:
            del self._lanes[waiting.lane]
        elif was_first:
            self._make_due(next(iter(lane)))


_K = TypeVar("_K")


def _discard(index: dict[_K, dict[int, WaitingRequest]], key: _K, order: int) -> None:
    requests = index[key]
    del requests[order]
    if not requests:
        del index[key]
