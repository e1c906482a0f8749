"""The memory of a shard, on the side of a process that uses it.

The law:

1. The arena is mapped once to be written (``MAP_SHARED``, into granted extents) and once to be viewed
   (``MAP_PRIVATE``): what a user changes in a view is seen by nobody else, not by other processes, not by
   a later or simultaneous batch of the same process.
2. A *hold* is what one reply lends of one extent. Its pages are pinned at the server until `on_release` is told
   its blocks, exactly once, when no array, tensor, Arrow buffer or memoryview over any of them is left here.
3. Before that is told, the private copies of its pages are dropped (``MADV_DONTNEED``): whoever looks at the
   extent next, even after it was reused, sees the file and never a stale copy. Dropping works on whole pages,
   and the blocks of small puts share pages; so it is done per extent.
4. Therefore at most one hold at a time looks at an extent through the arena-wide mapping. A second hold on the same
   extent gets a mapping of its own, and ends by unmapping it. Without this rule a page that one batch has changed in
   place would show the next batch the old bytes of a neighbour put into that page since.
5. Finalisers run in any thread, also inside a garbage collection inside our own code. They take no lock:
   a claim on an extent is one atomic ``dict.setdefault``, its end one ``dict.pop``.
6. A forked child shares nothing it could return: there, ends tell nobody.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from transferqueue.errors import Corruption, Disconnected, Forked, OutOfMemory, ProtocolError
from transferqueue.limits import ALIGNMENT, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.private_pages import array_at, drop_pages, map_private, unmap, unmapping


class BlockPlace(Protocol):
    """Where a block lies: what a reply says of each block it names."""

    @property
    def block(self) -> int:
        """Id of the block."""

    @property
    def extent(self) -> int:
        """Id of its extent."""

    @property
    def offset(self) -> int:
        """First byte in the arena."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""


class Pins(list[int]):
    """Blocks whose pins return. Whoever sends them empties the list, so that it may be handed over twice.

    total: how many they were. counted: whether the holder of the mapping has taken them off its count.
    """

    __slots__ = ("counted", "total")

    def __init__(self, blocks: Iterable[int]) -> None:
        super().__init__(blocks)
        self.total = len(self)
        self.counted = False


Release = Callable[[Pins], object]
"""Told the ids of blocks whose pins return. Called from any thread; must not block, take locks or raise."""


class _Pages:
    """The arena-wide private mapping and the file behind it; unmapped when the last hold is gone."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd, self.pid = fd, os.getpid()
        self.address = map_private(fd, 0, capacity)
        self.viewed: dict[int, _MappedRange] = {}
        """The hold that looks at an extent through this mapping, by extent."""
        weakref.finalize(self, _discard, fd, self.address, capacity, self.pid).atexit = False


def _discard(fd: int, address: int, capacity: int, pid: int) -> None:
    if os.getpid() == pid:
        unmap(address, capacity)
        os.close(fd)


class Mapping:
    """One arena as this process sees it. Safe from any thread.

    Views outlive `close`: they stay readable until collected.
    """

    def __init__(self, fd: int, path: str, capacity: int, on_release: Release) -> None:
        self.path, self.capacity = path, capacity
        self._on_release = on_release
        self._shared: mmap.mmap | None = mmap.mmap(fd, capacity)
        self._pages: _Pages | None = _Pages(fd, capacity)

    @classmethod
    def open(cls, path: str, capacity: int, on_release: Release) -> Mapping:
        """Map the arena at `path`, as the server's `Welcome` names it.

        Raises `Disconnected` if it is gone, `ProtocolError` if it is not an arena of `capacity` bytes,
        `OutOfMemory` if this process may not map so much.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Disconnected(
                f"the arena {path} cannot be opened ({error.strerror}): its server is gone, is another user's, or is not on "
                "this machine"
            ) from error
        try:
            _check_size(fd, path, capacity)
            return cls(fd, path, capacity, on_release)
        except (OSError, ValueError) as error:
            os.close(fd)
            if isinstance(error, ProtocolError | OutOfMemory):
                raise
            raise OutOfMemory(f"the arena {path} of {capacity} bytes cannot be mapped: {error}") from error

    def writable(self, offset: int, nbytes: int) -> memoryview:
        """These bytes of the arena, to be written. They must be inside an extent granted to this session."""
        self._living()
        self._check(offset, nbytes, "a grant")
        if self._shared is None:
            raise Disconnected(f"the arena {self.path} was closed in this process; connect again")
        return memoryview(self._shared)[offset : offset + nbytes]

    def pin(self, blocks: Iterable[BlockPlace]) -> dict[int, U8]:
        """The bytes of the blocks that one reply names, by block id, each ``uint8 [nbytes]`` and writable in private.

        Each id is told to `on_release` exactly once, after the last view of its extent's blocks of this call is
        collected: keep the arrays (or anything made of them) for as long as the bytes are needed. No bytes are copied or
        read. Raises `Corruption` if a block is not inside the arena, `OutOfMemory` if nothing more can be mapped; then
        nothing is held and nobody is told: the pins are still the caller's to return.
        """
        pages = self._living()
        members: dict[int, dict[int, BlockPlace]] = {}
        for block in blocks:
            self._check(block.offset, block.nbytes, f"block {block.block}")
            members.setdefault(block.extent, {})[block.block] = block
        holds: list[_MappedRange] = []
        try:
            for extent, found in members.items():
                holds.append(_MappedRange(pages, extent, list(found.values())))
        except OutOfMemory:
            for hold in holds:
                hold.end()
            raise
        return {block: memory for hold in holds for block, memory in hold.lend(self._on_release).items()}

    def close(self) -> None:
        """Let go of the arena. Nothing can be written or pinned through this object any more; views stay valid."""
        self._shared = None
        self._pages = None

    def _living(self) -> _Pages:
        if self._pages is None:
            raise Disconnected(f"the arena {self.path} was closed in this process; connect again")
        if os.getpid() != self._pages.pid:
            raise Forked("this queue was opened before os.fork; connect again in the child")
        return self._pages

    def _check(self, offset: int, nbytes: int, subject: str) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity or offset % ALIGNMENT:
            raise Corruption(
                f"{subject} at {offset} of {nbytes} bytes is not an aligned piece of the arena's {self.capacity} bytes"
            )


def _check_size(fd: int, path: str, capacity: int) -> None:
    size = os.fstat(fd).st_size
    if size < capacity or capacity < PAGE_BYTES:
        raise ProtocolError(f"the arena {path} has {size} bytes, but its server says {capacity}; it is another file")


def _pages_of(members: Sequence[BlockPlace]) -> tuple[int, int]:
    """The whole pages that these blocks touch."""
    first, end = members[0].offset, members[0].offset + members[0].nbytes
    for block in members[1:]:
        first, end = min(first, block.offset), max(end, block.offset + block.nbytes)
    start = first - first % PAGE_BYTES
    return start, align(max(end, start + 1), PAGE_BYTES) - start


class _MappedRange:
    """What one reply lends of one extent: pages of the arena-wide mapping if nobody else looks at the extent, else its own."""

    __slots__ = ("_address", "_extent", "_members", "_nbytes", "_on_release", "_pages", "_pins", "_start", "_unmap")

    def __init__(self, pages: _Pages, extent: int, members: Sequence[BlockPlace]) -> None:
        self._pages, self._extent, self._members = pages, extent, members
        self._start, self._nbytes = _pages_of(members)
        self._on_release: Release | None = None
        self._pins = Pins(block.block for block in members)
        self._unmap: Callable[[], object] | None = None
        self._address = pages.address + self._start
        if pages.viewed.setdefault(extent, self) is not self:
            self._address = map_private(pages.fd, self._start, self._nbytes)
            self._unmap = unmapping(self._address, self._nbytes)

    def lend(self, on_release: Release) -> dict[int, U8]:
        """The bytes of each block; when no view of them is left, the hold ends and their ids are told."""
        self._on_release = on_release
        memory, start = array_at(self._address, self._nbytes, self.end), self._start
        return {
            block.block: memory[block.offset - start : block.offset - start + block.nbytes] for block in self._members
        }

    def end(self) -> None:
        """Drop the private copies, then tell that the blocks are no longer viewed here. Done again, it does what was left."""
        if os.getpid() != self._pages.pid:
            return
        if self._unmap is not None:
            self._unmap()
        elif self._pages.viewed.get(self._extent) is self:
            drop_pages(self._address, self._nbytes, self._pages.fd, self._start)
            self._pages.viewed.pop(self._extent, None)
        if self._on_release is not None:
            self._on_release(self._pins)
