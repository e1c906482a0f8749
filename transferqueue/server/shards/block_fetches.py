"""Has shards copy blocks into the coordinator's memory, where the thread of a snapshot or a record reads them. No I/O.

The server opens no connections, so a shard brings its blocks. It gets a copy order whose target is an extent of the
coordinator's own memory (`CopyOrder`), and carries it out like an order for lost copies (`cluster.copier`).
See docs/decisions/durability.md.

1. The extents of the blocks are held (`Lending.hold`), so their bytes stay as at the moment of the snapshot.
2. A shard has one order at a time, of about `COPY_ORDER_BYTES`. All orders together have `SNAPSHOT_FETCH_BYTES`, or
   there is only one. An order takes memory as new rows do; the only order may take memory that is reserved for results.
3. The extent of a reported order is held until the thread has read it. Then the grant returns.
4. A block that was not copied is ordered again, `FETCH_TRIES` times, then from a shard that has another copy. If there
   is none, the snapshot ends with an error that names the shard.
5. A shard that neither reports nor gets an order for `SNAPSHOT_FETCH_S` is given up, and so is one whose session ends.
6. The order of a given-up shard stays, without blocks, until it is reported: the shard may still write into the extent.
   After a restart, a grant to a shard's session that belongs to no copy order is such an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from msgspec.structs import replace

from transferqueue.errors import Corruption, OutOfMemory, ShardLost, TransferQueueError, Unreachable
from transferqueue.ledger.effects import Blocked, WakeKey
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import (
    COPY_ORDER_BLOCKS,
    COPY_ORDER_BYTES,
    FETCH_TRIES,
    PAGE_BYTES,
    SNAPSHOT_FETCH_BYTES,
    SNAPSHOT_FETCH_S,
)
from transferqueue.schema import align
from transferqueue.server.memory.lending import Lending
from transferqueue.server.memory.own_memory import SHARD
from transferqueue.server.shards.registry import ShardRegistry
from transferqueue.wire import messages as m

_COPIES: Final[WakeKey] = ("copies",)
_MEMORY: Final[WakeKey] = ("memory",)


class ArrivedBlocks(NamedTuple):
    """Blocks in the coordinator's memory, with their offsets there, until `BlockFetches.read`."""

    extent: int
    blocks: list[tuple[m.BlockLocation, int]]


Deliver = Callable[[ArrivedBlocks | TransferQueueError], object]
"""Takes blocks that have arrived, or the error that ends the snapshot. Called by the loop's thread; must not block."""


@dataclass(slots=True, eq=False)
class _WantedBlock:
    """A block that is wanted from shard `at.shard`. `elsewhere`: its other places. `tries`: orders that failed to copy
    it."""

    at: m.BlockLocation
    elsewhere: list[m.BlockLocation]
    tries: int = 0


@dataclass(slots=True, eq=False)
class _FetchOrder:
    """One order. `session`: of the shard; 0 once it has ended. `blocks`: the offset of each, by number; empty: given
    up."""

    session: int
    shard: int
    target: m.Granted
    blocks: dict[int, tuple[_WantedBlock, int]] = field(default_factory=dict)


class BlockFetches:
    """The blocks that one coordinator fetches from remote shards, for one reader at a time. Used by the loop's thread.

    Args:
        wake: makes the requests due that wait on a key.
        reader: what is given up if a block cannot be fetched, for error texts.
        takes_up: grants to shards that belong to no copy order are orders of an earlier run (rule 6). One of all the
            fetches of a coordinator takes them up, and it is asked for orders first.
    """

    def __init__(
        self,
        ledger: Ledger,
        lending: Lending,
        shards: ShardRegistry,
        wake: Callable[[WakeKey], None],
        *,
        reader: str = "snapshot",
        takes_up: bool = True,
    ) -> None:
        self._reader, self._takes_up = reader, takes_up
        self._ledger, self._lending, self._shards, self._wake = ledger, lending, shards, wake
        self._deliver: Deliver | None = None
        """None: no snapshot fetches blocks."""
        self._wanted: dict[int, dict[int, _WantedBlock]] = {}
        """Blocks in no order, by shard and number."""
        self._orders: dict[int, _FetchOrder] = {}
        """Orders that their shard has not reported, by session."""
        self._arrived: dict[int, _FetchOrder] = {}
        """Reported orders whose blocks the thread reads, by extent."""
        self._progress: dict[int, float] = {}
        """When a shard last got something to do, or reported."""
        self._lacks_room: set[int] = set()
        """Shards whose next order found no memory."""
        self._resumed: set[int] = set()
        """Sessions without a grant of an earlier run."""

    # ------------------------------------------------------------ the snapshot's side

    def begin(self, blocks: Iterable[m.BlockLocation], deliver: Deliver, now: float) -> None:
        """Fetch these blocks, none of which lies in the coordinator's own memory. Each is delivered once, or an error.

        `Impossible` if a block is larger than that memory; then no fetch has begun.
        """
        wanted = [_wanted(at) for at in blocks]
        for block in wanted:
            self._lending.own.check(block.at.nbytes)
        self._deliver = deliver
        for block in wanted:
            self._enqueue(block, now, _gone)
        self._wake(_COPIES)

    def read(self, arrived: ArrivedBlocks, damaged: Iterable[int], now: float) -> None:
        """The thread has read these blocks. `damaged`: the numbers of blocks that do not match their checksum."""
        order = self._arrived.pop(arrived.extent)
        self._lending.release([arrived.extent], now)
        for number in damaged:
            self._try_again(order.blocks[number][0], now, _damaged)
        self._return(order, now)

    def expire(self, now: float) -> None:
        """Give up the shards without progress for `SNAPSHOT_FETCH_S`."""
        asked = {order.shard for order in self._orders.values() if order.blocks} | self._wanted.keys()
        late = {shard for shard in asked if now - self._progress[shard] >= SNAPSHOT_FETCH_S}
        silent = late - self._lacks_room
        for shard in sorted(silent or late):  # a silent shard may give up the room that others lack
            self._give_up(shard, now, _silent if silent else _no_room)
        for shard in late & self._wanted.keys():
            self._progress[shard] = now

    def fail(self, error: TransferQueueError) -> None:
        """End the running snapshot with this error, if there is one."""
        if (deliver := self._deliver) is not None:
            self._deliver = None
            deliver(error)

    def end(self, now: float) -> None:
        """The snapshot has ended: fetch nothing more."""
        self._deliver = None
        self._wanted.clear()
        self._progress.clear()
        self._lacks_room.clear()
        for order in self._orders.values():
            order.blocks.clear()
        for extent in list(self._arrived):
            self.read(ArrivedBlocks(extent, []), (), now)

    # ------------------------------------------------------------ the shards' side

    def report(self, session: int, extent: int, written: Iterable[int], now: float) -> bool:
        """A shard has written these blocks of its order. Returns False if its session has no such order."""
        order = self._orders.get(session)
        if order is None or order.target.extent != extent:
            return False
        del self._orders[session]
        self._progress[order.shard] = now
        copied = order.blocks.keys() & set(written)
        missing = [block for number, (block, _) in order.blocks.items() if number not in copied]
        order.blocks = {number: order.blocks[number] for number in order.blocks if number in copied}
        for block in missing:
            self._try_again(block, now, _not_copied)
        if order.blocks and self._deliver is not None:
            self._lending.hold([extent])
            self._arrived[extent] = order
            self._deliver(ArrivedBlocks(extent, [(block.at, offset) for block, offset in order.blocks.values()]))
        else:
            self._return(order, now)
        return True

    def order(self, session: int, shard: int, now: float) -> m.CopyOrder | Blocked | None:
        """The order of a shard; the same until the shard reports it. None: there is nothing to fetch."""
        order = self._orders.get(session) or self._left_by_earlier_run(session, shard)
        if order is None:
            if not (wanted := self._wanted.get(shard)):
                return None
            order = self._begin_order(session, shard, wanted, now)
            if order is None:
                return Blocked((_COPIES, _MEMORY))
        places = [_named(block.at) for block, _ in order.blocks.values()]
        return m.CopyOrder(shard, order.target, places, [offset for _, offset in order.blocks.values()])

    def _left_by_earlier_run(self, session: int, shard: int) -> _FetchOrder | None:
        if not self._takes_up or session in self._resumed:
            return None
        copied = self._ledger.ordered_extent(session)
        for extent in self._ledger.extents_of(SHARD):
            if extent.session == session and extent.id != copied:
                target = m.Granted(extent.id, SHARD, extent.offset, extent.nbytes)
                order = self._orders[session] = _FetchOrder(session, shard, target)
                return order
        self._resumed.add(session)
        return None

    def _begin_order(self, session: int, shard: int, wanted: dict[int, _WantedBlock], now: float) -> _FetchOrder | None:
        """Begin the next order of a shard. Returns None without room."""
        chosen, nbytes = self._choose(wanted)
        extent = self._take(nbytes)
        if extent is None:
            self._lacks_room.add(shard)
            return None
        self._lacks_room.discard(shard)
        self._progress[shard] = now
        with self._lending.granting(SHARD, *extent, now):
            target = self._ledger.grant(session, SHARD, *extent, now)
        order = self._orders[session] = _FetchOrder(session, shard, target)
        for number, at in chosen.items():
            order.blocks[number] = wanted.pop(number), target.offset + at
        if not wanted:
            del self._wanted[shard]
        return order

    def _choose(self, wanted: Mapping[int, _WantedBlock]) -> tuple[dict[int, int], int]:
        """The blocks of one order, with their offsets in its extent, and their bytes: as many as fit, at least one."""
        most = min(COPY_ORDER_BYTES, self._room())
        chosen: dict[int, int] = {}
        nbytes = 0
        for number, block in wanted.items():
            end = nbytes + align(block.at.nbytes)
            if chosen and (end > most or len(chosen) == COPY_ORDER_BLOCKS):
                break
            chosen[number] = nbytes
            nbytes = end
        return chosen, max(nbytes, 1)

    def _room(self) -> int:
        """The largest extent that an order may take."""
        largest = self._lending.own.allocator.largest
        return min(largest, self._lending.rooms_for_rows().get(SHARD, 0)) if self._bytes_under_way() else largest

    def _take(self, nbytes: int) -> tuple[int, int] | None:
        under_way, size = self._bytes_under_way(), align(nbytes, PAGE_BYTES)
        if size > self._room() or (under_way and under_way + size > SNAPSHOT_FETCH_BYTES):
            return None
        try:
            return self._lending.own.take(nbytes)
        except OutOfMemory:  # the file system has no pages now; it may have some later
            return None

    def _bytes_under_way(self) -> int:
        orders = (*self._orders.values(), *self._arrived.values())
        return sum(order.target.nbytes for order in orders if order.blocks)

    # ------------------------------------------------------------ ends

    def _return(self, order: _FetchOrder, now: float) -> None:
        """Return the grant of an order. A grant whose session ended has returned already."""
        if order.session:
            self._ledger.apply(m.ReturnGrant(order.target.extent), session=order.session, call=0, now=now)
        self._wake(_COPIES)

    def shard_gone(self, shard: int, session: int, now: float) -> None:
        """The session of a shard ended, and its grants with it."""
        self._resumed.discard(session)
        lost = self._orders.pop(session, None)
        for order in self._arrived.values():
            if order.session == session:
                order.session = 0
        if lost is not None:
            self._wanted.setdefault(shard, {}).update({number: block for number, (block, _) in lost.blocks.items()})
        self._give_up(shard, now, _gone)

    def _give_up(self, shard: int, now: float, why: _Reason) -> None:
        """Fetch the blocks of this shard from others."""
        blocks = list(self._wanted.pop(shard, {}).values())
        for order in self._orders.values():
            if order.shard == shard:
                blocks += [block for block, _ in order.blocks.values()]
                order.blocks.clear()
        for block in blocks:
            block.tries = FETCH_TRIES
            self._enqueue(block, now, why)
        self._wake(_COPIES)

    def _try_again(self, block: _WantedBlock, now: float, why: _Reason) -> None:
        block.tries += 1
        self._enqueue(block, now, why)

    def _enqueue(self, block: _WantedBlock, now: float, why: _Reason) -> None:
        """Fetch a block from its shard, or else from the next one that has it. `why` makes the error if none has."""
        while block.at.shard not in self._shards.remote or block.tries >= FETCH_TRIES:
            if not block.elsewhere:
                self.fail(why(self._reader, block.at))
                return
            block.at, block.tries = block.elsewhere.pop(0), 0
        shard = block.at.shard
        if shard not in self._wanted:
            self._progress[shard] = now
        self._wanted.setdefault(shard, {})[block.at.block] = block


def _wanted(at: m.BlockLocation) -> _WantedBlock:
    elsewhere = [replace(at, shard=copy.shard, extent=copy.extent, offset=copy.offset, copies=[]) for copy in at.copies]
    return _WantedBlock(replace(at, copies=[]), elsewhere)


def _named(at: m.BlockLocation) -> m.BlockLocation:
    """The location of a block, with only the fields that a copy needs."""
    return replace(at, fields=[], counts=[])


_Reason = Callable[[str, m.BlockLocation], TransferQueueError]


def _gone(reader: str, at: m.BlockLocation) -> TransferQueueError:
    return ShardLost(
        f"{reader} given up: shard {at.shard} is gone, and had the only copy of block {at.block}; the server drops its "
        "rows or has them made again: try again"
    )


def _silent(reader: str, at: m.BlockLocation) -> TransferQueueError:
    return Unreachable(
        f"{reader} given up: shard {at.shard}, which has the only copy of block {at.block}, copied nothing for "
        f"{SNAPSHOT_FETCH_S:g} s; check whether its process runs, and try again"
    )


def _no_room(reader: str, at: m.BlockLocation) -> TransferQueueError:
    return OutOfMemory(
        f"{reader} given up: for {SNAPSHOT_FETCH_S:g} s the coordinator's own memory had no room for block {at.block} "
        f"of shard {at.shard}, of {at.nbytes:,} bytes; consume rows, or start the server with a larger --arena-bytes"
    )


def _not_copied(reader: str, at: m.BlockLocation) -> TransferQueueError:
    return Unreachable(
        f"{reader} given up: shard {at.shard} could not copy block {at.block} in {FETCH_TRIES} orders; see its log"
    )


def _damaged(reader: str, at: m.BlockLocation) -> TransferQueueError:
    return Corruption(
        f"{reader} given up: block {at.block}, copied from shard {at.shard}, does not match its checksum in "
        f"{FETCH_TRIES} orders",
        block=at.block,
    )
