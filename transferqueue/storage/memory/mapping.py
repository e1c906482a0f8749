"""The shared memory of a shard, in a process that uses it.

Invariants:

1. A process maps the arena twice: once to write into granted extents (``MAP_SHARED``) and once to view rows
   (``MAP_PRIVATE``). Changes that a user makes in a view are invisible to other processes and to other batches of this
   process.
2. A *mapped range* is the part of one extent that one reply names. The server keeps its blocks pinned until
   `on_release` gets their ids. That happens exactly once, after the last array, tensor, Arrow buffer or memoryview over
   them was collected here.
3. Before that call, the private copies of its pages are dropped (``MADV_DONTNEED``). So the next view of the extent,
   even after the extent was reused, shows the file and never a stale copy. Only whole pages can be dropped, and blocks
   of small puts share pages; therefore pages are dropped by extent.
4. At most one mapped range at a time uses the arena-wide mapping for an extent. A second range of the same extent gets
   its own mapping, and ends by unmapping it. Otherwise a page that one batch changed in place could show the next batch
   old bytes of a neighbour that was put since.
5. Finalizers run in any thread, also inside a garbage collection in this module's own code. They take no lock: claiming
   an extent is one atomic ``dict.setdefault``, ending the claim one ``dict.pop``.
6. A forked child owns no pins: its finalizers release nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from transferqueue.errors import Corruption, Disconnected, Forked, OutOfMemory, ProtocolError
from transferqueue.limits import ALIGNMENT, PAGE_BYTES
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.private_pages import (
    array_at,
    drop_pages,
    end_of_views,
    map_private,
    unmap,
    unmap_once,
)


class BlockPlace(Protocol):
    """The location of a block in an arena, as a reply gives it."""

    @property
    def block(self) -> int:
        """Id of the block."""

    @property
    def extent(self) -> int:
        """Id of the extent that contains the block."""

    @property
    def offset(self) -> int:
        """First byte in the arena."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""


class Pins(list[int]):
    """Block ids whose pins are to be released. The sender empties the list, so that passing it twice does no harm.

    `copied`: few bytes, which were copied, so the release may wait for the next message. `total`: the number of ids at
    first. `counted`: whether the owner of the mapping has subtracted them from its count of pins.
    """

    __slots__ = ("copied", "counted", "total")

    def __init__(self, blocks: Iterable[int], *, copied: bool = False) -> None:
        super().__init__(blocks)
        self.copied = copied
        self.total = len(self)
        self.counted = False


Release = Callable[[Pins], object]
"""Takes the ids of blocks whose pins are to be released. Called from any thread; must not block, take locks or
raise."""


class _Pages:
    """The arena-wide private mapping and its file. Unmapped after the last mapped range was collected."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd, self.capacity, self.pid = fd, capacity, os.getpid()
        self.address = map_private(fd, 0, capacity)
        self.viewed: dict[int, _MappedRange] = {}
        """The range that uses this mapping for an extent, by extent."""
        weakref.finalize(self, _discard, fd, self.address, capacity, self.pid).atexit = False


def _discard(fd: int, address: int, capacity: int, pid: int) -> None:
    if os.getpid() == pid:
        unmap(address, capacity)
        os.close(fd)


class Mapping:
    """One arena, mapped into this process. Safe from any thread. Views stay valid after `close`, until they are
    collected."""

    def __init__(self, fd: int, path: str, capacity: int, on_release: Release) -> None:
        self.path, self.capacity = path, capacity
        self._on_release = on_release
        self._shared: mmap.mmap | None = mmap.mmap(fd, capacity)
        self._pages: _Pages | None = _Pages(fd, capacity)
        _mappings[id(self)] = self

    @classmethod
    def open(cls, path: str, capacity: int, on_release: Release) -> Mapping:
        """Map the arena at `path`, as the server's `Welcome` names it.

        Args:
            path: of its file.
            capacity: its bytes.
            on_release: see `Release`.

        Raises:
            Disconnected: the file cannot be opened.
            ProtocolError: it has fewer than `capacity` bytes.
            OutOfMemory: this process may not map that much.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise OutOfMemory(
                    f"the arena {path} cannot be opened: {error.strerror}; raise the limit of this process (ulimit "
                    "-n), or close queues that are not used"
                ) from error
            raise Disconnected(
                f"the arena {path} cannot be opened ({error.strerror}): its server is gone, belongs to another user, "
                "or runs on another machine"
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
        """A writable view of these bytes, which other processes see. They must be inside an extent granted to this
        session."""
        pages, shared = self._pages, self._shared
        if pages is None or shared is None or os.getpid() != pages.pid:
            self._open_pages()  # raises, unless another thread closes the arena now
            return self._written(offset, nbytes)
        self._check(offset, nbytes, "a grant")
        return memoryview(shared)[offset : offset + nbytes]

    def _written(self, offset: int, nbytes: int) -> memoryview:
        if self._shared is None:
            raise Disconnected(f"the arena {self.path} was closed in this process; connect again")
        return memoryview(self._shared)[offset : offset + nbytes]

    def pin(self, blocks: Iterable[BlockPlace]) -> dict[int, U8]:
        """The bytes of the blocks that one reply names, by block id: each ``uint8 [nbytes]``, writable, with changes
        private.

        `on_release` gets each id exactly once, after the last view of the blocks of its extent from this call was
        collected. Keep the arrays, or anything made from them, as long as the bytes are needed. Copies and reads no
        bytes. `Corruption` if a block is outside the arena, `OutOfMemory` if nothing more can be mapped. After an error
        `on_release` gets nothing, and the caller still owns the pins.
        """
        pages = self._open_pages()
        members: dict[int, dict[int, BlockPlace]] = {}
        for block in blocks:
            self._check(block.offset, block.nbytes, f"block {block.block}")
            members.setdefault(block.extent, {})[block.block] = block
        ranges: list[_MappedRange] = []
        try:
            for extent, blocks_by_id in members.items():
                ranges.append(_MappedRange(pages, extent, list(blocks_by_id.values())))
        except OutOfMemory:
            for mapped in ranges:
                mapped.end()
            raise
        return {block: memory for mapped in ranges for block, memory in mapped.arrays(self._on_release).items()}

    def copies(self, blocks: Iterable[BlockPlace]) -> dict[int, U8]:
        """Copies of the blocks' bytes, by block id: each ``uint8 [nbytes]``. Nothing is mapped and `on_release` gets
        nothing, so the caller may return the pins now. For small blocks this is less work than `pin`. Errors as in
        `pin`."""
        self._open_pages()
        memory: dict[int, U8] = {}
        for block in blocks:
            self._check(block.offset, block.nbytes, f"block {block.block}")
            memory[block.block] = np.array(self._written(block.offset, block.nbytes))
        return memory

    def close(self) -> None:
        """Close the arena. This object can then neither write nor pin; existing views stay valid."""
        self._shared = None
        self._pages = None

    def _open_pages(self) -> _Pages:
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
    """First byte and size of the whole pages that these blocks touch."""
    first, end = members[0].offset, members[0].offset + members[0].nbytes
    for block in members[1:]:
        first, end = min(first, block.offset), max(end, block.offset + block.nbytes)
    start = first - first % PAGE_BYTES
    return start, -(-max(end, start + 1) // PAGE_BYTES) * PAGE_BYTES - start


class _MappedRange:
    """The part of one extent that one reply names: in the arena-wide mapping if no other range uses the extent, else in
    its own."""

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
            self._unmap = unmap_once(self._address, self._nbytes)

    def arrays(self, on_release: Release) -> dict[int, U8]:
        """The bytes of each block, by id. When no view of them is left, `on_release` gets the ids."""
        self._on_release = on_release
        memory, start = array_at(self._address, self._nbytes, self.end), self._start
        return {
            block.block: memory[block.offset - start : block.offset - start + block.nbytes] for block in self._members
        }

    def end(self) -> None:
        """Drop the private copies, then release the pins. A repeated call completes an interrupted one."""
        if os.getpid() != self._pages.pid:
            return
        if self._unmap is not None:
            self._unmap()
        elif self._pages.viewed.get(self._extent) is self:
            drop_pages(self._address, self._nbytes, self._pages.fd, self._start)
            self._pages.viewed.pop(self._extent, None)
        if self._on_release is not None:
            self._on_release(self._pins)


_mappings: Final[weakref.WeakValueDictionary[int, Mapping]] = weakref.WeakValueDictionary()
"""The arenas that this process has mapped, for `granted_place`. Each adds itself; a reader copies the references in one
step (`valuerefs`), since a lock could be held by another thread at a fork."""


class ArenaPlace(NamedTuple):
    """A place in an arena. `arena`: its file and capacity; alive as long as any view of it."""

    arena: _Pages
    offset: int


def pinned_place(memory: np.ndarray[Any, Any]) -> ArenaPlace | None:
    """The place of this array, if it is a view of pinned blocks: while it lives they stay. None for other memory, such
    as a copy."""
    mapped = getattr(end_of_views(memory), "__self__", None)
    if not isinstance(mapped, _MappedRange):
        return None
    return ArenaPlace(mapped._pages, memory.__array_interface__["data"][0] - mapped._address + mapped._start)


def granted_place(memory: U8) -> ArenaPlace | None:
    """The place of the bytes, if `Mapping.writable` made them. None for other memory."""
    address = memory.__array_interface__["data"][0]
    for mapping in filter(None, (reference() for reference in _mappings.valuerefs())):
        shared, pages = mapping._shared, mapping._pages
        if shared is not None and pages is not None:
            offset = address - np.frombuffer(shared, np.uint8).__array_interface__["data"][0]
            if offset >= 0 and offset + memory.nbytes <= pages.capacity:
                return ArenaPlace(pages, offset)
    return None
