"""The ledger's orders to its caller: wake waiting requests, reuse memory, log lost leases, and when to call it again.

The ledger does no I/O. It collects effects while it changes state, and `Ledger.take_effects` returns each of them once.
The ledger stays correct if an effect is never applied.

`Deadlines` gives the time of the ledger's next call: all deadlines of leases, groups and update slots lie in one heap.
To end or move one, set `subject.deadline`. Old heap entries become void, and are skipped when they reach the top. So
renewing a lease costs one push, and ending one costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

WakeKey = tuple[str, ...]
"""The condition that a request waits for: ("task", table, task), ("room", table), ("clock", table), ("table", name),
("channel", name), ("turn", channel): an update slot, ("parts", channel): parts of a pending version, ("copies",):
blocks that lack copies, ("loaded",): blocks that are on a disk. The server adds ("memory",): a grant.
"""


class Blocked(msgspec.Struct, frozen=True):
    """The request cannot proceed now and changed nothing. Apply it again after a `WakeWaiters` for one of `keys`."""

    keys: tuple[WakeKey, ...]


class WakeWaiters(msgspec.Struct, frozen=True, tag=True):
    """Requests that wait for `key` may proceed now, or can never proceed: apply them again."""

    key: WakeKey


class FreeExtent(msgspec.Struct, frozen=True, tag=True):
    """This extent is free: it has no live row, no view and no writer. Its memory may be allocated again."""

    extent: int
    shard: int
    offset: int
    nbytes: int


class LeaseEnded(msgspec.Struct, frozen=True, tag=True):
    """A lease ended without a call of its holder: it expired, or its rows went back to others."""

    session: int
    lease: int
    why: str


Effect = WakeWaiters | FreeExtent | LeaseEnded


class Writes(Protocol):
    """Marks the writes of an operation. `table_state.SharedState`, in a higher module, implements it."""

    writing: bool

    def begin(self, nbytes: int = 0) -> None:
        """The checks have ended, and the writes begin."""


@dataclass(slots=True, eq=False)
class Effects:
    """Collects effects. A key is woken once, however often it was touched."""

    _events: list[Effect] = field(default_factory=list)
    _woken: dict[WakeKey, None] = field(default_factory=dict)

    def wake(self, *key: str) -> None:
        """Have requests that wait for `key` applied again."""
        self._woken[key] = None

    def add(self, event: FreeExtent | LeaseEnded) -> None:
        """Record an effect."""
        self._events.append(event)

    def take(self) -> list[Effect]:
        """All effects since the last call. Freed memory precedes wakes, so that woken requests find it free."""
        if not self._events and not self._woken:
            return []
        taken = [*self._events, *map(WakeWaiters, self._woken)]
        self._events, self._woken = [], {}
        return taken


class Expiring(Protocol):
    """An object with a deadline (None: no deadline)."""

    deadline: float | None


class Deadlines:
    """A heap of (time, subject) that skips void entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expiring]] = []
        self._pushed = 0

    def add(self, subject: Expiring, at: float) -> None:
        """Set the deadline of `subject`. An earlier one becomes void."""
        subject.deadline = at
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, subject))

    def order(self, subjects: Sequence[Expiring]) -> list[int]:
        """The positions in `subjects` of those that have a deadline, in the order in which they are due. `KeyError` if
        another one has a deadline."""
        position = {id(subject): at for at, subject in enumerate(subjects)}
        valid = [subject for at, _, subject in sorted(self._heap) if subject.deadline == at]
        return list(dict.fromkeys(position[id(subject)] for subject in valid))

    def restore(self, due: Sequence[Expiring]) -> None:
        """Have exactly these subjects, which have their deadlines, in the order in which they are due."""
        self._heap = [(one.deadline, number, one) for number, one in enumerate(due) if one.deadline is not None]
        self._pushed = len(due)

    def next(self) -> float | None:
        """The earliest valid deadline."""
        heap = self._heap
        while heap and heap[0][2].deadline != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Expiring]:
        """Yield subjects whose deadline has passed, earliest first, and clear their deadlines."""
        while (at := self.next()) is not None and at <= now:
            subject = heapq.heappop(self._heap)[2]
            subject.deadline = None
            yield subject
