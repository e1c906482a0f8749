"""Files of a server: its runtime directory, the lock of its address, and the directory of its arena.

- The runtime directory belongs to one user (0700). It contains the socket, beside it a file that the server locks while
  it runs, and ``sessions/`` with a locked file for each client.
- The process that holds the lock of an address may replace its socket. A free lock belongs to a dead server: the next
  server that starts removes the files that it left.
- A server does not remove an arena to which a state directory refers (`durability.state_directory`), while that
  directory exists. If the state directory has lost its link, the arena stays until the next server of that state has
  read the journal.
- An arena is a file on shared memory, in a directory of its own with a lock of the same kind. Where shared memory is
  too small, it is a memfd, which leaves nothing behind.
- A server that stops removes everything it made, except the locked files of clients that are alive.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from transferqueue.errors import AddressInUse, UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.limits import ARENA_BYTES_DEFAULT, GIB, NOTE_BYTES_MAX
from transferqueue.storage.memory.arena import Arena, available_bytes
from transferqueue.transport import FileLock, IpcAddress, remove_unlocked
from transferqueue.transport.system.private_files import private_directory, write_private

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (a private directory is made in it)
SHARED_ENOUGH: Final = GIB
"""A server with the default ceiling puts the arena on shared memory, clipped to its size, if that has this much free;
else into a memfd."""


class RuntimeDirectory:
    """The runtime directory of one running server, with the lock of its address."""

    def __init__(self, address: IpcAddress) -> None:
        self.address: Final = address
        self.directory: Final = private_directory(address.path.parent)
        self.sessions: Final = self.directory / "sessions"
        self._lock = FileLock(address.lock_path, inherited=False)
        if not self._lock.take():
            raise AddressInUse(
                f"address {address} is in use: a live server listens there; connect to it, stop it, or choose another "
                "address"
            )
        _remove(address.path)
        _remove(address.note_path)
        remove_stale_files(self.directory)
        self.sessions.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Remove the socket, the files of dead clients, and last the lock. Closing twice is allowed."""
        if self._lock.held:
            _remove(self.address.path)
            remove_stale_files(self.directory)
            with suppress(OSError):  # clients that are alive have their files here
                self.sessions.rmdir()
            self._lock.release()


def remove_stale_files(directory: Path) -> None:
    """Remove the files of dead servers and dead clients from a runtime directory."""
    for path in directory.glob("*.sock.lock"):
        lock = FileLock(path, inherited=False)
        with suppress(OSError):  # not a file of this user
            if lock.take():
                _remove(path.with_suffix(""))  # under the lock: so it is not the socket of a new server
                lock.release()
    for path in (directory / "sessions").glob("*"):
        remove_unlocked(path)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def leave_note(address: IpcAddress, text: str) -> None:
    """Leave a text for clients that find no server at `address`, until the next server listens there."""
    with suppress(OSError, UsageError):  # the same disk may be full; connected clients were told already
        write_private(address.note_path, text.encode()[:NOTE_BYTES_MAX])


class ArenaDirectory:
    """An arena and, if it is a file, its directory. `stays`: the file outlives the server."""

    def __init__(
        self, arena: Arena, directory: Path | None = None, lock: FileLock | None = None, *, stays: bool = False
    ) -> None:
        self.arena: Final = arena
        self._directory = directory
        self._lock = lock
        self._stays = stays

    def close(self) -> None:
        """Unmap the arena and, unless it stays, remove its file. The system frees the pages when the last process
        unmaps them."""
        self.arena.close(unlink=not self._stays)
        if self._stays and self._lock is not None:
            self._lock.release(unlink=False)
        elif self._directory is not None and self._lock is not None:
            self._lock.release()
            for directory in (self._directory, self._directory.parent):
                with suppress(OSError):  # other servers' arenas
                    directory.rmdir()


def private_arena(arena_bytes: int | None) -> ArenaDirectory:
    """A new arena for an embedded server: a memfd."""
    capacity = arena_bytes or min(ARENA_BYTES_DEFAULT, available_bytes(None))
    return ArenaDirectory(Arena.create(None, capacity))


def served_arena(arena_bytes: int | None, shared: Path = SHARED_MEMORY) -> ArenaDirectory:
    """A new arena for a server: a file on shared memory if that has room, else a memfd.

    Args:
        arena_bytes: its ceiling; None: the default, clipped to the free room.
        shared: the file system of shared memory.
    """
    root = arena_root(shared)
    if root is None:
        return private_arena(arena_bytes)
    remove_stale_arenas(root)
    free = available_bytes(shared)
    wanted = arena_bytes or min(ARENA_BYTES_DEFAULT, max(free, SHARED_ENOUGH))
    if free < wanted:
        with suppress(OSError):
            root.rmdir()
        return private_arena(arena_bytes)
    directory, lock = claim_directory(root)
    with OnFailure(remove_arena, directory, lock):
        return ArenaDirectory(Arena.create(directory, wanted), directory, lock)


def remove_arena(directory: Path, lock: FileLock) -> None:
    """Remove the directory of an arena whose lock the caller holds."""
    shutil.rmtree(directory)
    lock.release()
    with suppress(OSError):  # other servers' arenas
        directory.parent.rmdir()


def remove_stale_arenas(root: Path, own: Path | None = None) -> None:
    """Remove the arenas of dead servers, except those to which a state directory refers.

    Args:
        root: the directory of this user's arenas.
        own: the state directory of the caller, which has read its journal. An arena of it is removed unless its link
            leads there.
    """
    for directory in _entries(root):
        if belongs_to_state(directory, own):
            continue
        lock = FileLock(directory / "lock", inherited=False)
        with suppress(OSError):  # removed meanwhile, or not a directory of this user
            if lock.take():
                shutil.rmtree(directory)
                lock.release()


def _entries(root: Path) -> list[Path]:
    """The entries of the directory of arenas; none if a server that stopped has just removed it."""
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []


def belongs_to_state(directory: Path, own: Path | None = None) -> bool:
    """Whether a state directory refers to the arena in `directory`, or may refer to it because its link is lost. `own`
    is as in `remove_stale_arenas`."""
    try:
        state = Path((directory / "state").read_text(encoding="utf-8"))
        link = state / "arena"
        if link.is_symlink():
            return link.readlink().parent == directory
        return state != own and (state / "about.json").exists()
    except (OSError, ValueError):
        return False


def arena_root(shared: Path) -> Path | None:
    """The directory of this user on shared memory; None if it cannot be made."""
    if not os.access(shared, os.W_OK | os.X_OK):
        return None
    try:
        return private_directory(shared / f"transferqueue-{os.geteuid()}")
    except UsageError:  # another user has taken the name
        return None


def claim_directory(root: Path) -> tuple[Path, FileLock]:
    """Make and lock a directory. If another server removes it as stale before that, make another."""
    while True:
        directory = private_directory(root) / secrets.token_hex(8)
        with suppress(FileNotFoundError):
            directory.mkdir(mode=0o700)
            lock = FileLock(directory / "lock", inherited=False)
            if lock.take():
                return directory, lock
