"""The blocks of the coordinator's arena that may leave memory for a disk: the choice of extents to spill, those being
written, and those to load. See docs/decisions/spill.md.

1. An extent is spilled as a whole, when it is closed and all its blocks are cold: less would free no memory. The latest
   blocks leave first, since tasks lease the oldest ones first.
2. A block stays readable until its bytes are written. If it was pinned meanwhile, its extent stays in memory.
3. The blocks of the running load order are spared. They may lie scattered, each in an extent with blocks that are not
   needed now. If the order finds no memory, and no other extent is cold, these extents are spilled too, and the blocks
   come back side by side. This happens at most twice for each order: first where it makes room, then for all extents,
   which ends fragmentation. It does not happen if the extents that must stay take too much memory anyway.
4. Nothing scans the arena. An extent is listed when it may have become cold, and checked when memory is short. If it is
   not cold then, the event that makes it cold lists it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from msgspec.structs import replace

from transferqueue.ledger.rows.blocks import BlockRegistry, CommittedBlock, OwnerBytes
from transferqueue.ledger.rows.missing_copies import OWN_SHARD
from transferqueue.limits import PAGE_BYTES, SMALL_EXTENTS_BYTES
from transferqueue.schema import align
from transferqueue.wire.messages import BlockLocation

ON_DISK: Final = -1
"""The shard that the location of a block names while its bytes are on the disk."""
_LOADED_TOGETHER_BYTES: Final = SMALL_EXTENTS_BYTES
"""Small blocks are loaded into extents of this size, the size of small puts' extents."""
NO_BLOCKS: Final[frozenset[int]] = frozenset()


@dataclass(slots=True, eq=False)
class LoadOrder:
    """The blocks for which one request waits. `number`: of the order, ascending. `blocks`: those that it needs."""

    number: int
    blocks: frozenset[int]
    gathered: int = 0
    """The number of times that extents were spilled for it (rule 3)."""
    since: float | None = None
    """Since when it runs. The caller sets this time, and the next one."""
    stuck_since: float | None = None
    """Since when it finds no memory, and no job is under way that may free some."""


@dataclass(frozen=True, slots=True)
class ColdExtent:
    """An extent to spill, with the locations of its blocks."""

    number: int
    nbytes: int
    blocks: list[BlockLocation]


class ColdArena:
    """The blocks of the arena that may be spilled, or are.

    Args:
        tables: the accounts of blocks by table.
        room: returns the most bytes that the blocks of one request may take in memory now.
        departed: called when blocks have left the disk.
    """

    def __init__(
        self,
        blocks: BlockRegistry,
        tables: Callable[[], Iterable[OwnerBytes]],
        room: Callable[[], int],
        departed: Callable[[], object],
    ) -> None:
        self.room: Final = room
        self.on_disk: Final[dict[int, CommittedBlock]] = {}
        self.bytes_on_disk = 0
        self.is_silent = False
        """Whether the disk has been silent for long."""
        self.order: LoadOrder | None = None
        """The running load order. `carry_out` changes it."""
        self._blocks = blocks
        self._tables: Final = tables
        self._departed: Final = departed
        self._resident: dict[int, dict[int, CommittedBlock]] = {}
        """The blocks that may be spilled, by extent."""
        self.growth = 0
        """How many more bytes the blocks in memory that may be spilled would take on the disk, where each takes whole
        pages."""
        self._pages: dict[int, int] = {}
        """The bytes that the blocks of an extent would take there, by extent."""
        self._writing: dict[int, list[int]] = {}
        """The blocks that are being written, by extent."""
        self._listed: list[int] = []
        """Numbers of extents, as a heap of their negatives, that may be cold."""
        self._is_listed: set[int] = set()
        self._spared: set[int] = set()
        """Cold extents that are not listed, because the order needs blocks in them."""
        self._events = 0
        """The number of times that an extent was listed."""
        self._scattered_tried = (0, 0)
        """The events, and the bytes in use, at the latest check of scattered extents."""
        self._missing: list[tuple[list[int], int]] | None = None
        """The result of `missing`; None: not computed yet."""
        self._gathered: set[int] = set()
        """Extents that are being written though the order needs blocks in them."""
        self._loading: dict[int, dict[int, int]] = {}
        """The blocks that are being loaded into an extent, with their offsets, by extent."""
        self._forgotten: list[int] = []

    # ------------------------------------------------------------ calls of the registry

    def attach(self, blocks: BlockRegistry) -> None:
        """Follow this registry from now on. None of its blocks is on a disk."""
        self._blocks = blocks
        self._resident.clear()
        self._pages.clear()
        self.growth = 0
        self._listed.clear()
        self._is_listed.clear()
        self._spared.clear()

    def committed(self, block: CommittedBlock) -> None:
        """A block was committed, or came back."""
        self._resident.setdefault(block.extent.id, {})[block.at.block] = block
        self._count_pages(block, 1)
        self.may_be_cold(block.extent.id)

    def forget(self, block: CommittedBlock) -> None:
        """This block, in memory, is unreferenced."""
        if block.at.block in (members := self._resident.get(block.extent.id, {})):
            del members[block.at.block]
            self._count_pages(block, -1)
            if not members:
                del self._resident[block.extent.id]
            self.may_be_cold(block.extent.id)

    def _count_pages(self, block: CommittedBlock, sign: int) -> None:
        extent, before = block.extent, self._pages.get(block.extent.id, 0)
        after = before + sign * align(max(block.at.nbytes, 1), PAGE_BYTES)
        self.growth += max(after - extent.nbytes, 0) - max(before - extent.nbytes, 0)
        if after:
            self._pages[extent.id] = after
        else:
            self._pages.pop(extent.id, None)

    def may_be_cold(self, extent: int) -> None:
        """The last reader of a block of this extent, or its writer, is gone."""
        if extent in self._resident and extent not in self._is_listed:
            self._is_listed.add(extent)
            heappush(self._listed, -extent)
            self._events += 1

    def forget_on_disk(self, block: CommittedBlock) -> None:
        """This block, on the disk, is unreferenced."""
        del self.on_disk[block.at.block]
        self._missing = None
        self._left_disk(block)
        self._forgotten.append(block.at.block)

    def take_forgotten(self) -> list[int]:
        """The blocks on the disk that were forgotten since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    # ------------------------------------------------------------ the load order

    def carry_out(self, order: LoadOrder | None) -> None:
        """Carry out this order from now on; None: none."""
        self.order, self._missing = order, None
        spared, self._spared = self._spared, set()
        for extent in sorted(spared):
            self.may_be_cold(extent)

    def missing(self) -> list[tuple[list[int], int]]:
        """The blocks of the order that are on the disk and not being loaded, in groups, each with the size of its
        extent; the largest first."""
        if self._missing is None:
            loading = {number for offsets in self._loading.values() for number in offsets}
            self._missing = self._grouped((self._needed - loading) & self.on_disk.keys())
        return self._missing

    def check_fits(self, numbers: Iterable[int]) -> tuple[int, int] | None:
        """The bytes that these blocks take side by side, and the room for them, if they do not fit."""
        nbytes, room = self._pages_of(numbers), self.room()
        return (nbytes, room) if nbytes > room else None

    def _grouped(self, numbers: Iterable[int]) -> list[tuple[list[int], int]]:
        """These blocks in groups, each with the size of its extent: larger blocks alone, small ones together; the
        largest first."""
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

    def halves(self, numbers: list[int]) -> list[tuple[list[int], int]]:
        """A group of `missing` in two halves, each with its own extent."""
        half = len(numbers) // 2
        return [*self._grouped(numbers[:half]), *self._grouped(numbers[half:])]

    def _pages_of(self, numbers: Iterable[int]) -> int:
        """The bytes of memory that these blocks take side by side."""
        return sum(align(nbytes, PAGE_BYTES) for _, nbytes in self._grouped(numbers))

    def belongs(self, block: CommittedBlock) -> bool:
        """Whether the block is in the arena, or on its disk, and may be spilled."""
        if not block.extents:
            return block.at.shard == ON_DISK
        return block.at.block in self._resident.get(block.extent.id, {})

    # ------------------------------------------------------------ to the disk

    def choose(self, nbytes: int) -> list[ColdExtent]:
        """Extents of at least `nbytes` together that are to be written now, fewer if no others are cold. Each is being
        written until `finish_writing`."""
        tables, spared = {id(usage) for usage in self._tables()}, self._needed
        chosen: list[ColdExtent] = []
        while self._listed and nbytes > 0:
            number = -heappop(self._listed)
            self._is_listed.discard(number)
            if (extent := self._if_cold(number, tables)) is None:
                continue
            if not spared.isdisjoint(self._resident[number]):
                self._spared.add(number)
                continue
            chosen.append(extent)
            nbytes -= extent.nbytes
        return self._begin_writing(chosen)

    def choose_scattered(self, used: int) -> list[ColdExtent]:
        """As `choose`, for the extents of the order's blocks, if the order has room once they were written (rule 3). No
        other extent is cold. `used`: bytes of memory in use."""
        order, now = self.order, (self._events, used)
        if order is None or order.gathered > 1 or now == self._scattered_tried:
            return []
        self._scattered_tried = now
        tables = {id(usage) for usage in self._tables()}
        needed = [
            block for number in order.blocks if (block := self._blocks.blocks.get(number)) and self.belongs(block)
        ]
        numbers = dict.fromkeys(block.extent.id for block in needed if block.extents)
        scattered = [extent for number in numbers if (extent := self._if_cold(number, tables)) is not None]
        pages = self._pages_of(block.at.block for block in needed)
        if used - sum(extent.nbytes for extent in scattered) + pages > self.room():
            return []
        for stage in range(order.gathered + 1, 3):
            order.gathered = stage
            chosen = [extent for extent in scattered if stage > 1 or self._is_sparse(extent, order.blocks)]
            if chosen:
                self._gathered.update(extent.number for extent in chosen)
                return self._begin_writing(chosen)
        return []

    def choose_spared(self, nbytes: int) -> list[ColdExtent]:
        """As `choose`, for the extents that are spared for the order, if that finds no memory: other requests wait for
        memory, and may use these."""
        if self.order is None or self.order.stuck_since is None:
            return []
        tables = {id(usage) for usage in self._tables()}
        chosen: list[ColdExtent] = []
        for number in sorted(self._spared, reverse=True):
            if nbytes > 0 and (extent := self._if_cold(number, tables)) is not None:
                self._spared.discard(number)
                chosen.append(extent)
                nbytes -= extent.nbytes
        self._gathered.update(extent.number for extent in chosen)
        return self._begin_writing(chosen)

    @property
    def _needed(self) -> frozenset[int]:
        return self.order.blocks if self.order is not None else NO_BLOCKS

    def _is_sparse(self, extent: ColdExtent, needed: Collection[int]) -> bool:
        """Whether the blocks that are needed take less memory without the others of the extent."""
        return self._pages_of(at.block for at in extent.blocks if at.block in needed) < extent.nbytes

    def _if_cold(self, number: int, tables: Collection[int]) -> ColdExtent | None:
        """This extent, if it is cold and not being written to the disk. Only blocks of `tables` may leave."""
        members, extent = self._resident.get(number), self._blocks.extents.get(number)
        if (
            members is None
            or extent is None
            or extent.open
            or number in self._writing
            or len(members) != extent.blocks
            or any(block.pins or id(block.usage) not in tables for block in members.values())
        ):
            return None
        return ColdExtent(number, extent.nbytes, [block.at for block in members.values()])

    def _begin_writing(self, chosen: list[ColdExtent]) -> list[ColdExtent]:
        for extent in chosen:
            self._writing[extent.number] = [at.block for at in extent.blocks]
        return chosen

    def finish_writing(self, number: int, *, written: bool) -> list[int]:
        """The bytes of an extent were written, or could not be. Returns the blocks that are now on the disk only: none
        if the extent is needed again."""
        begun = self._writing.pop(number)
        spared = self._needed if number not in self._gathered else NO_BLOCKS
        self._gathered.discard(number)
        members, extent = self._resident.get(number, {}), self._blocks.extents.get(number)
        if (
            not written
            or extent is None
            or len(members) != extent.blocks
            or not members.keys() <= set(begun)
            or any(block.pins for block in members.values())
            or not spared.isdisjoint(members)
        ):
            self.may_be_cold(number)
            return []
        del self._resident[number]
        self._missing = None
        for member, block in members.items():
            self._count_pages(block, -1)
            self.on_disk[member] = block
            self.bytes_on_disk += block.at.nbytes
            block.at = replace(block.at, shard=ON_DISK, extent=0, offset=0)
            self._blocks.leave(block)
        return list(members)

    # ------------------------------------------------------------ back into memory

    def begin_loading(self, offset: int, nbytes: int, numbers: Iterable[int]) -> tuple[int, Mapping[int, int]]:
        """Load these blocks into an extent of the arena, which the caller has allocated. Returns the number of the
        extent, and where each block begins. The extent closes by `finish_loading`."""
        extent = self._blocks.grant(0, OWN_SHARD, offset, nbytes)
        offsets: dict[int, int] = {}
        for number in numbers:
            offsets[number] = offset
            offset = align(offset + self.on_disk[number].at.nbytes)
        self._loading[extent.id] = offsets
        self._missing = None
        return extent.id, offsets

    def finish_loading(self, number: int, loaded: Collection[int]) -> None:
        """The bytes of these blocks are in the extent of this number. Its other blocks stay on the disk."""
        self._missing = None
        for member, at in self._loading.pop(number).items():
            block = self.on_disk.get(member)
            if block is None or member not in loaded:
                continue
            del self.on_disk[member]
            self._left_disk(block)
            block.at = replace(block.at, shard=OWN_SHARD, extent=number, offset=at)
            self._blocks.arrive(block, number)
            self.committed(block)
        self._blocks.close(number)
        self._departed()

    def _left_disk(self, block: CommittedBlock) -> None:
        self.bytes_on_disk -= block.at.nbytes
