"""Blocks whose bytes leave memory for a disk and come back: the arenas that have one, and the requests that wait for blocks there.

The rules (docs/decisions/0056, 0059; what one arena does: `cold_arena`):

1. Only blocks of tables that lie in one arena alone are spilled, to the disk of that arena. Versions of weights and blocks with copies stay.
2. A block is *cold* while nobody pins it.
3. A block on a disk has no extent, and its location names a shard below 0 (`cold_arena.disk_of`). No reply contains such a location: a request
   that would name the block waits, and asks for its bytes with a *load order*.
4. A load order names all blocks that its request needs. All orders wait in one line. An arena carries out the first one that has blocks there. The
   blocks of that one are not spilled. So those of an order are all in memory when it ends; then its request is tried again, before anything else is
   spilled, and pins them. Since the line is one, no two orders wait for each other. An order that finds no memory goes to the end of the line,
   so that no request keeps others from their blocks. An order ends when the sessions of all requests that wait for it have ended. If the wait of
   its request is over, it is carried out all the same, for the next such request.
5. An order that lacks blocks of an arena whose disk is silent is not carried out anywhere until that disk answers.
6. A request whose blocks could never be in memory together is refused.
7. A block that nobody needs any more is forgotten, and its bytes on the disk with it. Those of a lost shard are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from transferqueue.errors import Full, Impossible
from transferqueue.ledger.effects import MustWait, WakeKey, Writes
from transferqueue.ledger.rows.blocks import BlockRegistry, CommittedBlock, ExtentState, OwnerBytes
from transferqueue.ledger.rows.cold_arena import ColdArena, LoadOrder, disk_of
from transferqueue.ledger.rows.missing_copies import OWN_SHARD
from transferqueue.limits import COUNT_MAX, LOAD_ORDERS_MAX


class ColdBlocks:
    """The blocks of a registry that may be spilled, or are. tables: what the blocks of each table count for."""

    def __init__(self, blocks: BlockRegistry, tables: Callable[[], Iterable[OwnerBytes]]) -> None:
        self.on_disk: dict[int, CommittedBlock] = {}
        self.arenas: dict[int, ColdArena] = {}
        """By shard."""
        self.orders: dict[frozenset[int], LoadOrder] = {}
        """The load orders that have not ended, by the blocks that they need."""
        self._last_order = 0
        self._may_end = False
        """Whether a block has left a disk, or another order is carried out, since `end_orders` looked."""
        self.stirred: set[int] = set()
        """Arenas in which something is to be done since: a block was forgotten, or a load order began. The caller empties it."""
        self._tables: Final = tables
        self._carried_out: dict[int, LoadOrder] = {}
        """By arena: the order that it carries out."""
        self.attach(blocks)

    def attach(self, blocks: BlockRegistry) -> None:
        """Follow this registry from now on. None of its blocks is on a disk."""
        self._blocks = blocks
        blocks.cold = self
        for arena in self.arenas.values():
            arena.attach(blocks)
        for block in blocks.blocks.values():
            self.committed(block)

    def add_arena(self, shard: int, room: Callable[[], int], blocks_max: int = COUNT_MAX) -> ColdArena:
        """From now on blocks of this shard may leave for its disk. room, blocks_max: see `ColdArena`."""
        arena = self.arenas[shard] = ColdArena(
            shard, self._blocks, self.on_disk, self._tables, room, blocks_max, self._departed
        )
        for block in self._blocks.blocks.values():
            if block.extents and block.extent.shard == shard:
                self.committed(block)
        return arena

    def _departed(self) -> None:
        self._may_end = True

    # ------------------------------------------------------------ what the registry tells

    def committed(self, block: CommittedBlock) -> None:
        """A block was committed."""
        if block.replicas == 1 and (arena := self.arenas.get(block.extent.shard)) is not None:
            arena.committed(block)

    def forget(self, block: CommittedBlock) -> None:
        """Nobody needs this block any more."""
        if block.extents:
            if (arena := self.arenas.get(block.extent.shard)) is not None:
                arena.forget(block)
        elif self.on_disk.pop(block.at.block, None) is not None:
            self._may_end = True
            shard = disk_of(block.at.shard)
            if (arena := self.arenas.get(shard)) is not None:
                arena.forget_on_disk(block)
                self.stirred.add(shard)

    def may_be_cold(self, extent: ExtentState) -> None:
        """Nobody reads a block of this extent any more, or nobody writes into it any more."""
        if (arena := self.arenas.get(extent.shard)) is not None:
            arena.may_be_cold(extent.id)

    def lose(self, shard: int) -> list[int]:
        """A shard is lost, and its disk with it. Returns the blocks there; the caller must retire them. Requests that need blocks there are due."""
        arena = self.arenas.pop(shard, None)
        if arena is None:
            return []
        arena.lose()
        self._carried_out.pop(shard, None)
        self.stirred.discard(shard)
        self.give_up([order for order in self.orders.values() if shard in order.arenas])
        disk = disk_of(shard)
        return [number for number, block in self.on_disk.items() if block.at.shard == disk]

    # ------------------------------------------------------------ requests that need blocks

    def want(self, numbers: Collection[int], core: Writes) -> MustWait | None:
        """What a request must wait for that is to name these blocks; None if they are all in memory.

        `Impossible` if they never can be in memory together, `Full` if too many orders wait.
        """
        if self.on_disk.keys().isdisjoint(numbers):
            return None
        needed = frozenset(numbers)
        if (order := self.orders.get(needed)) is None:
            order = self._begin(needed, core)
            core.writing = False  # the order is there; the request has changed nothing else
        return MustWait((_loaded(order),))

    def is_wanted(self, numbers: Collection[int]) -> bool:
        """Whether a request waits for one of these blocks, which is on a disk."""
        lacking = self.on_disk.keys() & numbers
        return bool(lacking) and any(not order.blocks.isdisjoint(lacking) for order in self.orders.values())

    def _begin(self, needed: frozenset[int], core: Writes) -> LoadOrder:
        arenas = self._arenas_of(needed)
        for arena, members in arenas.items():
            if (lacking := arena.check_fits(members)) is not None:
                raise _never_fits(arena.shard, *lacking)
            if arena.orders >= LOAD_ORDERS_MAX:
                raise Full(
                    f"{LOAD_ORDERS_MAX} requests wait for blocks on the disk of shard {arena.shard} already, which is the most; ask again"
                )
        core.begin()
        self._last_order += 1
        order = self.orders[needed] = LoadOrder(self._last_order, needed, frozenset(arena.shard for arena in arenas))
        for arena in arenas:
            arena.orders += 1
        self._place({arena.shard: arena for arena in arenas if arena.order is None}, order)
        return order

    def _arenas_of(self, numbers: Iterable[int]) -> dict[ColdArena, list[int]]:
        """The arenas that spill of these blocks, each with its blocks."""
        arenas: dict[ColdArena, list[int]] = {}
        for number in numbers:
            block = self._blocks.blocks[number]
            shard = block.extent.shard if block.extents else disk_of(block.at.shard)
            if (arena := self.arenas.get(shard)) is not None and arena.belongs(block):
                arenas.setdefault(arena, []).append(number)
        return arenas

    def _place_orders(self, shards: Iterable[int]) -> None:
        """Have each of these arenas carry out the first order in the line that has blocks there."""
        free = {shard: self.arenas[shard] for shard in shards if shard in self.arenas}
        for order in self.orders.values():
            if not free:
                break
            self._place(free, order)
        for shard, arena in free.items():
            arena.carry_out(None)
            self._carried_out.pop(shard, None)

    def _place(self, free: dict[int, ColdArena], order: LoadOrder) -> None:
        """Have those of the free arenas that have blocks of the order carry it out."""
        if free.keys().isdisjoint(order.arenas) or self._awaits_silent_disk(order):
            return
        for shard in order.arenas & free.keys():
            arena = free.pop(shard)
            if arena.order is not order:
                arena.carry_out(order)
                self._carried_out[shard] = order
                self._may_end = True
                self.stirred.add(shard)

    def _awaits_silent_disk(self, order: LoadOrder) -> bool:
        silent = {disk_of(shard) for shard in order.arenas if self.arenas[shard].is_silent}
        return bool(silent) and any(
            number in self.on_disk and self.on_disk[number].at.shard in silent for number in order.blocks
        )

    def set_silent(self, arena: ColdArena, *, silent: bool) -> None:
        """The disk of an arena has not answered for long, or answers again."""
        if arena.is_silent is not silent:
            arena.is_silent = silent
            self._place_orders(self.arenas)

    def carried_out(self) -> list[LoadOrder]:
        """The orders that some arena carries out, each once."""
        return list(dict.fromkeys(self._carried_out.values()))

    def end_orders(self) -> list[LoadOrder]:
        """End the orders that are carried out and of which nothing is on a disk any more. Returns these: then requests are due that wait for
        blocks."""
        if not self._may_end:
            return []
        self._may_end = False
        ended = [order for order in self.carried_out() if self.on_disk.keys().isdisjoint(order.blocks)]
        self.give_up(ended)
        return ended

    def abandon(self, keys: Collection[WakeKey]) -> list[LoadOrder]:
        """End the orders with these keys: the sessions of all requests that wait on them have ended. Returns these."""
        abandoned = [order for order in self.orders.values() if _loaded(order) in keys]
        self.give_up(abandoned)
        return abandoned

    def give_up(self, orders: Collection[LoadOrder]) -> None:
        """End these orders, all before others take their turns. A request that still waits for the blocks of one makes another one, behind all
        others."""
        arenas: dict[int, None] = {}
        for order in orders:
            del self.orders[order.blocks]
            for shard in order.arenas & self.arenas.keys():
                self.arenas[shard].orders -= 1
            arenas |= dict.fromkeys(order.arenas)
        self._place_orders(arenas)
        for order in orders:
            self._blocks.wake(_loaded(order))


def _loaded(order: LoadOrder) -> WakeKey:
    """What a request waits for that made the order."""
    return ("loaded", str(order.number))


def _never_fits(shard: int, nbytes: int, room: int) -> Impossible:
    where, remedy = (
        ("", "start the server with a larger --arena-bytes")
        if shard == OWN_SHARD
        else (f" in shard {shard}", "add the shard with a larger --arena-bytes")
    )
    return Impossible(
        f"the blocks of these rows have {nbytes:,} bytes{where}, and rows may have {room:,} bytes of memory at a time there, so they cannot all be "
        f"brought back from the disk; ask for fewer rows at a time, or {remedy}"
    )
