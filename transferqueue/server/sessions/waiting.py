"""Requests that wait: who is tried when something changed, and in which order. Pure.

The law:

1. A parked request waits under the *wake keys* that the ledger named, such as ("task", "rollouts",
   "train"). `wake` makes everyone under a key due; whoever is due is tried in order of arrival.
2. *Lanes are strictly first in, first out.* Unconditional leases of one task share a lane; so do puts
   without a reservation into one table, and reservations at the table's clock. Only the first of a lane is
   ever tried. A newcomer joins the end even if it could be served at once: else a stream of small requests
   would starve a large one for ever.
3. Everything else is tried on its own, in order of arrival: a lease with `where`, with a share of a batch
   (`world`) or for replicas, a reservation for a given version, a grant of memory. What one of them wants
   says nothing about the next, and a large grant at the head of a lane could block the very ack that would
   free memory for it.
4. When the first of a lane leaves, for whatever reason, the next is due at once.
5. A wait ends: served, refused, at its deadline, or with its session. Nothing stays behind, in any index. Who asks again
   for a shorter wait has an earlier deadline; for a longer one (the first message, sent twice) the same.

Cost: a wake tries one request a lane, plus those of rule 3 under the key, plus as many as it serves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from transferqueue.wire import messages as m

WakeKey = tuple[str, ...]
Lane = tuple[str, ...]

_HEAP_SLACK: Final = 64


class WaitingRequest:
    """One waiting request. `order` is its place in order of arrival; times are the injected clock's."""

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
    """Seconds that a request may wait; 0 for one that never does."""
    return float(getattr(request, "wait_s", 0.0))


def lane_of(request: m.Request) -> Lane | None:
    """The lane that a request waits in; None if it is tried on its own (rules 2 and 3)."""
    match request:
        case m.LeaseRequest(where=[], world=1, replicas=1):
            return ("lease", request.table, request.task)
        case m.PutRequest(reservation=0):
            return ("put", request.table)
        case m.Reserve() if request.policy_version < 0:
            return ("reserve", request.table)
    return None


class WaitQueue:
    """All waiting requests of one node."""

    def __init__(self) -> None:
        self._orders = 0
        self._parked: OrderedDict[int, WaitingRequest] = OrderedDict()
        self._by_call: dict[tuple[int, int], WaitingRequest] = {}
        self._by_session: dict[int, dict[int, WaitingRequest]] = {}
        self._by_key: dict[WakeKey, dict[int, WaitingRequest]] = {}
        self._lanes: dict[Lane, OrderedDict[int, WaitingRequest]] = {}
        self._due: list[int] = []
        self._is_due: set[int] = set()
        self._agenda: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """All that wait, in order of arrival."""
        return iter(self._parked.values())

    def holds(self, session: int, call: int) -> bool:
        """Whether this very call waits here already (it was sent again)."""
        return (session, call) in self._by_call

    def count(self, session: int) -> int:
        """How many requests of a session wait."""
        return len(self._by_session.get(session, ()))

    def queue_before(self, request: m.Request) -> int:
        """How many wait in the lane of `request`; a newcomer that finds any must `join` and not be tried."""
        lane = lane_of(request)
        return len(self._lanes.get(lane, ())) if lane is not None else 0

    def ahead_of(self, parked: WaitingRequest) -> int:
        """How many wait before `parked` in its lane."""
        lane = self._lanes.get(parked.lane, ()) if parked.lane is not None else ()
        return sum(order < parked.order for order in lane)

    def join(self, session: int, call: int, request: m.Request, now: float) -> WaitingRequest:
        """Park a request at the end of its lane, not tried. If the lane was empty, `rest` it on its keys."""
        self._orders += 1
        parked = WaitingRequest(self._orders, session, call, request, now)
        self._parked[parked.order] = parked
        self._by_call[session, call] = parked
        self._by_session.setdefault(session, {})[parked.order] = parked
        if parked.lane is not None:
            self._lanes.setdefault(parked.lane, OrderedDict())[parked.order] = parked
        heapq.heappush(self._agenda, (parked.deadline, parked.order))
        return parked

    def rest(self, parked: WaitingRequest, keys: Iterable[WakeKey]) -> None:
        """`parked` was tried and must wait until one of `keys` is woken."""
        self._leave_keys(parked)
        parked.keys = tuple(dict.fromkeys(keys))
        for key in parked.keys:
            self._by_key.setdefault(key, {})[parked.order] = parked

    def hurry(self, session: int, call: int, deadline: float) -> None:
        """A call that waits here, if it does, waits no longer than until `deadline`."""
        parked = self._by_call.get((session, call))
        if parked is not None and deadline < parked.deadline:
            parked.deadline = deadline
            heapq.heappush(self._agenda, (deadline, parked.order))

    def is_waited_for(self, key: WakeKey) -> bool:
        """Whether anybody rests on `key`."""
        return bool(self._by_key.get(key))

    def wake(self, key: WakeKey) -> None:
        """Something under `key` changed: whoever rests on it is due."""
        for order in self._by_key.get(key, ()):
            self._make_due(order)

    def next_due(self) -> WaitingRequest | None:
        """Take the earliest of those to be tried. The caller then calls `rest` or `remove` with it."""
        while self._due:
            order = heapq.heappop(self._due)
            self._is_due.discard(order)
            if order in self._parked:
                return self._parked[order]
        return None

    def remove(self, parked: WaitingRequest) -> None:
        """`parked` waits no more. Who stood behind it in its lane is due."""
        del self._parked[parked.order], self._by_call[parked.session, parked.call]
        _discard(self._by_session, parked.session, parked.order)
        self._leave_keys(parked)
        self._leave_lane(parked)
        if len(self._agenda) > 2 * len(self._parked) + _HEAP_SLACK:
            self._agenda = [(waiting.deadline, waiting.order) for waiting in self._parked.values()]
            heapq.heapify(self._agenda)

    def remove_session(self, session: int) -> list[WaitingRequest]:
        """Remove all that a session waits for; returns them."""
        gone = list(self._by_session.get(session, {}).values())
        for parked in gone:
            self.remove(parked)
        return gone

    def next_deadline(self) -> float | None:
        """When the next wait ends by its deadline; None if nobody waits."""
        while self._agenda and self._agenda[0][1] not in self._parked:
            heapq.heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else None

    def next_expired(self, now: float) -> WaitingRequest | None:
        """One whose deadline has come, the earliest first; still parked. None if there is none."""
        deadline = self.next_deadline()
        return self._parked[self._agenda[0][1]] if deadline is not None and deadline <= now else None

    def _make_due(self, order: int) -> None:
        if order not in self._is_due:
            self._is_due.add(order)
            heapq.heappush(self._due, order)

    def _leave_keys(self, parked: WaitingRequest) -> None:
        for key in parked.keys:
            _discard(self._by_key, key, parked.order)
        parked.keys = ()

    def _leave_lane(self, parked: WaitingRequest) -> None:
        if parked.lane is None:
            return
        lane = self._lanes[parked.lane]
        was_first = next(iter(lane)) == parked.order
        del lane[parked.order]
        if not lane:
            del self._lanes[parked.lane]
        elif was_first:
            self._make_due(next(iter(lane)))


_K = TypeVar("_K")


def _discard(index: dict[_K, dict[int, WaitingRequest]], key: _K, order: int) -> None:
    found = index[key]
    del found[order]
    if not found:
        del index[key]
