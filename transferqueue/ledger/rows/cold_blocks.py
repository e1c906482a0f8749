"""Blocks whose bytes leave memory for a disk and come back: which may leave, which are gone, and which requests wait for them.

The rules (docs/decisions/0056):

1. Only blocks of tables that lie in the coordinator's own memory, and nowhere else, are spilled. Versions of weights and blocks with copies
   stay.
2. A block is *cold* while nobody pins it. An extent is spilled as a whole, when it is closed and all its blocks are cold: nothing else makes
   room. The latest blocks leave first, since tasks lease the oldest ones first.
3. A block stays readable until its bytes are written. If somebody pinned it meanwhile, its extent stays in memory.
4. A block on disk has no extent, and its location names the shard `ON_DISK`. No reply contains such a location: a request that would name
   the block waits, and asks for its bytes with a *load order*.
5. A load order names all blocks that its request needs. Orders are carried out one after the other. The blocks of the first one are not
   spilled, so they are all in memory when it ends; then its request is tried again, before anything else is spilled, and pins them. An
   order that finds no memory ends without that, so that no request keeps others from their blocks.
6. Blocks of an order that are in memory may lie scattered, each in an extent with others that nobody needs now. If the order finds no memory,
   and nothing else is cold, these extents leave, too, and the blocks come back side by side. At most twice for each order: first where that
   makes room, then all, which ends fragmentation. Neither if what cannot leave takes too much memory anyway.
7. A request whose blocks could never be in memory together is refused.
8. A block that nobody needs any more is forgotten, and its bytes on the disk with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from transferqueue.errors import Full, Impossible
from transferqueue.ledger.effects import MustWait, WakeKey
from transferqueue.ledger.rows.blocks import BlockRegistry, CommittedBlock, OwnerBytes
from transferqueue.ledger.rows.missing_copies import OWN_SHARD
from transferqueue.limits import LOAD_ORDERS_MAX, PAGE_BYTES, SMALL_EXTENTS_BYTES
from transferqueue.schema import align
from transferqueue.wire.messages import BlockLocation

ON_DISK: Final = -1
"""The shard that the location of a block names while its bytes are on a disk."""
LOADED: Final[WakeKey] = ("loaded",)
"""What a request waits for whose blocks are on a disk."""
_LOADED_TOGETHER_BYTES: Final = SMALL_EXTENTS_BYTES
"""Small blocks are loaded into extents of this size, which small puts have, too."""


@dataclass(frozen=True, slots=True)
class ColdExtent:
    """An extent to spill, with the locations of its blocks."""

    number: int
    nbytes: int
    blocks: list[BlockLocation]


class ColdBlocks:
    """The blocks of a registry that may be spilled, or are.

    room: the most bytes that the blocks of one request may take in memory. tables: what the blocks of each table count for.
    """

    def __init__(self, blocks: BlockRegistry, room: int, tables: Callable[[], Iterable[OwnerBytes]]) -> None:
        self.room: Final = room
        self.on_disk: dict[int, CommittedBlock] = {}
        self.bytes_on_disk = 0
        self.orders: dict[frozenset[int], int] = {}
        """The load orders that have not ended, by the blocks that they need, and how often extents left for each (rule 6). The first one is carried
        out."""
        self._tables: Final = tables
        self._resident: dict[int, dict[int, CommittedBlock]] = {}
        """By extent: its blocks that may be spilled."""
        self._writing: dict[int, list[int]] = {}
        """By extent: the blocks that are being written."""
        self._gathered: set[int] = set()
        """Extents that are being written though the first order needs blocks in them."""
        self._loading: dict[int, dict[int, int]] = {}
        """By extent: the blocks that are being loaded into it, with their offsets."""
        self._forgotten: list[int] = []
        self.attach(blocks)

    def attach(self, blocks: BlockRegistry) -> None:
        """Follow this registry from now on. None of its blocks is on a disk."""
        self._blocks = blocks
        blocks.cold = self
        self._resident.clear()
        for block in blocks.blocks.values():
            self.committed(block)

    # ------------------------------------------------------------ what the registry tells

    def committed(self, block: CommittedBlock) -> None:
        """A block was committed."""
        if block.replicas == 1 and block.extent.shard == OWN_SHARD:
            self._resident.setdefault(block.extent.id, {})[block.at.block] = block

    def forget(self, block: CommittedBlock) -> None:
        """Nobody needs this block any more."""
        number = block.at.block
        if self.on_disk.pop(number, None) is not None:
            self.bytes_on_disk -= block.at.nbytes
            self._forgotten.append(number)
        elif number in (members := self._resident.get(block.extent.id, {})):
            del members[number]
            if not members:
                del self._resident[block.extent.id]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on disk, or on its way there or back."""
        return not (self.on_disk or self.orders or self._writing or self._forgotten)

    def take_forgotten(self) -> list[int]:
        """The blocks on disk that were forgotten since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    # ------------------------------------------------------------ requests that need blocks

    def want(self, numbers: Collection[int]) -> MustWait | None:
        """What a request must wait for that is to name these blocks; None if they are all in memory.

        `Impossible` if they never can be in memory together, `Full` if too many orders wait.
        """
        if self.on_disk.keys().isdisjoint(numbers):
            return None
        needed = frozenset(numbers)
        nbytes = self._pages_of(needed)
        if nbytes > self.room:
            raise Impossible(
                f"the blocks of these rows have {nbytes:,} bytes, and rows may have {self.room:,} bytes of memory at a time, so they cannot all be "
                "brought back from the disk; ask for fewer rows at a time, or start the server with a larger --arena-bytes"
            )
        if needed not in self.orders and len(self.orders) >= LOAD_ORDERS_MAX:
            raise Full(f"{LOAD_ORDERS_MAX} requests wait for blocks on the disk already, which is the most; ask again")
        self.orders.setdefault(needed, 0)
        return MustWait((LOADED,))

    @property
    def first_order(self) -> frozenset[int]:
        """The blocks of the load order that is carried out; empty if there is none."""
        return next(iter(self.orders), frozenset())

    def missing(self) -> list[tuple[list[int], int]]:
        """The blocks of the first order that are on disk, and that nobody loads yet, in groups. Each is to be loaded into one extent of so many
        bytes; the largest first."""
        loading = {number for offsets in self._loading.values() for number in offsets}
        return self._grouped(self.first_order & (self.on_disk.keys() - loading))

    def _grouped(self, numbers: Iterable[int]) -> list[tuple[list[int], int]]:
        """These blocks in groups, each for one extent of so many bytes: larger blocks alone, small ones together; the largest first."""
        groups: list[tuple[list[int], int]] = []
        group, nbytes = list[int](), 0
        for number in sorted(numbers):
            size = self._blocks.blocks[number].at.nbytes
            if group and nbytes + size > _LOADED_TOGETHER_BYTES:
                groups.append((group, nbytes))
                group, nbytes = [], 0
            group.append(number)
            nbytes = align(nbytes + max(size, 1))
        if group:
            groups.append((group, nbytes))
        return sorted(groups, key=lambda entry: -entry[1])

    def _pages_of(self, numbers: Iterable[int]) -> int:
        """The bytes of memory that these blocks take side by side; blocks that have ended since they were named take none."""
        live = [number for number in numbers if number in self._blocks.blocks]
        return sum(align(nbytes, PAGE_BYTES) for _, nbytes in self._grouped(live))

    def end_order(self) -> bool:
        """End the first order if nothing of it is on disk any more. Returns whether it ended: then requests are due that wait for blocks."""
        if not self.orders or not self.on_disk.keys().isdisjoint(self.first_order):
            return False
        self.give_up_order()
        return True

    def give_up_order(self) -> None:
        """End the first order. A request that still waits for its blocks makes another one, behind all others."""
        del self.orders[self.first_order]
        self._blocks.wake(LOADED)

    # ------------------------------------------------------------ to the disk

    def choose(self, nbytes: int) -> list[ColdExtent]:
        """Extents of at least `nbytes` together that are to be written now, fewer if no others are cold. Each is being written until
        `finish_writing`."""
        chosen: list[ColdExtent] = []
        for extent in self._cold_extents(self.first_order):
            chosen.append(extent)
            nbytes -= extent.nbytes
            if nbytes <= 0:
                break
        return self._begin_writing(chosen)

    def choose_scattered(self, used: int) -> list[ColdExtent]:
        """As `choose`, of the extents that the first order needs blocks of, if it has room once they were written (rule 6). used: bytes of memory
        that are in use."""
        order = self.first_order
        if not order or self.orders[order] > 1:
            return []
        cold = list(self._cold_extents(frozenset()))
        if used - sum(extent.nbytes for extent in cold) + self._pages_of(order) > self.room:
            return []
        scattered = [extent for extent in cold if any(at.block in order for at in extent.blocks)]
        while self.orders[order] < 2:
            self.orders[order] += 1
            chosen = [extent for extent in scattered if self.orders[order] > 1 or self._is_sparse(extent, order)]
            if chosen:
                self._gathered.update(extent.number for extent in chosen)
                return self._begin_writing(chosen)
        return []

    def _is_sparse(self, extent: ColdExtent, order: frozenset[int]) -> bool:
        """Whether the blocks that the order needs take less memory without the others of the extent."""
        return self._pages_of(at.block for at in extent.blocks if at.block in order) < extent.nbytes

    def _cold_extents(self, spared: frozenset[int]) -> Iterator[ColdExtent]:
        """The cold extents without a block in `spared`, the latest first."""
        tables = {id(usage) for usage in self._tables()}
        for number, members in reversed(self._resident.items()):
            extent = self._blocks.extents[number]
            if (
                not extent.open
                and len(members) == extent.blocks
                and number not in self._writing
                and spared.isdisjoint(members)
                and not any(block.pins or id(block.usage) not in tables for block in members.values())
            ):
                yield ColdExtent(number, extent.nbytes, [block.at for block in members.values()])

    def _begin_writing(self, chosen: list[ColdExtent]) -> list[ColdExtent]:
        for extent in chosen:
            self._writing[extent.number] = [at.block for at in extent.blocks]
        return chosen

    def finish_writing(self, number: int, *, written: bool) -> list[int]:
        """The bytes of an extent were written, or could not be. Returns the blocks that lie only on the disk from now on: none if somebody
        needs the extent again."""
        begun = self._writing.pop(number)
        spared = self.first_order if number not in self._gathered else frozenset[int]()
        self._gathered.discard(number)
        members, extent = self._resident.get(number, {}), self._blocks.extents.get(number)
        if not written or extent is None or len(members) != extent.blocks or not members.keys() <= set(begun):
            return []
        if any(block.pins for block in members.values()) or not spared.isdisjoint(members):
            return []
        del self._resident[number]
        for block in members.values():
            self.on_disk[block.at.block] = block
            self.bytes_on_disk += block.at.nbytes
            block.at = replace(block.at, shard=ON_DISK, extent=0, offset=0)
            self._blocks.leave(block)
        return list(members)

    # ------------------------------------------------------------ back into memory

    def begin_loading(self, offset: int, nbytes: int, numbers: Iterable[int]) -> dict[int, int]:
        """Load these blocks into an extent of the coordinator's own memory, which the caller has allocated. Returns where each one begins.
        The extent closes by `finish_loading` of the same `offset`."""
        extent = self._blocks.grant(0, OWN_SHARD, offset, nbytes)
        offsets: dict[int, int] = {}
        for number in numbers:
            offsets[number] = offset
            offset = align(offset + self.on_disk[number].at.nbytes)
        self._loading[extent.id] = offsets
        return offsets

    def finish_loading(self, offset: int, loaded: Collection[int]) -> None:
        """The bytes of these blocks are in the extent at `offset`. Its other blocks stay on the disk."""
        number = next(one for one in self._loading if self._blocks.extents[one].offset == offset)
        for member, at in self._loading.pop(number).items():
            block = self.on_disk.get(member)
            if block is None or member not in loaded:
                continue
            del self.on_disk[member]
            self.bytes_on_disk -= block.at.nbytes
            block.at = replace(block.at, shard=OWN_SHARD, extent=number, offset=at)
            self._blocks.arrive(block, number)
            self.committed(block)
        self._blocks.close(number)
