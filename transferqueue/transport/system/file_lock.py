"""Locks on files that tell whether a process lives: evidence from the kernel, never from a timer.

The law:

- A process holds an `flock` on a file of its own. The kernel drops it when the last descriptor of that
  opening is closed: at exit, at SIGKILL, never at SIGSTOP. A forked child keeps it, rightly for a session
  (the child has the parent's views too) and wrongly for a server's address (`inherited=False` closes it).
- A file may be unlinked by its holder, or by a server that found it unlocked. So whoever has locked a
  file looks whether the name still leads to it, and else begins again; two processes that both followed
  this never both hold one name.
"""

from __future__ import annotations

import fcntl
import os
import stat
import weakref
from pathlib import Path

from transferqueue.errors import UsageError


class FileLock:
    """A lock on the file `path`, created 0600 if missing, held from `take` until `release` or death.

    inherited: whether a forked child goes on holding it.
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
        """Lock the file without waiting; False if another holds it. `OSError` if it cannot be opened."""
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
        """Give the lock up and, unless told not to, remove the file. Releasing twice is allowed.

        In a forked child it only lets go of the child's hold: the file is its parent's.
        """
        if not self.held:
            return
        if unlink and self._taker == os.getpid() and _leads_to(self.path, self._fd):
            self.path.unlink()
        self._abandon()

    def _abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LockProbe:
    """Watches the lock of a file that another process holds. Keeps the file open, so that the answer stays
    true when the name is removed or given to another file.

    `FileNotFoundError` if there is none. `UsageError` for a path that is no regular file of this user: a
    peer may have named it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._fd = _open_to_probe(self.path)

    def is_locked(self) -> bool:
        """Whether some process holds the lock now. A lock that the file system cannot be asked about counts as held: whoever has
        it may still see memory."""
        try:
            if not _flock(self._fd, fcntl.LOCK_SH):
                return True
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Watch no more. Closing twice is allowed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_locked(path: Path | str) -> bool:
    """Whether some process holds the lock of `path` now. False if there is no such file, else see `LockProbe`."""
    try:
        probe = LockProbe(path)
    except FileNotFoundError:
        return False
    try:
        return probe.is_locked()
    finally:
        probe.close()


def remove_unlocked(path: Path | str) -> bool:
    """Remove a lock file whose holder has died; whether it was removed. Anything else is left alone."""
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
        _check_kind(path, path.lstat())  # a device is not even opened: that alone may start something
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, UsageError):
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"lock file {str(path)[:200]!r} cannot be opened: {error}") from error
    try:
        _check_kind(path, os.fstat(fd))
        _flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        os.close(fd)
        raise UsageError(f"lock file {str(path)[:200]!r} is where no locks can be asked for: {error}") from error
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
