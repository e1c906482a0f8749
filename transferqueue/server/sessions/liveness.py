"""How the death of a client is seen: by the kernel, as far as it can tell, and never guessed from time.

The law (docs/decisions/0004):

- A *pidfd* wakes the server when the process is gone. Only for a process whose numbers we share.
- The *lock* says whether anybody can still see the arena through this session: the process, a child that
  it forked, or arrays that outlived its queue. Only a free lock lets memory be reused.
- A session with neither is judged by its silence, and is told of no arena: there is nothing it could see.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from transferqueue.errors import UsageError
from transferqueue.transport import LockProbe, remove_unlocked, this_host
from transferqueue.wire import messages as m


class ProcessHandle:
    """What the kernel can tell about one client. Owns both descriptors."""

    def __init__(self, pidfd: int, lock: LockProbe | None) -> None:
        self._pidfd = pidfd
        self._lock = lock

    @property
    def pidfd(self) -> int:
        """Readable once the process is gone; -1: its number means nothing here."""
        return self._pidfd

    @property
    def is_local(self) -> bool:
        """Whether the kernel can tell at all; else only silence does."""
        return self._pidfd >= 0 or self._lock is not None

    def may_see_memory(self) -> bool:
        """Whether somebody still holds the lock, and with it perhaps views of the arena."""
        return self._lock is not None and self._lock.is_locked()

    def forget_process(self) -> None:
        """Watch the process no more. The lock can still be asked."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def close(self, lock_directory: Path | None = None) -> None:
        """Watch nothing more. If the lock's file is in the directory `lock_directory` and nobody holds it, remove it."""
        self.forget_process()
        if self._lock is not None:
            self._lock.close()
            if self._lock.path.parent == lock_directory:
                remove_unlocked(self._lock.path)


def open_process(hello: m.Hello) -> ProcessHandle:
    """The evidence that a client offers. `UsageError` for a lock or process that its own machine cannot show."""
    shares_pids = hello.host == this_host()
    if shares_pids and hello.shard is not None and hello.shard.path:
        check_arena(hello.shard)
    lock = _lock_of(hello, must=shares_pids)
    try:
        pidfd = _pidfd_of(hello.pid) if shares_pids and hello.pid > 0 else -1
    except UsageError:
        if lock is not None:
            lock.close()
        raise
    return ProcessHandle(pidfd, lock)


def check_arena(offer: m.ShardOffer) -> None:
    """`UsageError` unless the arena that a shard of this host offers is there, of this user, as large as it says, and no larger
    than the file system (for a memfd: the machine's memory) that is to hold it."""
    subject = f"shard refused: its arena {offer.path[:200]!r}"
    try:
        found, system = os.stat(offer.path), os.statvfs(offer.path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{subject} cannot be looked at: {error}; offer one that the server can open, or no path"
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(f"{subject} is not a regular file of user {os.geteuid()}")
    if found.st_size != offer.capacity:
        raise UsageError(
            f"{subject} has {found.st_size:,} bytes, and {offer.capacity:,} are offered; offer what there is"
        )
    room = system.f_blocks * system.f_frsize or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if offer.capacity > room:
        raise UsageError(
            f"{subject} of {offer.capacity:,} bytes is larger than what holds it, {room:,}; start the shard with a smaller "
            "--arena-bytes"
        )


def reopen_process(hello: m.Hello) -> tuple[ProcessHandle | None, bool]:
    """The evidence of a client that an earlier life of this server knew, and whether the client lives, as far as is known.

    None: it is dead, and nobody sees memory through it. Evidence of the dead: a forked child has the lock, or views have.
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
    """The lock, if it is held; None if there is none, or it is of another machine."""
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
    except (ProcessLookupError, OverflowError) as error:  # no number of a process is beyond a C int
        raise UsageError(f"session refused: process {pid} does not exist; send the number of the client") from error
    except OSError:  # a kernel or a sandbox without pidfds: the lock and silence remain
        return -1
