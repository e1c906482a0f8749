"""How the server detects the death of a client: from the kernel where possible, and never from time while the kernel
can tell.

See docs/decisions/memory.md.

- A *pidfd* wakes the server when the process has ended. Only a process in the same pid namespace has one.
- A *lock* tells whether any process can still see the arena through this session: the client, a child that it forked,
  or arrays that outlived its queue. The server uses the memory again only when the lock is free.
- A session with neither is judged by its silence. It gets no path of an arena, so it can see no memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from transferqueue.errors import UsageError
from transferqueue.transport import LockProbe, remove_unlocked, this_host
from transferqueue.wire import messages as m


class ProcessHandle:
    """The pidfd and the lock of one client. Owns both descriptors."""

    def __init__(self, pidfd: int, lock: LockProbe | None) -> None:
        self._pidfd = pidfd
        self._lock = lock

    @property
    def pidfd(self) -> int:
        """Readable once the process has ended; -1: the process cannot be watched from here."""
        return self._pidfd

    @property
    def is_local(self) -> bool:
        """Whether there is a pidfd or a lock. Without either, only silence shows that the client is dead."""
        return self._pidfd >= 0 or self._lock is not None

    def may_see_memory(self) -> bool:
        """Whether a process still holds the lock, and so may have views of the arena."""
        return self._lock is not None and self._lock.is_locked()

    def forget_process(self) -> None:
        """Close the pidfd. The lock can still be checked."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def close(self, lock_directory: Path | None = None) -> None:
        """Close both. The lock's file is removed if it is in `lock_directory` and no process holds it."""
        self.forget_process()
        if self._lock is not None:
            self._lock.close()
            if self._lock.path.parent == lock_directory:
                remove_unlocked(self._lock.path)


def open_process(hello: m.Hello) -> ProcessHandle:
    """The process of a client that says Hello.

    Raises:
        UsageError: the client is on this host, and its lock or process does not exist.
        OSError: this process may open no more files.
    """
    shares_pids = hello.host == this_host()
    if shares_pids and hello.shard is not None and hello.shard.path:
        check_arena(hello.shard)
    lock = _lock_of(hello, must=shares_pids)
    try:
        pidfd = _pidfd_of(hello.pid) if shares_pids and hello.pid > 0 else -1
    except (UsageError, OSError):
        if lock is not None:
            lock.close()
        raise
    return ProcessHandle(pidfd, lock)


def check_arena(offer: m.ShardOffer) -> None:
    """Check the arena that a shard on this host offers.

    Raises:
        UsageError: it does not exist, belongs to another user, has another size than the offer says, or is larger than
            the file system (for a memfd: the machine's memory) that holds it.
    """
    subject = f"shard refused: its arena {offer.path[:200]!r}"
    try:
        file, system = os.stat(offer.path), os.statvfs(offer.path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{subject} cannot be opened: {error}; offer one that the server can open, or no path"
        ) from error
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid():
        raise UsageError(f"{subject} is not a regular file of user {os.geteuid()}")
    if file.st_size != offer.capacity:
        raise UsageError(
            f"{subject} has {file.st_size:,} bytes, but the offer says {offer.capacity:,}; offer its real size"
        )
    room = system.f_blocks * system.f_frsize or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if offer.capacity > room:
        raise UsageError(
            f"{subject} of {offer.capacity:,} bytes is larger than what holds it, {room:,}; start the shard with a "
            "smaller --arena-bytes"
        )


def reopen_process(hello: m.Hello) -> tuple[ProcessHandle | None, bool]:
    """The process of a client of an earlier run, and whether it is alive as far as the server can tell.

    None: the client is dead, and no process sees memory through it. A process and False: the client is dead, but a
    forked child or a view still holds its lock.
    """
    lock = _lock_of(hello, must=False)
    if hello.host != this_host():
        return ProcessHandle(-1, lock), True
    if hello.lock and lock is None:
        return None, False
    try:
        return ProcessHandle(_pidfd_of(hello.pid) if hello.pid > 0 else -1, lock), True
    except UsageError:  # no such process
        return (ProcessHandle(-1, lock) if lock is not None else None), False


def _lock_of(hello: m.Hello, *, must: bool) -> LockProbe | None:
    """The lock, if it is held. None if the client named none. If `must` is False, also None if it is missing or
    free."""
    if not hello.lock:
        return None
    try:
        return _held(hello.lock)
    except UsageError:
        if must:
            raise
        return None


def _held(path: str) -> LockProbe:
    try:
        probe = LockProbe(path)
    except FileNotFoundError:
        raise UsageError(f"session refused: lock file {path!r} does not exist; make it and lock it first") from None
    if not probe.is_locked():
        probe.close()
        raise UsageError(
            f"session refused: lock file {path!r} is not locked by any process; hold an flock on it for as long as "
            "arrays of this session live"
        )
    return probe


def _pidfd_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError) as error:  # OverflowError: the number exceeds a C int
        raise UsageError(f"session refused: process {pid} does not exist; send the number of the client") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return -1  # a kernel or a sandbox without pidfds: the lock and silence remain
