"""Gives shards their copy orders, so that blocks which lost a copy get another one, and a snapshot gets its blocks
(`block_fetches`). No I/O.

The ledger knows which blocks lack copies and which order a session has (`ledger.rows.missing_copies`). So this class
keeps no state, and needs nothing for a restart, a repeated request or a lost answer. See docs/decisions/shards.md.

1. A shard has one order at a time, of about `COPY_ORDER_BYTES`. All orders together have at most
   `COPIES_IN_FLIGHT_BYTES`, or there is only one.
2. A copy takes room as new rows do: the part of a shard that is reserved for results stays free.
3. Room may lie in pieces that are smaller than an order. Then the order is halved until it fits.
4. An order that was not reported is given again. Only a report ends it while its session lasts: a request without one
   may be a delayed frame, and the shard may still write into the extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from transferqueue.errors import InternalError, OutOfMemory
from transferqueue.ledger.effects import Blocked, WakeKey
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import COPIES_IN_FLIGHT_BYTES, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.server.memory.lending import Lending
from transferqueue.server.sessions.session_table import OpenSession
from transferqueue.server.shards.block_fetches import BlockFetches
from transferqueue.server.shards.registry import ShardRegistry
from transferqueue.wire import messages as m

_COPIES: Final[WakeKey] = ("copies",)
_MEMORY: Final[WakeKey] = ("memory",)


class CopyOrders:
    """The copy orders of one coordinator."""

    def __init__(
        self, ledger: Ledger, lending: Lending, shards: ShardRegistry, fetches: Sequence[BlockFetches]
    ) -> None:
        self._ledger, self._lending, self._shards, self._fetches = ledger, lending, shards, fetches

    def take(self, session: OpenSession, request: m.TakeCopies, now: float) -> m.CopyOrder | Blocked:
        """The next order of a shard, which has reported the one before. `UsageError` if the session is no shard."""
        shard = self._shards.shard_of(session).number
        report = session.number, request.extent, request.written, now
        if request.extent and not any(fetches.report(*report) for fetches in self._fetches):
            self._ledger.finish_copies(*report)
        order = self._ledger.copy_order(session.number, shard) or self._fetch_order(session.number, shard, now)
        if order is None:
            if not self._ledger.missing_copies:
                return Blocked((_COPIES,))
            if not self._begin(session, shard, now):
                return Blocked((_COPIES, _MEMORY))
            order = self._ledger.copy_order(session.number, shard)
        if order is None:
            raise InternalError(f"shard {shard} began a copy order, but the ledger has none for it")
        return order if isinstance(order, Blocked) else self._with_tickets(session.number, order)

    def _fetch_order(self, session: int, shard: int, now: float) -> m.CopyOrder | Blocked | None:
        """The first order of a fetch. Blocked: there is one, and no memory for it."""
        blocked = None
        for fetches in self._fetches:
            order = fetches.order(session, shard, now)
            if order is not None and not isinstance(order, Blocked):
                return order
            blocked = blocked or order
        return blocked

    def _begin(self, session: OpenSession, shard: int, now: float) -> bool:
        """Begin an order of the shard. Returns False if there is nothing to copy for it, or no room."""
        rooms = self._lending.rooms_for_rows()
        while (choice := self._ledger.missing_copies.choose(shard, rooms)) is not None:
            under_way = self._ledger.missing_copies.bytes_ordered
            if under_way and under_way + align(choice.nbytes, PAGE_BYTES) > COPIES_IN_FLIGHT_BYTES:
                return False
            if (taken := self._take(choice.target, max(choice.nbytes, 1))) is not None:
                with self._lending.granting(choice.target, *taken, now):
                    self._ledger.order_copies(session.number, choice.target, *taken, choice.blocks, now)
                return True
            if not choice.nbytes:
                return False
            rooms[choice.target] = choice.nbytes // 2
        return False

    def _take(self, target: int, nbytes: int) -> tuple[int, int] | None:
        try:
            return self._lending.lender(target).take(nbytes)
        except OutOfMemory:  # the file system has no pages now; it may have some later
            return None

    def _with_tickets(self, session: int, order: m.CopyOrder) -> m.CopyOrder:
        """The order with a ticket for each place, even where the session maps the memory: a shard copies over bulk
        endpoints."""
        blocks = [self._shards.tickets_for(at.shard).block(session, at) for at in order.blocks]
        return replace(
            order, target=self._shards.tickets_for(order.target.shard).granted(session, order.target), blocks=blocks
        )
