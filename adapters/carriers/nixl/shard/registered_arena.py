"""The parts of an arena that its shard has registered for one-sided reads.

See docs/decisions/one-sided.md.

1. Memory is registered when a read first names it, in slices of at most `ARENA_STEP_BYTES`, and only where the arena
   has pages: registering pins pages, and would fault in those that are missing. So a sparse arena stays sparse.
2. A slice stays registered until its pages are returned to the system (`Arena.before_punch`). While a transfer names
   ranges of it, the pages stay too. Giving a slice up starts a new *generation*: clients load the metadata of a new
   generation afresh, because a region that is registered again has another key.
3. Registration grants no right to read: tickets do, before a range is named, and the receiver compares checksums after.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from contextlib import suppress
from typing import Final

import msgspec

from transferqueue.adapters.carriers.nixl.agent import MemoryAgent
from transferqueue.adapters.carriers.nixl.shard.staging import StagingPool
from transferqueue.errors import Unreachable
from transferqueue.limits import ARENA_STEP_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import ArenaBacking
from transferqueue.storage.memory.private_pages import memory_address
from transferqueue.transport.bulk.protocol import METADATA_BYTES_MAX

_log: Final = logging.getLogger("transferqueue.server")


class MetadataVersion(msgspec.Struct, frozen=True, order=True):
    """What metadata is of: see `transport.bulk.protocol.RangesFrame`."""

    agent: str
    generation: int
    regions: int


class RegionUse:
    """The regions that one transfer names ranges of."""

    __slots__ = ("regions",)

    def __init__(self) -> None:
        self.regions: set[_Region] = set()


class _Region:
    """Registered bytes [start, end) of the arena. `uses` counts transfers under way."""

    __slots__ = ("end", "registration", "start", "uses")

    def __init__(self, start: int, end: int, registration: object) -> None:
        self.start, self.end, self.registration = start, end, registration
        self.uses: set[RegionUse] = set()


class RegisteredArena:
    """The regions of one arena, registered with `agent`. The thread of the bulk endpoint names ranges; the arena's
    owner returns pages."""

    def __init__(self, backing: ArenaBacking, agent: MemoryAgent) -> None:
        self.agent: Final = agent
        self._arena: Final = backing.arena
        self._base = memory_address(backing.memory)
        self._regions: list[_Region] = []  # ascending, apart
        self._generation = self._registered = 0
        self._metadata: tuple[MetadataVersion, bytes] | None = None
        self._arena.before_punch = self._give_up
        self._beside: list[object] = []
        self.staging: Final = StagingPool(self._register_beside)
        """Memory beside the arena, for rows that lie apart."""

    @property
    def version(self) -> MetadataVersion:
        """Of the metadata as it is now."""
        return MetadataVersion(self.agent.name, self._generation, self._registered)

    @property
    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        return sum(region.end - region.start for region in self._regions)

    def metadata(self) -> bytes:
        """Metadata that a client loads to read all regions."""
        with self._arena.guard:
            if self._metadata is None or self._metadata[0] != self.version:
                self._metadata = self.version, self._readable(self.agent.metadata())
            return self._metadata[1]

    def _readable(self, metadata: bytes) -> bytes:
        if len(metadata) > METADATA_BYTES_MAX:
            raise Unreachable(
                f"{len(self._regions)} registered regions take {len(metadata):,} bytes of metadata; a frame has at "
                f"most {METADATA_BYTES_MAX:,}"
            )
        return metadata

    def ranges(self, address: int, nbytes: int, use: RegionUse) -> list[tuple[int, int]]:
        """Registered ranges ``(address, nbytes)`` of exactly these bytes; nothing if some are not in the arena's pages.
        Registers missing regions. The regions stay until `end`."""
        start, end = address - self._base, address - self._base + nbytes
        if start < 0 or end > self._arena.capacity:
            return []
        pieces = []
        with self._arena.guard:
            while start < end:
                region = self._at(start) or self._register(start)
                if region is None:
                    return []
                region.uses.add(use)
                use.regions.add(region)
                stop = min(end, region.end)
                pieces.append((self._base + start, stop - start))
                start = stop
        return pieces

    def end(self, use: RegionUse) -> None:
        """A transfer has ended. A second call does nothing."""
        with self._arena.guard:
            while use.regions:
                use.regions.pop().uses.discard(use)
            self._arena.punch_again()

    def close(self) -> None:
        """Give up all regions; no transfer may be under way."""
        with self._arena.guard:
            self._arena.before_punch = lambda _offset, _nbytes: True
            for region in self._regions:
                with suppress(Unreachable):
                    self.agent.deregister(region.registration)
            for registration in self._beside:
                with suppress(Unreachable):
                    self.agent.deregister(registration)
            self._regions, self._beside = [], []

    def _register_beside(self, memory: U8) -> None:
        with self._arena.guard:
            self._beside.append(self.agent.register(memory_address(memory), len(memory)))
            self._registered += 1

    def _at(self, start: int) -> _Region | None:
        place = bisect_right(self._regions, start, key=lambda region: region.start) - 1
        region = self._regions[place] if place >= 0 else None
        return region if region is not None and start < region.end else None

    def _register(self, start: int) -> _Region | None:
        """Register the pages around `start`, up to the next region and within its slice. None if it has no page."""
        low = start - start % ARENA_STEP_BYTES
        runs = self._arena.backed_runs(low, min(low + ARENA_STEP_BYTES, self._arena.capacity))
        run = next((run for run in runs if run[0] <= start < run[1]), None)
        if run is None:
            return None
        place = bisect_right(self._regions, start, key=lambda region: region.start)
        first = max(run[0], self._regions[place - 1].end) if place else run[0]
        last = min(run[1], self._regions[place].start) if place < len(self._regions) else run[1]
        region = _Region(first, last, self.agent.register(self._base + first, last - first))
        self._regions.insert(place, region)
        self._registered += 1
        return region

    def _give_up(self, offset: int, nbytes: int) -> bool:
        """Deregister what touches these bytes, whose pages are to be returned. False if a transfer needs some of it."""
        touched = [region for region in self._regions if region.start < offset + nbytes and offset < region.end]
        if any(region.uses for region in touched):
            return False
        try:
            for region in touched:
                self.agent.deregister(region.registration)
                self._regions.remove(region)
        except Unreachable as error:
            _log.warning("pages stay with the arena: %s", error)
            return False
        finally:
            self._generation += bool(touched)
        return True
