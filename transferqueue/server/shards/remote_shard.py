"""A further shard, as the coordinator keeps its books: what is lent of it, and what it is still to be told. No I/O.

The law (docs/decisions/0022):

1. Which bytes are lent is decided here; the shard touches bytes, and does what it is told, in order (`Orders`). What follows from
   an order happens when the shard says that it has carried it out, and not before.
2. An extent is lent only where pages are. Pages that are not there are asked for, ahead of use where that is seen; until they
   are there they are lent to the shard itself. A shard that has no room for them is asked again once something was freed.
3. What a ticket was given for is lent again only when the shard honours no such ticket any more (`tickets`).
4. Pages of what is free are given back by the rule of `storage.arena`; what is to be given back needs pages again from then on.
5. What a shard offered is a claim. It counts as room for rows in this shard alone, and no more of it than has pages once the shard
   could not make more. It confirms orders that it was told, and no others.
6. A shard that drains lends nothing more. When nothing of it is lent, it is told to leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from transferqueue.errors import ProtocolError
from transferqueue.ledger.effects import MustWait
from transferqueue.limits import ARENA_STEP_BYTES, ITEMS_MAX, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.server.sessions.sessions import OpenSession
from transferqueue.server.sessions.waiting import WakeKey
from transferqueue.server.shards.own_memory import TRIM_AFTER_S, check_size
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import surplus
from transferqueue.wire import messages as m

_AHEAD_BYTES: Final = ARENA_STEP_BYTES // 4
"""With fewer free pages than this more are asked for."""
_ENDS_KEPT: Final = 4096
"""After so many ends of extents and sessions the shard is told what stands, and forgets them."""


class _SentCommands(msgspec.Struct, frozen=True):
    number: int
    order: m.Order
    then: Callable[[bool, float], None]


def _nothing(_done: bool, _now: float) -> None:
    """Nothing follows."""


class RemoteShard:
    """One further shard. wake: makes requests that rest under a key due. standing: what of it stands now.

    lent: extents ``(offset, nbytes)`` by number that an earlier life of the coordinator lent; None: it joins now.
    """

    def __init__(
        self,
        session: OpenSession,
        offer: m.ShardOffer,
        epoch: int,
        *,
        wake: Callable[[WakeKey], None],
        standing: Callable[[], m.LiveSet],
        lent: dict[int, tuple[int, int]] | None = None,
        remote: Iterable[int] = (),
    ) -> None:
        self.session: Final = session
        self.offer: Final = offer
        self.tickets: Final = TicketIssuer(offer.secret)
        self.allocator: Final = Allocator.holding(offer.capacity, (lent or {}).values())
        self.draining = False
        self._epoch = epoch
        self._wake = wake
        self._standing = standing
        self._orders: deque[_SentCommands] = deque()
        self._last = self._told = 0
        self._ends = 0
        self._growing = 0
        self._full = False
        self._trim_at: float | None = None
        self._ready = lent is None
        if lent is None:
            self._ask_ahead()
        else:
            self._go_on(lent, remote)

    @property
    def number(self) -> int:
        """Its number."""
        return self.offer.number

    @property
    def used(self) -> int:
        """Bytes lent to sessions, or just freed."""
        return self.allocator.used - self._growing

    @property
    def lendable(self) -> int:
        """Bytes that it lends at most, as far as is known: once pages could not be made, those that there are."""
        return self.used + self.allocator.warm if self._full else self.allocator.capacity

    def _go_on(self, lent: Iterable[int], remote: Iterable[int]) -> None:
        """Nothing is known of what the shard had not been told: so it is told what stands, and that all else has no pages."""
        self.tickets.resume(remote, lent)
        self._order(self._standing())
        for offset, nbytes in self.allocator.free_ranges():
            self._order(m.FreePages(offset, nbytes))
        self._orders[-1] = msgspec.structs.replace(self._orders[-1], then=self._begin)

    def _begin(self, _done: bool, _now: float) -> None:
        self._ready = True
        self._ask_ahead()

    # ------------------------------------------------------------ what is lent

    def check(self, nbytes: int) -> None:
        """`Impossible` if an extent of `nbytes` could never be lent."""
        check_size(nbytes, self.allocator)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Offset and size of an extent of at least `nbytes`, in whole pages; None if there are no such pages now."""
        if self.draining or not self._ready:
            return None
        size = align(nbytes, PAGE_BYTES)
        offset = self.allocator.allocate_warm(size)
        if offset is None:
            self._ask(size)
            return None
        if self.allocator.warm < _AHEAD_BYTES:
            self._ask_ahead()
        return offset, size

    def give_back(self, extent: int, offset: int, nbytes: int, now: float) -> None:
        """Nobody needs this extent any more."""
        if not self.tickets.admits(extent):
            self._free(offset, nbytes, now)
            return
        self.tickets.revoke(extent)
        self._order(m.Revoke(extent), lambda _done, then: self._free(offset, nbytes, then))
        self._count_end()

    def close(self, session: int) -> None:
        """A session is over."""
        if self.tickets.serves(session):
            self.tickets.close(session)
            self._order(m.CloseTransfers(session))
            self._count_end()

    def drain(self) -> None:
        """Lend nothing more, and leave when all is free."""
        self.draining = True
        self._leave_if_empty()

    def _free(self, offset: int, nbytes: int, now: float) -> None:
        self.allocator.free(offset, nbytes)
        self._full = False
        if self._trim_at is None:
            self._trim_at = now + TRIM_AFTER_S
        self._wake(("memory",))
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self.draining and not self.allocator.used:
            self._order(m.ShutDownShard())

    # ------------------------------------------------------------ pages

    def _ask(self, size: int) -> None:
        """Pages for an extent of this size, and more if there are."""
        if self._growing >= size or self._full:
            return
        for wanted in (max(size, ARENA_STEP_BYTES), size):
            if (offset := self.allocator.allocate_cold(wanted)) is not None:
                self._grow(offset, wanted)
                return
        if (offset := self.allocator.allocate(size)) is not None:  # where pages and holes lie side by side
            self._grow(offset, size)

    def _ask_ahead(self) -> None:
        if self._growing or self._full:
            return
        if (offset := self.allocator.allocate_cold(ARENA_STEP_BYTES)) is not None:
            self._grow(offset, ARENA_STEP_BYTES)

    def _grow(self, offset: int, nbytes: int) -> None:
        self._growing += nbytes
        self._order(m.AllocatePages(offset, nbytes), lambda done, now: self._grown(offset, nbytes, done, now))

    def _grown(self, offset: int, nbytes: int, done: bool, _now: float) -> None:
        self._growing -= nbytes
        self.allocator.free(offset, nbytes)
        if done:
            self._wake(("memory",))
        else:
            self.allocator.chill(offset, nbytes)
            self._full = True
        self._leave_if_empty()

    def next_deadline(self) -> float | None:
        """When `trim` has something to do."""
        return self._trim_at

    def trim(self, now: float) -> None:
        """Have pages that were free for a while given back, if they are many."""
        if self._trim_at is None or now < self._trim_at:
            return
        self._trim_at = None
        excess = surplus(self.allocator.used + self.allocator.warm, self.allocator.used)
        for offset, nbytes in self.allocator.coldest() if excess else ():
            size = min(nbytes, excess)
            self.allocator.chill(offset, size)
            self._order(m.FreePages(offset, size))
            excess -= size
            if not excess:
                return

    # ------------------------------------------------------------ orders

    def orders(self, request: m.PollCommands, now: float) -> m.ShardCommands | MustWait:
        """What the shard is to do next, after what it says it has done. `ProtocolError` if it was never told that."""
        if request.epoch == self._epoch:
            if request.done > self._told:
                raise ProtocolError(
                    f"shard {self.number} says that it has carried out order {request.done}, and was told {self._told} so far"
                )
            self._confirm(request.done, frozenset(request.failed), now)
        if not self._orders:
            return MustWait((("shard", str(self.number)),))
        told = [self._orders[at] for at in range(min(len(self._orders), ITEMS_MAX))]
        self._told = max(self._told, told[-1].number)
        return m.ShardCommands(self._epoch, told[0].number, [one.order for one in told])

    def _confirm(self, done: int, failed: frozenset[int], now: float) -> None:
        while self._orders and self._orders[0].number <= done:
            told = self._orders.popleft()
            told.then(told.number not in failed, now)

    def _order(self, order: m.Order, then: Callable[[bool, float], None] = _nothing) -> None:
        self._last += 1
        self._orders.append(_SentCommands(self._last, order, then))
        self._wake(("shard", str(self.number)))

    def _count_end(self) -> None:
        self._ends += 1
        if self._ends >= _ENDS_KEPT:
            self._ends = 0
            self._order(self._standing())
