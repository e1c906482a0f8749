"""Files of a server: its runtime directory, the lock of its address, and where its arena lies.

The law:

- The runtime directory belongs to this user alone (0700). It holds the socket, next to it the file that
  the server locks while it lives, and ``sessions/`` with a locked file for each client.
- Whoever holds the lock of an address may replace its socket. A lock that is free belongs to a dead server,
  whatever files it left: they are removed by the next one that starts.
- What a state directory names (see `durable`) is removed by no sweep, as long as that directory is there. One that has lost
  its link keeps its arena until its own next server has read the journal.
- An arena of a server is a file in a directory of its own on shared memory, with a lock of the same kind;
  where shared memory is too small it is a memfd, which leaves nothing behind.
- A server that stops removes all it made, except the locked files of clients that still live: those are
  theirs.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from transferqueue.errors import AddressInUse, UsageError
from transferqueue.limits import ARENA_BYTES_DEFAULT, GIB
from transferqueue.storage.memory.arena import Arena, room
from transferqueue.transport import FileLock, IpcAddress, remove_unlocked
from transferqueue.transport.system.private_files import private_directory

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (a private directory is made in it)
SHARED_ENOUGH: Final = GIB
"""With the default ceiling, shared memory that has this much free is used, clipped; with less, a memfd is."""


class RuntimeDirectory:
    """The runtime directory of one running server, with the lock of its address."""

    def __init__(self, place: IpcAddress) -> None:
        self.place: Final = place
        self.directory: Final = private_directory(place.path.parent)
        self.sessions: Final = self.directory / "sessions"
        self._lock = FileLock(place.lock_path, inherited=False)
        if not self._lock.take():
            raise AddressInUse(
                f"address {place} is in use: a server that lives listens there; connect to it, stop it, or take another address"
            )
        _remove(place.path)
        sweep(self.directory)
        self.sessions.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Remove the socket, what dead clients left, and last the lock. Closing twice is allowed."""
        if self._lock.held:
            _remove(self.place.path)
            sweep(self.directory)
            with suppress(OSError):  # clients that live still have their files here
                self.sessions.rmdir()
            self._lock.release()


def sweep(directory: Path) -> None:
    """Remove what dead servers and dead clients left in a runtime directory."""
    for path in directory.glob("*.sock.lock"):
        lock = FileLock(path, inherited=False)
        with suppress(OSError):  # no file of ours
            if lock.take():
                _remove(path.with_suffix(""))  # under the lock, so that it cannot be a new server's
                lock.release()
    for path in (directory / "sessions").glob("*"):
        remove_unlocked(path)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


class ArenaDirectory:
    """An arena and, if it is a file, the directory made for it. stays: it outlives the server."""

    def __init__(
        self, arena: Arena, directory: Path | None = None, lock: FileLock | None = None, *, stays: bool = False
    ) -> None:
        self.arena: Final = arena
        self._directory = directory
        self._lock = lock
        self._stays = stays

    def close(self) -> None:
        """Unmap the arena and, unless it stays, remove its file: its pages go with the last process that maps it."""
        self.arena.close(unlink=not self._stays)
        if self._stays and self._lock is not None:
            self._lock.release(unlink=False)
        elif self._directory is not None and self._lock is not None:
            self._lock.release()
            for directory in (self._directory, self._directory.parent):
                with suppress(OSError):  # other servers' arenas
                    directory.rmdir()


def private_arena(arena_bytes: int | None) -> ArenaDirectory:
    """The arena of an embedded server: a memfd."""
    capacity = arena_bytes or min(ARENA_BYTES_DEFAULT, room(None))
    return ArenaDirectory(Arena.create(None, capacity))


def served_arena(arena_bytes: int | None, shared: Path = SHARED_MEMORY) -> ArenaDirectory:
    """The arena of a served node: a file on shared memory if there is room for it, else a memfd.

    arena_bytes: its ceiling; None: the default, clipped to what there is.
    """
    root = arena_root(shared)
    if root is None:
        return private_arena(arena_bytes)
    sweep_arenas(root)
    free = room(root)
    wanted = arena_bytes or min(ARENA_BYTES_DEFAULT, max(free, SHARED_ENOUGH))
    if free < wanted:
        with suppress(OSError):
            root.rmdir()
        return private_arena(arena_bytes)
    directory, lock = claim(root)
    try:
        return ArenaDirectory(Arena.create(directory, wanted), directory, lock)
    except BaseException:
        remove_arena(directory, lock)
        raise


def remove_arena(directory: Path, lock: FileLock) -> None:
    """Remove the directory of an arena whose lock is held here."""
    shutil.rmtree(directory)
    lock.release()
    with suppress(OSError):  # other servers' arenas
        directory.parent.rmdir()


def sweep_arenas(root: Path, own: Path | None = None) -> None:
    """Remove the arenas of servers that have died, except those that a state directory names. own: the state directory of
    the caller, who has read it: what its link does not lead to is not needed."""
    for directory in root.iterdir():
        if is_named(directory, own):
            continue
        lock = FileLock(directory / "lock", inherited=False)
        with suppress(OSError):  # gone meanwhile, or no directory of ours
            if lock.take():
                shutil.rmtree(directory)
                lock.release()


def is_named(directory: Path, own: Path | None = None) -> bool:
    """Whether the arena in this directory belongs to a state directory that says so too, or that has lost its link: that one
    will attach it."""
    try:
        state = Path((directory / "state").read_text(encoding="utf-8"))
        link = state / "arena"
        if link.is_symlink():
            return link.readlink().parent == directory
        return state != own and (state / "about.json").exists()
    except (OSError, ValueError):
        return False


def arena_root(shared: Path) -> Path | None:
    """A directory of this user on shared memory; None where there is none to be had."""
    if not os.access(shared, os.W_OK | os.X_OK):
        return None
    try:
        return private_directory(shared / f"transferqueue-{os.geteuid()}")
    except UsageError:  # another user took the name: a memfd needs none
        return None


def claim(root: Path) -> tuple[Path, FileLock]:
    """A new directory, locked. One that a sweeping server took for abandoned before it was locked is left."""
    while True:
        directory = private_directory(root) / secrets.token_hex(8)
        with suppress(FileNotFoundError):
            directory.mkdir(mode=0o700)
            lock = FileLock(directory / "lock", inherited=False)
            if lock.take():
                return directory, lock
