"""The pages of an arena that this process has registered for copies to and from devices.

See docs/decisions/memory.md.

1. When a device first reads, the process maps the arena a third time, shared. Views are never registered: they are
   private, so registering would copy every page and freeze it.
2. Pages are registered once, in regions of at most `ARENA_STEP_BYTES`, and only pages that the file has: registering a
   sparse arena would back all of it. When the arena grows, new pages become regions of their own.
3. Before this process registers pages, it holds them (`page_holds`), so the arena's owner does not return them to the
   system, and a region is never stale. Where it cannot, such as while the owner returns them, nothing is registered,
   and the caller copies another way.
4. A region that a copy uses stays. Others are given up, the longest unused first, when registering would exceed
   `DEVICE_REGISTERED_BYTES`, and all of them when no copy came for `DEVICE_IDLE_S`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import msgspec

from transferqueue.errors import OutOfMemory
from transferqueue.limits import ARENA_STEP_BYTES, DEVICE_IDLE_S, DEVICE_REGISTERED_BYTES, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.storage.devices.accelerator import Accelerator
from transferqueue.storage.memory.intervals import Intervals
from transferqueue.storage.memory.mapping import ArenaPlace
from transferqueue.storage.memory.page_holds import can_hold, hold, let_go, open_again
from transferqueue.storage.memory.private_pages import map_shared, unmap

_log: Final = logging.getLogger("transferqueue.client")


class MappedArena(Protocol):
    """An arena that this process maps, with the descriptor `fd` of its file."""

    @property
    def fd(self) -> int:
        """The file, open for reading and writing."""

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""


class _Region:
    """Bytes [start, end) of the arena, registered with `device`. `uses`: copies under way. `used`: when the last one
    began (monotonic)."""

    __slots__ = ("device", "end", "start", "used", "uses")

    def __init__(self, device: Accelerator, start: int, end: int) -> None:
        self.device, self.start, self.end = device, start, end
        self.uses, self.used = 0, 0.0


class RegisteredRange(msgspec.Struct, frozen=True, eq=False):
    """Registered memory under a copy. Call `end` when the copy has ended. `pieces`: (address, bytes), in order."""

    pages: RegisteredPages
    pieces: list[tuple[int, int]]
    regions: list[_Region]

    def end(self) -> None:
        """The copy has ended. A second call does nothing."""
        self.pages._end(self.regions)


class RegisteredPages:
    """The regions of one arena, registered with one kind of device. Safe from any thread, but not from finalizers."""

    def __init__(self, arena: MappedArena, bytes_max: int = DEVICE_REGISTERED_BYTES) -> None:
        self._fd = open_again(arena.fd)
        self._capacity, self._bytes_max = arena.capacity, bytes_max
        try:
            self._address = map_shared(self._fd, self._capacity)
        except OutOfMemory:
            os.close(self._fd)
            raise
        self._guard = threading.Lock()
        self._regions: list[_Region] = []  # ascending, apart
        self._refused = not can_hold(self._fd)
        if self._refused:
            _log.warning(
                "this system has no open file description locks, so no page is registered: columns are copied twice"
            )
        self._pid = os.getpid()

    @property
    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        return sum(region.end - region.start for region in self._regions)

    def range(self, device: Accelerator, offset: int, nbytes: int) -> RegisteredRange | None:
        """Registered memory for exactly these bytes of the arena, which the caller has pinned or may write. Registers
        missing pages. None if that fails for some."""
        used: list[_Region] = []
        pieces: list[tuple[int, int]] = []
        start, end = offset, offset + nbytes
        with self._guard:
            while start < end:
                region = self._at(start) or self._register(device, start, end)
                if region is None:
                    self._release(used)
                    return None
                used.append(region)
                region.uses += 1
                region.used = time.monotonic()
                stop = min(end, region.end)
                pieces.append((self._address + start, stop - start))
                start = stop
        return RegisteredRange(self, pieces, used)

    def give_up(self, unused_s: float = 0.0) -> None:
        """Give up the regions that no copy has used for so many seconds."""
        if os.getpid() == self._pid:  # a forked child shares the holds with its parent, and would end them
            with self._guard:
                self._give_up(0, time.monotonic() - unused_s)

    def close(self) -> None:
        """Give up all regions, and unmap. No copy may be under way. In a forked child: nothing."""
        if os.getpid() != self._pid:
            return
        with self._guard:
            if self._fd >= 0:
                self._give_up(0)
                unmap(self._address, self._capacity)
                os.close(self._fd)
            self._fd = -1

    def _end(self, regions: list[_Region]) -> None:
        with self._guard:
            self._release(regions)

    def _release(self, regions: list[_Region]) -> None:
        while regions:
            regions.pop().uses -= 1

    def _at(self, start: int) -> _Region | None:
        place = bisect_right(self._regions, start, key=lambda region: region.start) - 1
        region = self._regions[place] if place >= 0 else None
        return region if region is not None and start < region.end else None

    def _register(self, device: Accelerator, start: int, end: int) -> _Region | None:
        """Register the pages from `start` on, with neighbours that the file has, up to the next region and within one
        slice."""
        if self._refused or self._fd < 0 or os.getpid() != self._pid:
            return None
        low, high = self._room(start)
        if not hold(self._fd, low, high):
            return None
        first, last = self._run(low, high, start, min(end, high))
        let_go(self._fd, low, first)
        let_go(self._fd, last, high)
        self._give_up(self._bytes_max - (last - first))
        if self.registered_bytes + last - first > self._bytes_max or not self._registered(device, first, last):
            let_go(self._fd, first, last)
            return None
        place = bisect_right(self._regions, start, key=lambda region: region.start)
        self._regions.insert(place, _Region(device, first, last))
        return self._regions[place]

    def _registered(self, device: Accelerator, first: int, last: int) -> bool:
        if not device.register(self._address + first, last - first):
            self._refused = not self._regions  # such as an arena in a file on a disk, which has no such pages
            _log.warning(
                "device %s cannot register %s bytes of the queue's memory; its columns are copied twice",
                device.name,
                last - first,
            )
            return False
        return True

    def _room(self, start: int) -> tuple[int, int]:
        """The slice of `start`, as far as no region covers it."""
        low = start - start % ARENA_STEP_BYTES
        high = min(low + ARENA_STEP_BYTES, self._capacity)
        place = bisect_right(self._regions, start, key=lambda region: region.start)
        if place:
            low = max(low, self._regions[place - 1].end)
        if place < len(self._regions):
            high = min(high, self._regions[place].start)
        return low, high

    def _run(self, low: int, high: int, start: int, end: int) -> tuple[int, int]:
        """The run of pages in ``[low, high)`` around ``[start, end)`` that the file has."""
        runs = Intervals()
        runs.add(start - start % PAGE_BYTES, align(end, PAGE_BYTES))
        for run in self._written(low, high):
            runs.add(*run)
        return next(run for run in runs.runs() if run[0] <= start < run[1])

    def _written(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The parts of the file that have been written, in whole pages."""
        at = low
        with suppress(OSError):  # ENXIO: none from here to the end of the file. Others: only what the caller needs
            while at < high and (first := os.lseek(self._fd, at, os.SEEK_DATA)) < high:
                at = min(os.lseek(self._fd, first, os.SEEK_HOLE), high)
                yield first, at

    def _give_up(self, bytes_kept: int, until: float = math.inf) -> None:
        excess = self.registered_bytes - max(0, bytes_kept)
        for region in sorted(self._regions, key=lambda region: region.used):
            if excess <= 0 or region.used > until:
                return
            if not region.uses:
                region.device.unregister(self._address + region.start, region.end - region.start)
                self._regions.remove(region)
                let_go(self._fd, region.start, region.end)
                excess -= region.end - region.start


_known: Final[weakref.WeakKeyDictionary[MappedArena, dict[type, RegisteredPages]]] = weakref.WeakKeyDictionary()
_guard: Final = threading.Lock()
_unused: Final[SimpleQueue[RegisteredPages]] = SimpleQueue()
"""Pages of arenas that were collected. Finalizers put them here; `close_unused` closes them."""


def registered_pages(arena: MappedArena, device: Accelerator) -> RegisteredPages:
    """The pages of the arena that this process has registered with this kind of device. `OutOfMemory` if the arena
    cannot be mapped once more."""
    close_unused()
    with _guard:
        of_arena = _known.setdefault(arena, {})
        pages = of_arena.get(type(device))
        if pages is None or pages._pid != os.getpid():
            pages = of_arena[type(device)] = RegisteredPages(arena)
            weakref.finalize(arena, _unused.put, pages).atexit = False
    return pages


def registered_range(place: ArenaPlace | None, device: Accelerator, nbytes: int) -> RegisteredRange | None:
    """Registered memory for these bytes, which the caller has pinned or may write. None for memory of no arena, or if
    it cannot be registered."""
    if place is None:
        return None
    try:
        return registered_pages(place.arena, device).range(device, place.offset, nbytes)
    except OutOfMemory:  # no address space for one more mapping
        return None


def give_up_idle(unused_s: float = DEVICE_IDLE_S / 2) -> None:
    """Give up all registrations that no copy has used for so many seconds."""
    close_unused()
    with _guard:
        known = [pages for of_arena in _known.values() for pages in of_arena.values()]
    for pages in known:
        pages.give_up(unused_s)


def close_unused() -> None:
    """Close the registrations of arenas that this process no longer maps."""
    with suppress(Empty):  # another thread took the last one
        while not _unused.empty():
            _unused.get_nowait().close()
