"""Blocks whose bytes leave memory for a disk and come back: which blocks may, and the requests that wait for blocks
there.

See docs/decisions/spill.md. `cold_arena` chooses the blocks that leave and come back.

1. Only blocks of tables that lie in the coordinator's own arena alone are spilled. Versions of weights and blocks with
   copies stay.
2. A block is *cold* while it is not pinned.
3. A block on the disk has no extent, and its location names the shard `cold_arena.ON_DISK`. No reply contains such a
   location: a request that would name the block waits, and asks for its bytes with a *load order*.
4. A load order names all blocks that its request needs. All orders wait in one queue. The first one is carried out, and
   its blocks are not spilled, so all are in memory when it ends. Then its request is tried again, before any further
   spill, and pins them. An order that finds no memory goes to the end of the queue, so that no request keeps others
   from their blocks. An order ends when the sessions of all requests that wait for it have ended. If the wait of its
   request is over, it is carried out all the same, for the next such request.
5. While the disk is silent, an order that lacks blocks is not carried out, and spares none.
6. A request whose blocks could never be in memory together is refused.
7. An unreferenced block is removed, with its bytes on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from transferqueue.errors import Full, Impossible
from transferqueue.ledger.effects import Blocked, WakeKey, Writes
from transferqueue.ledger.rows.blocks import BlockPart, BlockRegistry, CommittedBlock, ExtentState, OwnerBytes
from transferqueue.ledger.rows.cold_arena import ColdArena, LoadOrder
from transferqueue.ledger.rows.missing_copies import OWN_SHARD
from transferqueue.limits import LOAD_ORDERS_MAX


class ColdBlocks(BlockPart):
    """The blocks of a registry that may be spilled, or are. `tables` and `room`: see `ColdArena`."""

    def __init__(
        self, blocks: BlockRegistry, tables: Callable[[], Iterable[OwnerBytes]], room: Callable[[], int]
    ) -> None:
        self.arena: Final = ColdArena(blocks, tables, room, self._departed)
        self.on_disk = self.arena.on_disk
        self.orders: dict[frozenset[int], LoadOrder] = {}
        """The load orders that have not ended, by the blocks that they need: the queue."""
        self._last_order = 0
        self._may_end = False
        """Whether a block has left the disk, or another order runs, since the last `end_orders`."""
        self.stirred = False
        """Whether there is new work: a block was forgotten, or a load order runs. The caller sets it to False."""
        self.attach(blocks)

    def attach(self, blocks: BlockRegistry) -> None:
        """Follow this registry from now on. None of its blocks is on the disk."""
        self._blocks = blocks
        blocks.attach(self)
        blocks.cold = self
        self.arena.attach(blocks)
        for block in blocks.blocks.values():
            self.committed(block)

    def _departed(self) -> None:
        self._may_end = True

    # ------------------------------------------------------------ calls of the registry

    def committed(self, block: CommittedBlock) -> None:
        """See `BlockPart`."""
        if block.usage.replicas == 1 and block.extent.shard == OWN_SHARD:
            self.arena.committed(block)

    def forgotten(self, block: CommittedBlock) -> None:
        """See `BlockPart`."""
        if block.extents:
            if block.extent.shard == OWN_SHARD:
                self.arena.forget(block)
        elif block.at.block in self.on_disk:
            self.arena.forget_on_disk(block)
            self._may_end = self.stirred = True

    def closed(self, extent: ExtentState) -> None:
        """See `BlockPart`. The extent may be cold now."""
        if extent.shard == OWN_SHARD:
            self.arena.may_be_cold(extent.id)

    unread = closed

    # ------------------------------------------------------------ requests that need blocks

    def want(self, numbers: Collection[int], core: Writes) -> Blocked | None:
        """The condition that a request naming these blocks waits for; None if they are all in memory.

        `Impossible` if they never can be in memory together, `Full` if too many orders wait.
        """
        if self.on_disk.keys().isdisjoint(numbers):
            return None
        needed = frozenset(numbers)
        if (order := self.orders.get(needed)) is None:
            order = self._begin(needed, core)
            core.writing = False  # the order is there; the request has changed nothing else
        return Blocked((_loaded(order),))

    def is_wanted(self, numbers: Collection[int]) -> bool:
        """Whether a request waits for one of these blocks, which is on the disk."""
        lacking = self.on_disk.keys() & numbers
        return bool(lacking) and any(not order.blocks.isdisjoint(lacking) for order in self.orders.values())

    def _begin(self, needed: frozenset[int], core: Writes) -> LoadOrder:
        lacking = self.arena.check_fits(number for number in needed if self.arena.belongs(self._blocks.blocks[number]))
        if lacking is not None:
            raise _never_fits(*lacking)
        if len(self.orders) >= LOAD_ORDERS_MAX:
            raise Full(f"{LOAD_ORDERS_MAX} requests wait for blocks on the disk already, which is the most; ask again")
        core.begin()
        self._last_order += 1
        order = self.orders[needed] = LoadOrder(self._last_order, needed)
        if self.arena.order is None:
            self._carry_out_first()
        return order

    def _carry_out_first(self) -> None:
        """Carry out the first order in the line that rule 5 does not exclude."""
        order = next(filter(self._can_go_on, self.orders.values()), None)
        if order is None:
            self.arena.carry_out(None)
        elif order is not self.arena.order:
            self.arena.carry_out(order)
            self._may_end = self.stirred = True

    def _can_go_on(self, order: LoadOrder) -> bool:
        return not self.arena.is_silent or self.on_disk.keys().isdisjoint(order.blocks)

    def set_silent(self, *, silent: bool) -> None:
        """The disk has not answered for long, or answers again."""
        if self.arena.is_silent is not silent:
            self.arena.is_silent = silent
            self._carry_out_first()

    def end_orders(self) -> list[LoadOrder]:
        """End the running order if none of its blocks is on the disk. Returns the orders that ended: requests that wait
        for blocks are then due."""
        if not self._may_end:
            return []
        self._may_end = False
        order = self.arena.order
        ended = [order] if order is not None and self.on_disk.keys().isdisjoint(order.blocks) else []
        self.give_up(ended)
        return ended

    def abandon(self, keys: Collection[WakeKey]) -> list[LoadOrder]:
        """End the orders with these keys: the sessions of all requests that wait on them have ended. Returns these."""
        abandoned = [order for order in self.orders.values() if _loaded(order) in keys]
        self.give_up(abandoned)
        return abandoned

    def give_up(self, orders: Collection[LoadOrder]) -> None:
        """End these orders, all before others take their turns. A request that still waits for the blocks of one makes
        another one, behind all others."""
        for order in orders:
            del self.orders[order.blocks]
        if orders:
            self._carry_out_first()
        for order in orders:
            self._blocks.wake(_loaded(order))


def _loaded(order: LoadOrder) -> WakeKey:
    """The condition that the order's request waits for."""
    return ("loaded", str(order.number))


def _never_fits(nbytes: int, room: int) -> Impossible:
    return Impossible(
        f"the blocks of these rows have {nbytes:,} bytes, and rows may have {room:,} bytes of memory at a time, so "
        "they cannot all be brought back from the disk; ask for fewer rows at a time, or start the server with a "
        "larger --arena-bytes"
    )
