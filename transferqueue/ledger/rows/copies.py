"""Blocks that lie in several shards: the copy that replaces a lost one, and the orders to write new ones.

1. A block may have copies: the same bytes in extents of other shards, committed with it and needed as long as it is.
   The rules about its extent hold for each copy. If the shard of the block is lost, a copy replaces it.
2. A block that lost a copy lacks it until another one is written (`missing_copies`). The bytes of that copy still count
   for the owner of the block: so there is room for it when it comes.
3. The extent of a copy order is written by the shard process alone, and closes with the order's report or its session.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import proxy

from msgspec.structs import replace

from transferqueue.ledger.rows.blocks import BlockPart, BlockRegistry, CommittedBlock, ExtentState
from transferqueue.ledger.rows.missing_copies import CopyOrderState, MissingCopies, PostponedCopy
from transferqueue.schema import align
from transferqueue.wire.messages import BlockLocation, CopyLocation, CopyOrder, Granted


class Copies(BlockPart):
    """The copies of the blocks of one registry, whose `missing` is their state."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: BlockRegistry) -> None:
        self._blocks: BlockRegistry = proxy(blocks)  # it has its parts: two references would be a circle
        blocks.attach(self)

    @property
    def missing(self) -> MissingCopies:
        """The blocks that lack copies."""
        return self._blocks.missing

    # ------------------------------------------------------------ calls of the registry

    def owns(self, extent: int) -> bool:
        """See `BlockPart`."""
        return extent in self.missing.orders

    def committed(self, block: CommittedBlock) -> None:
        """See `BlockPart`."""
        if len(block.extents) < block.usage.replicas:
            self._await(block)

    def retired(self, block: CommittedBlock) -> None:
        """See `BlockPart`."""
        if len(block.extents) < block.usage.replicas:
            self.missing.forget(block.at.block, block.shards)

    def closed(self, extent: ExtentState) -> None:
        """See `BlockPart`. If the extent is that of a copy order, the order ends, and blocks that still lack copies
        wait again."""
        if self.missing.orders and (order := self.missing.end(extent.id)) is not None:
            self._await_again(order)

    # ------------------------------------------------------------ losses

    def lose_shard(self, shard: int) -> list[int]:
        """Mark the extents of a shard as lost. Returns the blocks without a copy elsewhere; the caller must retire
        them."""
        extents = self._blocks.extents
        for extent in extents.values():
            extent.lost |= extent.shard == shard
        for order in [number for number in self.missing.orders if extents[number].lost]:
            self.closed(extents[order])
        lost = []
        for number, block in reversed(self._blocks.blocks.items()):
            if block.extents and all(extent.lost for extent in block.extents):
                lost.append(number)
            elif any(extent.lost for extent in block.extents):
                self._lose(block)
        return lost

    def _lose(self, block: CommittedBlock) -> None:
        """Remove lost extents from the block. Its first remaining copy becomes its main location."""
        at = block.at
        self.missing.forget(at.block, block.shards)
        places = zip(_places(at), block.extents, strict=True)
        first, *copies = [place for place, extent in places if not extent.lost]
        block.at = replace(at, shard=first.shard, extent=first.extent, offset=first.offset, copies=copies)
        gone = [extent for extent in block.extents if extent.lost]
        block.extents = tuple([extent for extent in block.extents if not extent.lost])
        for extent in gone:
            extent.blocks -= 1
            self._blocks.free_if_unused(extent)
        self._await(block)

    # ------------------------------------------------------------ new copies

    def _await(self, block: CommittedBlock) -> None:
        """Have the block wait for an order, if it lacks copies and is in none."""
        number = block.at.block
        if block.lacks_copies and not self.missing.is_ordered(number):
            self.missing.add(number, block.at.nbytes, block.shards)
            self._blocks.wake(("copies",))

    def _await_again(self, order: CopyOrderState) -> None:
        for number in order.offsets:
            if (block := self._blocks.blocks.get(number)) is not None:
                self._await(block)
                self.missing.move_back(block.shards)

    def begin(self, session: int, shard: int, offset: int, nbytes: int, blocks: Iterable[int]) -> CopyOrderState:
        """Grant an extent to the session of a shard process, to copy these blocks into it."""
        extent, at, offsets = self._blocks.grant(session, shard, offset, nbytes), offset, dict[int, int]()
        for number in blocks:
            block = self._blocks.blocks[number]
            self.missing.remove(number, block.shards)
            offsets[number] = at
            at = align(at + block.at.nbytes)
        return self.missing.begin(extent.id, extent.nbytes, offsets)

    def of_session(self, session: int) -> CopyOrderState | None:
        """The order that a session has; None if it has none."""
        orders, extents = self.missing.orders.values(), self._blocks.extents
        return next((order for order in orders if extents[order.extent].session == session), None)

    def message(self, order: CopyOrderState, shard: int) -> CopyOrder:
        """The order as the process of `shard` gets it. Each block is named where it is to be read: in this shard if it
        lies there, and elsewhere after a copy from there failed."""
        blocks, extent = self._blocks.blocks, self._blocks.extents[order.extent]
        needed = {number: at for number, at in order.offsets.items() if number in blocks}
        return CopyOrder(
            shard,
            Granted(extent.id, extent.shard, extent.offset, extent.nbytes),
            [_read_from(blocks[number].at, self.missing.tries(number, extent.shard), shard) for number in needed],
            list(needed.values()),
        )

    def due(self, subject: CopyOrderState | PostponedCopy) -> None:
        """The deadline of an order or of a postponed block has come."""
        if isinstance(subject, CopyOrderState):
            self._expire(subject)
            return
        self.missing.resume(subject)
        if (block := self._blocks.blocks.get(subject.block)) is not None:
            self._await(block)

    def _expire(self, order: CopyOrderState) -> None:
        """The order is overdue: another shard may copy its blocks, and from another place, since this place may not
        answer."""
        self.missing.expire(order)
        blocks = self._blocks.blocks
        for number in order.offsets:
            if number in blocks and len(blocks[number].extents) > 1:
                self.missing.late[number] = self.missing.late.get(number, 0) + 1
        self._await_again(order)

    def finish(self, session: int, number: int, written: Collection[int]) -> tuple[int, list[PostponedCopy]]:
        """End the order of this extent; `written` are the blocks that were copied. Returns the number of new copies,
        and the postponed blocks, whose deadlines the caller sets.

        Does nothing if the session has no such order: it reported that before, or the order ended. An unreferenced
        block counts no copy.
        """
        extent = self._blocks.extents.get(number)
        if extent is None or extent.session != session or number not in self.missing.orders:
            return 0, []
        order = self.missing.orders[number]
        added = 0
        postponed = [] if order.overdue else self._failed(order, written)
        for member, offset in order.offsets.items():
            block = self._blocks.blocks.get(member)
            if member in written and block is not None and block.lacks_copies and extent.shard not in block.shards:
                self._add(block, extent, offset)
                added += 1
        self._blocks.close(number)
        self._blocks.wake(("copies",))
        return added, postponed

    def _failed(self, order: CopyOrderState, written: Collection[int]) -> list[PostponedCopy]:
        """Count the failures of an order. Returns the blocks that are postponed."""
        blocks, target = self._blocks.blocks, self._blocks.extents[order.extent].shard
        lacking = [blocks[number] for number in order.offsets if number in blocks and number not in written]
        failed = [self.missing.fail(at.at.block, target, len(at.extents)) for at in lacking if at.lacks_copies]
        return [postponed for postponed in failed if postponed is not None]

    def _add(self, block: CommittedBlock, extent: ExtentState, offset: int) -> None:
        self.missing.forget(block.at.block, block.shards)
        copy = CopyLocation(extent.shard, extent.id, offset)
        block.at = replace(block.at, copies=[*block.at.copies, copy])
        block.extents = (*block.extents, extent)
        extent.blocks += 1


def copies_of(blocks: BlockRegistry) -> Copies:
    """The part of this registry."""
    (copies,) = [part for part in blocks.parts if isinstance(part, Copies)]
    return copies


def _places(at: BlockLocation) -> list[CopyLocation]:
    return [CopyLocation(at.shard, at.extent, at.offset), *at.copies]


def _read_from(at: BlockLocation, failures: int, shard: int) -> BlockLocation:
    """The block where it is to be read after so many failures: first in `shard`, if it lies there, then at its other
    places in turn. Fields that a copy does not need are left out."""
    places = sorted(_places(at), key=lambda place: place.shard != shard)
    here = places[failures % len(places)]
    return replace(at, shard=here.shard, extent=here.extent, offset=here.offset, fields=[], counts=[], copies=[])
