"""Renew leases while the worker that holds them lives. Decides without I/O; the connection's thread sends.

1. A lease is renewed when a third of it has passed, one renewal on its way at a time: two may be lost before it is.
2. It is renewed up to a bound after the hand-over, and not beyond: the last renewal ends there. A worker that hangs
   longer than that loses its rows, though its process lives. Each use of the lease by the worker (taking it from a
   loader, acking or releasing a part of it, renewing it) shows that it does not hang: the bound is counted from there
   again.
3. A process that is dead, stopped or cut off renews nothing, so its rows are given to others after `lease_s`; at once
   when the server sees its end, and when a client of another host has been silent for `SESSION_SILENCE_S`.
4. A lease that the server refuses to renew is lost. Its holder learns that when it next uses the batch.

`LeaseRenewer.renew` and the methods of `RenewedLease` may be called from any thread, also from a finalizer: they take
no lock. Everything else belongs to the thread of the connection.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

RENEWED_AT = 1 / 3
"""Part of a lease after which it is renewed."""
COMPACT_MIN = 256
"""Ended leases are swept out of the heap when it has doubled, but not below this."""


class RenewedLease:
    """A lease that the client renews.

    `lease_s` is the duration that each renewal asks for, `limit_s` the seconds after the last use by its worker until
    which it is renewed.
    """

    __slots__ = ("due", "ended", "ends", "is_last", "lease", "lease_s", "limit_s", "lost", "table", "token", "until")

    def __init__(self, table: str, lease: int, token: int, lease_s: float, limit_s: float) -> None:
        self.table, self.lease, self.token = table, lease, token
        self.lease_s, self.limit_s = lease_s, limit_s
        self.due = self.ends = self.until = 0.0
        self.ended = self.lost = self.is_last = False

    def begin(self, now: float, lease_s: float) -> None:
        """The worker has shown that it does not hang, and the lease lasts `lease_s` from now. `LeaseRenewer.renew` has
        to follow.
        """
        self.is_last = False
        self.ends = now + lease_s
        self.until = max(now + self.limit_s, self.ends)
        self.due = now + RENEWED_AT * lease_s

    def restart(self, now: float) -> bool:
        """The worker has shown that it does not hang. Returns whether `LeaseRenewer.renew` has to follow, since no
        renewal was due any more."""
        self.until = max(self.until, now + self.limit_s)
        if not self.is_last or self.ended or self.lost:
            return False
        self.is_last, self.due = False, now
        return True

    def end(self) -> None:
        """End the renewals: the holder has ended the lease."""
        self.ended = True


class LeaseRenewer:
    """The leases of one connection."""

    def __init__(self) -> None:
        self._new: deque[RenewedLease] = deque()
        self._heap: list[tuple[float, int, RenewedLease]] = []
        self._pushed = 0
        self._compact_at = COMPACT_MIN

    def renew(self, kept: RenewedLease) -> None:
        """Renew this lease from `kept.due` on. A second call takes the present `due`."""
        self._new.append(kept)

    @property
    def has_new(self) -> bool:
        """Whether `next_due` may change though nothing was renewed."""
        return bool(self._new)

    def next_due(self) -> float | None:
        """When a lease has to be renewed; None if none is kept."""
        self._take_new()
        heap = self._heap
        while heap and not _stands(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def renewals(self, now: float) -> list[tuple[RenewedLease, float]]:
        """The leases to renew now, and for how long. Each waits for `renewed` or `lost` then."""
        wanted = []
        while (due := self.next_due()) is not None and due <= now:
            kept = heapq.heappop(self._heap)[2]
            kept.due = math.inf
            left = kept.until - now
            kept.is_last = left <= kept.lease_s
            if kept.until > kept.ends:
                wanted.append((kept, min(kept.lease_s, left)))
        return wanted

    def renewed(self, kept: RenewedLease, lease_s: float, now: float) -> None:
        """The lease lasts `lease_s` from now."""
        kept.ends = now + lease_s
        if not kept.is_last and kept.due == math.inf:
            kept.due = now + RENEWED_AT * lease_s
            self.renew(kept)

    def _take_new(self) -> None:
        while self._new:
            kept = self._new.popleft()
            self._pushed += 1
            heapq.heappush(self._heap, (kept.due, self._pushed, kept))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if _stands(entry)]
            heapq.heapify(self._heap)
            self._compact_at = max(COMPACT_MIN, 2 * len(self._heap))


def _stands(entry: tuple[float, int, RenewedLease]) -> bool:
    due, _, kept = entry
    return kept.due == due and not kept.ended and not kept.lost
