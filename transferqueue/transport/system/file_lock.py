"""File locks that show whether a process lives. The kernel decides this, not a timer.

- A process holds an `flock` on its own file. The kernel releases it when the last descriptor of that opening is closed:
  at exit, at SIGKILL, never at SIGSTOP. A forked child keeps the lock. That is right for a session (the child has the
  parent's views too) and wrong for a server's address (`inherited=False` closes the descriptor in the child).
- The holder may unlink the file, and so may a server that finds it unlocked. So after a process has locked a file, it
  checks that the name still leads to that file, and starts again if not. Thus two processes never hold the same name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from pathlib import Path

from transferqueue.errors import UsageError


class FileLock:
    """A lock on the file `path`, which is created (0600) if missing. Held from `take` until `release` or the process's
    death.

    Args:
        path: of the file.
        inherited: whether a forked child keeps the lock.
    """

    def __init__(self, path: Path | str, *, inherited: bool = True) -> None:
        self.path = Path(path)
        self._fd = -1
        self._taker = 0
        if not inherited:
            _not_inherited.add(self)

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd >= 0

    def take(self) -> bool:
        """Lock the file without blocking. Returns False if another process holds the lock. `OSError` if the file cannot
        be opened."""
        while not self.held:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if not _flock(fd, fcntl.LOCK_EX):
                os.close(fd)
                return False
            if _leads_to(self.path, fd):
                self._fd, self._taker = fd, os.getpid()
            else:
                os.close(fd)
        return True

    def release(self, *, unlink: bool = True) -> None:
        """Release the lock, and with `unlink` remove the file. A second call does nothing.

        In a forked child this only closes the child's descriptor: the file belongs to the parent.
        """
        if not self.held:
            return
        if unlink and self._taker == os.getpid() and _leads_to(self.path, self._fd):
            self.path.unlink(missing_ok=True)  # another process may have cleared the directory
        self._abandon()

    def _abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LockProbe:
    """Shows whether another process holds the lock of a file. Keeps the file open, so the answer stays true if the name
    is removed or reused.

    `FileNotFoundError` if there is no such file. `UsageError` if it is not a regular file of this user: the path may
    come from a peer.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._fd = _open_to_probe(self.path)

    def is_locked(self) -> bool:
        """Whether a process holds the lock now. If the file system cannot tell, the lock counts as held: its holder may
        still map memory."""
        try:
            if not _flock(self._fd, fcntl.LOCK_SH):
                return True
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_locked(path: Path | str) -> bool:
    """Whether a process holds the lock of `path` now. False if the file does not exist. Errors as in `LockProbe`."""
    try:
        probe = LockProbe(path)
    except FileNotFoundError:
        return False
    try:
        return probe.is_locked()
    finally:
        probe.close()


def remove_unlocked(path: Path | str) -> bool:
    """Remove a lock file whose holder has died, and return whether it was removed. Other files are left alone."""
    lock = FileLock(path, inherited=False)
    try:
        if is_locked(path) or not lock.take():
            return False
    except (OSError, UsageError):
        return False
    lock.release()
    return True


def _open_to_probe(path: Path) -> int:
    try:
        _check_kind(path, path.lstat())  # a device is not opened at all: opening it may have effects
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, UsageError):
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # this process lacks a resource
        raise UsageError(f"lock file {str(path)[:200]!r} cannot be opened: {error}") from error
    try:
        _check_kind(path, os.fstat(fd))
        _flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        os.close(fd)
        raise UsageError(f"lock file {str(path)[:200]!r} is on a file system without locks: {error}") from error
    except UsageError:
        os.close(fd)
        raise
    return fd


def _check_kind(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(f"lock file {str(path)[:200]!r} is not a regular file of user {os.geteuid()}")


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


_not_inherited: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_not_inherited):
        lock._abandon()


os.register_at_fork(after_in_child=_let_go_in_child)
