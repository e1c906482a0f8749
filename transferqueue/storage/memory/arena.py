"""The shared memory of a shard, in the process that owns it.

1. An arena is one sparse file. It has its full length from the start, so a process maps it once. The arena of a served
   queue is a file (0600) in a private directory on shared memory. That of an embedded queue is a memfd, which vanishes
   with its process and does not count against `/dev/shm`; other processes of the same user open it through `/proc`.
2. An extent is granted only after the file system has allocated its pages (`ensure`). So a full file system raises
   `OutOfMemory` here, and never SIGBUS in a worker. The server's loop allocates pages ahead of use, a little at a time
   (`grow`).
3. Free pages are kept, up to a bound: they are fast to write. `trim` returns the longest unused free pages to the
   system until at most ``KEEP_RATIO x used + KEEP_BYTES`` have pages. It acts only above
   ``TRIM_RATIO x used + TRIM_BYTES``, so a steady flow of puts and frees never pays for fresh pages. With a Python
   process this keeps the promise of at most 1.3 x live payload + 150 MiB.
4. An arena may end with a *margin*: pages behind `capacity` that are never allocated. The owner stores data there that
   must share the file with the bytes (see `server.durability.journal_head`). Clients do not map it.
5. Pages that a device has registered stay: after `MADV_REMOVE` and a new write it would read the old pages for ever.
   So the owner's process sets `before_punch`, which gives the registration up or refuses. The owner holds `guard` over
   that call and the removal of the pages, so no thread registers between the two. Pages that other processes have
   registered and hold (`page_holds`) stay too.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from transferqueue.errors import Corruption, InternalError, OutOfMemory, UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import ARENA_SLICE_BYTES, MIB, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.intervals import Intervals
from transferqueue.storage.memory.page_holds import claim, let_go, unheld
from transferqueue.storage.memory.room import room

KEEP_RATIO: Final = 1.10
KEEP_BYTES: Final = 48 * MIB
TRIM_RATIO: Final = 1.20
TRIM_BYTES: Final = 80 * MIB

_FULL: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})
_CANNOT_PUNCH: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EACCES, errno.EPERM})


def available_bytes(directory: Path | None) -> int:
    """The most bytes that an arena in this directory (None: a memfd) could have now.

    For a directory: the free bytes of its file system. For a memfd: three quarters of the machine's memory, because
    only the out-of-memory killer bounds a memfd.
    """
    if directory is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 * 3
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def surplus(backed: int, used: int) -> int:
    """How many bytes to return to the system, in whole pages, if `backed` bytes have pages and `used` are allocated
    (rule 3)."""
    if backed <= TRIM_RATIO * used + TRIM_BYTES:
        return 0
    return align(backed - int(KEEP_RATIO * used) - KEEP_BYTES, PAGE_BYTES)


class Arena:
    """A file of `capacity` bytes that gets pages as it is used. One thread owns it; `backed_runs` may be called by any,
    with `guard` held.

    Other processes open it at `path` while this process lives. `margin` counts bytes behind `capacity`.
    """

    def __init__(self, fd: int, path: str, capacity: int, file: Path | None, margin: int = 0) -> None:
        self.path, self.capacity, self.margin = path, capacity, margin
        self._fd, self._file = fd, file
        self._map: mmap.mmap | None = mmap.mmap(fd, capacity + margin)
        self._backed = Intervals()
        self._can_punch = True
        self.guard: Final = threading.RLock()
        self.before_punch: Callable[[int, int], bool] = lambda _offset, _nbytes: True
        """Called with `guard` held, before pages are returned. False: keep them, since a registration uses them now."""
        self.held = False
        """Whether the last `trim` left free pages because a process holds them."""
        self._unreturned = Intervals()  # by `punch`, for that reason or because a process holds them

    @classmethod
    def create(cls, directory: Path | None, capacity: int, *, margin: int = 0) -> Arena:
        """A new, empty arena of at most `capacity` bytes (rounded up to pages).

        Takes address space, and pages for the margin only.

        Args:
            directory: an existing directory, preferably on shared memory; None: a memfd.
            capacity: the most bytes.
            margin: bytes in whole pages, zeros at first; default 0.

        Raises:
            UsageError: the capacity or directory is invalid.
            OutOfMemory: the file or its mapping cannot be made.
        """
        if capacity < 1:
            raise UsageError(f"an arena of {capacity} bytes is invalid; give a positive size such as '8GiB'")
        capacity = align(capacity, PAGE_BYTES)
        fd, path, file = _memfd() if directory is None else _file_in(directory)
        try:
            os.ftruncate(fd, capacity + margin)
            if margin:
                os.posix_fallocate(fd, capacity, margin)
            return cls(fd, path, capacity, file, margin)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            if file is not None:
                file.unlink(missing_ok=True)
            raise OutOfMemory(
                f"an arena of {capacity} bytes cannot be made: {error}; {room(directory or path)}; ask for less"
            ) from error

    @classmethod
    def attach(cls, file: Path, allocator: Allocator, *, margin: int = 0) -> Arena:
        """The arena that an earlier process left at `file`. Keeps the allocated extents, and returns all other pages
        that no process holds.

        `Corruption` if the file does not exist, or does not have the allocator's capacity plus this margin.
        """
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Corruption(f"arena {file} cannot be opened: {error.strerror}; its rows are lost with it") from error
        with OnFailure(os.close, fd):
            if (size := os.fstat(fd).st_size) != allocator.capacity + margin:
                raise Corruption(
                    f"arena {file} has {size} bytes, not {allocator.capacity + margin}; another file replaced it"
                )
            arena = cls(fd, str(file), allocator.capacity, file, margin)
        arena._keep_allocated(allocator)
        return arena

    def _keep_allocated(self, allocator: Allocator) -> None:
        end = 0
        for offset, nbytes in [*allocator.free_ranges(), (self.capacity, 0)]:
            if offset > end:
                self._backed.add(end, offset)
            end = offset + nbytes
            if nbytes and self._can_punch:
                self._keep_held(offset, end)

    def _keep_held(self, start: int, end: int) -> None:
        held = Intervals()
        held.add(start, end)
        for part in self._return_pages(start, end):
            held.remove(*part)
        for part in held.runs() if self._can_punch else ():
            self._backed.add(*part)

    def sync(self) -> None:
        """Block until all bytes that any process has written are on disk. `OutOfMemory` if that fails.

        For an arena in a file on a disk. On shared memory it does nothing useful.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise OutOfMemory(f"the arena at {self.path} cannot be written to its disk: {error.strerror}") from error

    def write_margin(self, offset: int, data: bytes) -> None:
        """Write `data` into the margin, from its byte `offset` on. Makes no system call."""
        if self._map is None or offset < 0 or offset + len(data) > self.margin:
            raise InternalError(f"bytes {offset} to {offset + len(data)} are not in an open margin of {self.margin}")
        start = self.capacity + offset
        self._map[start : start + len(data)] = data

    def sync_margin(self) -> None:
        """Block until the margin is on disk. `OutOfMemory` if that fails."""
        if self._map is None:
            raise InternalError("the arena is closed; its margin cannot be written to its disk")
        try:
            self._map.flush(self.capacity, self.margin)
        except OSError as error:
            raise OutOfMemory(f"the arena at {self.path} cannot be written to its disk: {error.strerror}") from error

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A read-only view of these bytes. Release it before `close`."""
        if self._map is None or offset < 0 or nbytes < 0 or offset + nbytes > self.capacity:
            raise InternalError(f"bytes {offset} to {offset + nbytes} are not in an open arena of {self.capacity}")
        return memoryview(self._map)[offset : offset + nbytes].toreadonly()

    @property
    def backed(self) -> int:
        """Bytes that have pages."""
        return self._backed.total

    def backed_runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``[start, end)`` that have pages, ascending. Hold `guard` for as long as they must keep them."""
        return self._backed.runs(start, end)

    def ensure(self, offset: int, nbytes: int) -> None:
        """Allocate pages for these bytes where they have none, so that writing them cannot fail.

        Blocks while the kernel works (about 0.3 ms for each MiB of missing pages). `OutOfMemory` if the file system is
        full; the pages that were there stay.
        """
        if offset < 0 or nbytes < 1 or offset + nbytes > self.capacity:
            raise OutOfMemory(
                f"bytes {offset} to {offset + nbytes} are beyond the arena's {self.capacity}; ask for less"
            )
        with self.guard:
            self._unreturned.remove(offset, align(offset + nbytes, PAGE_BYTES))
            for start, end in self._backed.gaps(offset, offset + nbytes):
                self._back(start, align(end, PAGE_BYTES))

    def grow(self, start: int, end: int) -> bool:
        """Allocate the next `ARENA_SLICE_BYTES` of missing pages in this range ahead of use. Returns whether more are
        missing.

        Blocks for less than 2 ms. Returns False if the file system is full; `ensure` reports that when the pages are
        needed.
        """
        end = min(end, self.capacity)
        for low, high in self._backed.gaps(start, end):
            reached = min(high, low + ARENA_SLICE_BYTES)
            return self._allocates(low, align(reached, PAGE_BYTES)) is None and reached < end
        return False

    def trim(self, allocator: Allocator) -> int:
        """Return pages of free extents to the system by rule 3. Returns the number of bytes.

        Cheap when nothing is due. Pages that a process holds stay, see `held`. Call it a moment after a free, not at
        once, so that a flow of puts finds warm pages.
        """
        self.held = False
        excess = surplus(self.backed, allocator.used)
        if not excess or not self._can_punch:
            return 0
        returned = 0
        for offset, nbytes in list(allocator.coldest()):
            if returned >= excess or not self._can_punch:
                break
            returned += self._punch(allocator, offset, min(nbytes, excess - returned))
        return returned

    def punch(self, offset: int, nbytes: int) -> None:
        """Return the pages of these unused bytes to the system, if the file system supports that. Pages with a
        registration in use are returned by `punch_again` or a later `punch`, unless `ensure` needs them before."""
        if self._can_punch:
            with self.guard:
                self._unreturned.add(offset, offset + nbytes)
                self.punch_again()

    def punch_again(self) -> None:
        """Return the pages that `punch` left, unless a registration uses them still. From any thread."""
        if not self._unreturned.total:
            return
        with self.guard:
            for run in self._unreturned.runs():
                for start, end in self._return_pages(*run):
                    self._unreturned.remove(start, end)
                    self._backed.remove(start, end)

    def close(self, unlink: bool = True) -> None:
        """Unmap and close the file. With `unlink`, also remove its name, so that its pages are freed with the last
        process that maps it.

        Mappings of other processes stay valid. A second call does nothing.
        """
        if self._map is None:
            return
        self._map.close()
        self._map = None
        os.close(self._fd)
        if unlink and self._file is not None:
            self._file.unlink(missing_ok=True)

    def _back(self, start: int, end: int) -> None:
        error = self._allocates(start, end)
        if error is not None:
            raise OutOfMemory(
                f"the arena at {self.path} cannot grow by {end - start} bytes ({error.strerror}): it has "
                f"{self.backed}; {room(self.path)}; free rows, enlarge the file system (for /dev/shm: mount -o "
                "remount,size=...), or lower arena_bytes"
            ) from error

    def _allocates(self, start: int, end: int) -> OSError | None:
        try:
            os.posix_fallocate(self._fd, start, end - start)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return error
        with self.guard:
            self._backed.add(start, end)
        return None

    def _punch(self, allocator: Allocator, offset: int, nbytes: int) -> int:
        with self.guard:
            parts = self._return_pages(offset, offset + nbytes)
            for start, end in parts:
                self._backed.remove(start, end)
        for start, end in parts:
            allocator.chill(start, end - start)
        returned = sum(end - start for start, end in parts)
        self.held = self.held or (self._can_punch and returned < nbytes)
        return returned

    def _return_pages(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the pages of these bytes that no process holds. Returns their ranges."""
        return [] if self._map is None else [part for part in unheld(self._fd, start, end) if self._remove(*part)]

    def _remove(self, start: int, end: int) -> bool:
        if self._map is None or not claim(self._fd, start, end):
            return False
        try:
            if not self.before_punch(start, end - start):
                return False
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)
        except OSError as error:
            if error.errno not in _CANNOT_PUNCH:
                raise
            self._can_punch = False  # a file system without holes: pages stay until the arena closes
        finally:
            let_go(self._fd, start, end)
        return self._can_punch


def _memfd() -> tuple[int, str, None]:
    fd = os.memfd_create("transferqueue-arena", os.MFD_CLOEXEC)
    return fd, f"/proc/{os.getpid()}/fd/{fd}", None


def _file_in(directory: Path) -> tuple[int, str, Path]:
    file = directory / f"arena-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(
            f"no arena can be made in {directory}: {error.strerror}; give a directory you may write"
        ) from error
    return fd, str(file), file
