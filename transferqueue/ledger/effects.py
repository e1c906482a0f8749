"""What the ledger asks of whoever runs it: wake waiters, reuse memory, tell holders.

The ledger does no I/O. It collects effects while it changes state, and `Ledger.take_effects` hands them
out once. An effect never has to be carried out for the ledger to stay correct.
"""

from __future__ import annotations

import msgspec

WakeKey = tuple[str, ...]
"""What a waiter waits for: ("task", table, task), ("room", table), ("clock", table), ("table", name),
("channel", name), ("turn", channel)."""


class MustWait(msgspec.Struct, frozen=True):
    """The request cannot proceed now: apply it again after a `WakeWaiters` of one of `keys`. Nothing was changed."""

    keys: tuple[WakeKey, ...]


class WakeWaiters(msgspec.Struct, frozen=True):
    """Requests that wait for `key` may now proceed, or have become hopeless: apply them again."""

    key: WakeKey


class FreeExtent(msgspec.Struct, frozen=True):
    """No live row, no view and no writer is left in this extent: its bytes may be given out again."""

    extent: int
    shard: int
    offset: int
    nbytes: int


class LeaseEnded(msgspec.Struct, frozen=True):
    """A lease ended without its holder's doing: it expired, or its rows were dropped or taken back."""

    session: int
    lease: int
    why: str


Effect = WakeWaiters | FreeExtent | LeaseEnded


class Effects:
    """Collects effects; a key is woken once however often it was touched."""

    def __init__(self) -> None:
        self._events: list[Effect] = []
        self._woken: dict[WakeKey, None] = {}

    def wake(self, *key: str) -> None:
        """Have the waiters of `key` try again."""
        self._woken[key] = None

    def add(self, event: FreeExtent | LeaseEnded) -> None:
        """Record what happened."""
        self._events.append(event)

    def take(self) -> list[Effect]:
        """All since the last call. Freed memory comes before wakes, so that who wakes finds it free."""
        taken = self._events + [WakeWaiters(key) for key in self._woken]
        self._events, self._woken = [], {}
        return taken
