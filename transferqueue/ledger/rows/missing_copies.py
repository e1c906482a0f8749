"""Blocks that have lost copies, and the orders to copy them again.

See docs/decisions/shards.md.

1. A block *lacks copies* while a row needs it and it lies in fewer shards than its table keeps
   (`OwnerBytes.replicas`).
2. A *copy order* has one shard process write some of these blocks into one extent, which is granted to its session. A
   block is in at most one order. While it waits for one it is in `waiting`.
3. A copy counts, and is reported, once the shard has acknowledged its write (`Copies.finish`).
4. An order ends when the shard reports it, or when its session ends. Then its extent is closed, and the blocks that
   still lack a copy wait again, behind all others. After `COPY_ORDER_S` it is *overdue*: its blocks wait again, so that
   another shard may copy them, but its extent stays with the session, which may still write there, and a late report
   still counts for copies that are still lacking. Only a report, a late report or the end of the session closes the
   extent: there are no commits into it, and the session does not return it.
5. Blocks with the fewest copies are copied first; of these the newest, because rows need them for longest.
6. A copy that failed is read from the next place of the block when it is ordered again, if there are several. After a
   failure from each of them the block is *postponed* for the shard to which it was copied, by `COPY_RETRY_S` and then
   twice as long each time, up to `COPY_POSTPONED_S`: until then it is not copied there, such as damaged bytes again and
   again. Other shards copy it meanwhile, so one to which every copy fails keeps no block from them. A place that is
   added or lost ends that.
7. A shard process copies to its own shard. It copies to the coordinator's shard only blocks that no other shard process
   can copy to its own now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from transferqueue.limits import COPY_ORDER_BLOCKS, COPY_ORDER_BYTES, COPY_POSTPONED_S, COPY_RETRY_S
from transferqueue.schema import align

OWN_SHARD: Final = 0
"""The coordinator's shard, which has no process of its own to copy into it."""
SCANNED_MAX: Final = 4 * COPY_ORDER_BLOCKS
"""Blocks with the same copies considered for one order; some may be too large for the free room."""
Shards = tuple[int, ...]
"""The numbers of the shards in which a block lies, ascending."""


class CopyChoice(NamedTuple):
    """Blocks to copy next, the shard to copy them to, and the bytes that they need there."""

    target: int
    blocks: list[int]
    nbytes: int


@dataclass(slots=True, eq=False)
class CopyOrderState:
    """A copy order. `offsets`: its blocks, and the place of each in the arena. The order is overdue after
    `deadline`."""

    extent: int
    nbytes: int
    offsets: dict[int, int]
    deadline: float | None = None
    overdue: bool = False


@dataclass(slots=True, eq=False)
class PostponedCopy:
    """A block that is not copied to this shard before the deadline, `delay_s` away, since copies from all its places
    failed."""

    block: int
    target: int
    delay_s: float
    deadline: float | None = None


@dataclass(slots=True, eq=False)
class MissingCopies:
    """The blocks of one ledger that lack copies.

    Args:
        waiting: shards -> the waiting blocks in them, in the order in which they are copied, with their bytes.
        orders: the running orders, by extent.
        bytes_ordered: bytes of the extents of all orders that are not overdue.
        late: the number of overdue orders since the latest change of a block's places, by block. The next order reads
            another place.
        failures: the number of failed copies since the latest change of a block's places, by block and target shard.
        postponed: by block and shard, as `failures`. These blocks wait, too.
    """

    waiting: dict[Shards, dict[int, int]] = field(default_factory=dict)
    orders: dict[int, CopyOrderState] = field(default_factory=dict)
    bytes_ordered: int = 0
    late: dict[int, int] = field(default_factory=dict)
    failures: dict[int, dict[int, int]] = field(default_factory=dict)
    postponed: dict[int, dict[int, PostponedCopy]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.orders)

    def blocks(self) -> Iterator[int]:
        """All blocks that lack copies, some twice. Some of those in an order may be unreferenced."""
        orders = (order.offsets for order in self.orders.values())
        for members in (*self.waiting.values(), *orders):
            yield from members

    def is_ordered(self, block: int) -> bool:
        """Whether an order that is not overdue has the block."""
        return any(block in order.offsets and not order.overdue for order in self.orders.values())

    def add(self, block: int, nbytes: int, shards: Shards) -> None:
        """The block lacks a copy, and waits for an order."""
        self.waiting.setdefault(shards, {})[block] = nbytes

    def remove(self, block: int, shards: Shards) -> None:
        """Remove a waiting block. No error if it does not wait."""
        members = self.waiting.get(shards)
        if members is not None and members.pop(block, None) is not None and not members:
            del self.waiting[shards]

    def forget(self, block: int, shards: Shards) -> None:
        """As `remove`, and forget failed copies: the block is unreferenced, or its places change."""
        self.remove(block, shards)
        self.late.pop(block, None)
        self.failures.pop(block, None)
        for postponed in self.postponed.pop(block, {}).values():
            postponed.deadline = None

    def fail(self, block: int, target: int, places: int) -> PostponedCopy | None:
        """A copy of this block, which lies in `places` shards, to `target` failed. Returns it with its wait, if copies
        from all of them have failed."""
        failures = self.failures.setdefault(block, {})
        failures[target] = failures.get(target, 0) + 1
        rounds, untried = divmod(failures[target], places)
        if untried or target in self.postponed.get(block, ()):
            return None
        delay_s = min(COPY_RETRY_S * 2.0 ** min(rounds - 1, 32), COPY_POSTPONED_S)
        postponed = self.postponed.setdefault(block, {})[target] = PostponedCopy(block, target, delay_s)
        return postponed

    def resume(self, postponed: PostponedCopy) -> None:
        """The time of a postponed block is over."""
        members = self.postponed.get(postponed.block, {})
        if members.get(postponed.target) is postponed:
            del members[postponed.target]
            if not members:
                del self.postponed[postponed.block]

    def tries(self, block: int, target: int) -> int:
        """The number of failed copies of a block to this shard."""
        return self.late.get(block, 0) + self.failures.get(block, {}).get(target, 0)

    def move_back(self, shards: Shards) -> None:
        """Blocks that lie in `shards` are copied after those of other shards: a copy from there has failed."""
        if (members := self.waiting.pop(shards, None)) is not None:
            self.waiting[shards] = members

    def begin(self, extent: int, nbytes: int, offsets: dict[int, int]) -> CopyOrderState:
        """An order begins. The caller has removed its blocks."""
        order = self.orders[extent] = CopyOrderState(extent, nbytes, offsets)
        self.bytes_ordered += nbytes
        return order

    def expire(self, order: CopyOrderState) -> None:
        """The order is overdue from now on, if it was not before. The caller has its blocks wait again."""
        if not order.overdue:
            order.overdue = True
            self.bytes_ordered -= order.nbytes

    def end(self, extent: int) -> CopyOrderState | None:
        """Remove the order of this extent, if there is one, and return it."""
        order = self.orders.pop(extent, None)
        if order is not None:
            order.deadline = None
            self.expire(order)
        return order

    def choose(self, shard: int, rooms: Mapping[int, int]) -> CopyChoice | None:
        """The next blocks that the process of `shard` copies; None: nothing now.

        `rooms` are the bytes that each shard with room can still grant to copies, `OWN_SHARD` among them.
        """
        for shards in sorted(self.waiting, key=lambda shards: (len(shards), shard in shards)):
            target = self._target(shard, shards, rooms)
            if target is not None and (choice := self._fill(shard, target, rooms)).blocks:
                return choice
        return None

    def _target(self, shard: int, shards: Shards, rooms: Mapping[int, int]) -> int | None:
        """Where the process of `shard` copies blocks that lie in `shards`; None: not its task (rule 7)."""
        if shard not in shards:
            return shard if shard in rooms else None
        if OWN_SHARD in shards or OWN_SHARD not in rooms:
            return None
        smallest = min(islice(self.waiting[shards].values(), SCANNED_MAX))
        others = (room for number, room in rooms.items() if number != OWN_SHARD and number not in shards)
        return None if any(room >= smallest for room in others) and not self.postponed else OWN_SHARD

    def _members(self, target: int, shards: Shards, rooms: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """The blocks that lie in `shards` and may go to `target` now, with their bytes."""
        members = self.waiting[shards].items()
        if not self.postponed:
            return iter(members)
        others = {number: room for number, room in rooms.items() if number != OWN_SHARD and number not in shards}
        return (
            (block, size)
            for block, size in members
            if target not in (away := self.postponed.get(block, ()))
            and not (
                target == OWN_SHARD and any(room >= size and number not in away for number, room in others.items())
            )
        )

    def _fill(self, shard: int, target: int, rooms: Mapping[int, int]) -> CopyChoice:
        """As many blocks for this target as one order takes."""
        chosen: list[int] = []
        nbytes, room = 0, rooms[target]
        for shards in sorted(self.waiting, key=len):
            if self._target(shard, shards, rooms) != target:
                continue
            for block, size in islice(self._members(target, shards, rooms), SCANNED_MAX):
                end = nbytes + align(size)
                if end <= room and (end <= COPY_ORDER_BYTES or not chosen):
                    chosen.append(block)
                    nbytes = end
                if len(chosen) == COPY_ORDER_BLOCKS or nbytes >= COPY_ORDER_BYTES:
                    return CopyChoice(target, chosen, nbytes)
        return CopyChoice(target, chosen, nbytes)
