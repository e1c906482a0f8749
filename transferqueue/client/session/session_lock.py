"""The file by which the kernel vouches that a session may still see shared memory (docs/decisions/memory.md).

A client holds an flock on a file of its own for as long as it, or an array of its session, lives. The file lies in
``sessions/`` beside the server's socket, or, for a server reached over tcp, in this user's own runtime directory.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from transferqueue.errors import UsageError
from transferqueue.transport import FileLock, IpcAddress, TcpAddress, parse_address, runtime_directory
from transferqueue.transport.system.descriptors import check_descriptors

TRIES_MAX: Final = 100
"""A server that stops removes an empty ``sessions/``, perhaps just before the lock file is made; it does so once."""


class SessionLock:
    """A lock, held from construction until `release` or the end of this process and its forked children."""

    def __init__(self, directory: Path, name: str) -> None:
        self._made = _missing(directory / "sessions")
        self._lock = FileLock(directory / "sessions" / name)
        try:
            self._take()
        except OSError as error:
            self._remove_directories()
            check_descriptors("a session")
            raise UsageError(
                f"session file {self.path} cannot be made: {error.strerror}; a client needs to write in its server's "
                "runtime directory, so that its death can be seen (TRANSFERQUEUE_RUNTIME names another for tcp)"
            ) from error

    @property
    def path(self) -> Path:
        """The locked file."""
        return self._lock.path

    def release(self) -> None:
        """Unlock and remove the file. A second call does nothing."""
        self._lock.release()

    def give_up(self) -> None:
        """`release`, and remove the directories made for it: no server answered."""
        self.release()
        self._remove_directories()

    def _take(self) -> None:
        for _ in range(TRIES_MAX - 1):
            with suppress(
                FileNotFoundError, FileExistsError
            ):  # the second where it was there, and is gone when `mkdir` looks
                self._make_and_take()
                return
        self._make_and_take()

    def _make_and_take(self) -> None:
        for directory in (*_missing(self.path.parent.parent), self.path.parent):
            directory.mkdir(mode=0o700, exist_ok=True)
        self._lock.take()

    def _remove_directories(self) -> None:
        for directory in reversed(self._made):
            with suppress(OSError):  # others have put something in
                directory.rmdir()


def session_lock(address: str, name: str) -> SessionLock | None:
    """The lock of a session with the server at `address`; None for an embedded server, which ends with this process."""
    match parse_address(address):
        case IpcAddress(path=path):
            return SessionLock(path.parent, name)
        case TcpAddress():
            return SessionLock(runtime_directory(), name)
    return None


def _missing(directory: Path) -> list[Path]:
    """Directories that must be made for `directory` to exist, the outermost first."""
    return [parent for parent in (*reversed(directory.parents), directory) if not parent.exists()]
