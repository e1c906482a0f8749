"""The disk of a state directory: which errors are its own and no damage, and a reserve for the time when it is full.

The rules:

1. A disk that is full, over its quota, or gives errors when it is read or written damages nothing: what was committed
   is whole. Such an error is `DiskFailed`, never `Corruption`. It may end the server, which goes on from its journal
   when the disk does.
2. A server keeps a file of `DISK_RESERVE_BYTES` beside its journal (less for a small arena or disk). When a commit
   finds the disk full, the server gives the file up in slices and commits again.
3. From the first slice on the server is *short*: it refuses requests that add work, with `Full`, and carries out those
   that end work. It looks once in `DISK_CHECK_S` whether the reserve fits the disk twice. Then it takes the reserve
   again, and is not short any more.
4. When the reserve is used up, a commit that finds the disk full ends the server.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from transferqueue.errors import DiskFailed, TransferQueueError
from transferqueue.limits import DISK_CHECK_S, DISK_RESERVE_BYTES, DISK_RESERVE_SHARE, DISK_SLICES, MIB, PAGE_BYTES
from transferqueue.schema import align
from transferqueue.storage.memory.room import free_bytes, room

_log: Final = logging.getLogger("transferqueue.server")
RESERVE: Final = "reserve"
"""The file in a state directory."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FAULTY: Final = frozenset({errno.EIO, errno.EROFS, errno.ESTALE})
_PRIMARY: Final = 0xFF
"""Bits of an error code of SQLite that say its kind."""
_FULL_CODES: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
"""SQLite calls a full quota, or a file that may not grow, a failed write."""
_NO_DISK_CODES: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_NOMEM,
        sqlite3.SQLITE_IOERR_DATA,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    }
)
"""Of the kind "disk I/O error", though the disk worked: a file is too short, memory is missing, or checksums differ."""


def disk_error(error: BaseException | None) -> OSError | sqlite3.Error | None:
    """The error of a disk that `error` is, or was raised from; None if a disk has no part in it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL | _FAULTY:
            return error
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", 0)
            kind = code & _PRIMARY
            is_disk = kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) and code not in _NO_DISK_CODES
            return error if is_disk else None
        error = error.__cause__
    return None


def disk_failed(subject: str, directory: Path, cause: OSError | sqlite3.Error) -> DiskFailed:
    """The error of a server whose disk failed. subject: what could not be done, such as
    ``journal FILE cannot be written``."""
    is_full = getattr(cause, "errno", None) in _FULL or getattr(cause, "sqlite_errorcode", 0) in _FULL_CODES
    said = cause.strerror if isinstance(cause, OSError) else str(cause)
    state = f"its disk is full ({said})" if is_full else f"its disk gives errors ({said})"
    remedy = "free some space there" if is_full else "have the disk looked at (dmesg, mount)"
    return DiskFailed(
        f"{subject}: {state}; {room(directory)}. Nothing is damaged, and no answered request is lost: {remedy}, and "
        "start the server again, which one under --supervise does by itself",
        is_full=is_full,
    )


@contextmanager
def disk_failures(subject: str, directory: Path) -> Iterator[None]:
    """Turn whatever a disk is the cause of into `DiskFailed`; other errors pass."""
    try:
        yield
    except DiskFailed:
        raise
    except (TransferQueueError, OSError, sqlite3.Error) as error:
        cause = disk_error(error)
        if cause is None:
            raise
        raise disk_failed(subject, directory, cause) from error


class DiskReserve:
    """The reserve in `directory` (rule 2), or as much of it as has room. arena_bytes: of the rows that the journal is
    about.

    `shortage`: why requests that add work are refused now; "" if they are not. `due_at`: when to `look` next; None: at
    no time.
    """

    def __init__(self, directory: Path, arena_bytes: int) -> None:
        self._directory: Final = directory
        most = min(DISK_RESERVE_BYTES, max(arena_bytes // 4, MIB), free_bytes(directory)[1] // DISK_RESERVE_SHARE)
        self._slice: Final = align(max(most // DISK_SLICES, 1), PAGE_BYTES)
        self._wanted: Final = self._slice * DISK_SLICES
        self._fd = os.open(directory / RESERVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        status = os.fstat(self._fd)
        self._has = min(status.st_size, status.st_blocks * 512, self._wanted)
        self.shortage = ""
        self.due_at: float | None = None

    def begin(self) -> None:
        """Take the reserve, or what half of the free bytes hold of it. `DiskFailed` if not even a slice of it has
        room."""
        if self._fits() or self._has == self._wanted:
            self._take(self._wanted)
        if self._has != self._wanted:
            free = free_bytes(self._directory)[0]
            self._take(min(self._wanted, self._has + free // 2 // self._slice * self._slice))
            if not self._has:
                raise disk_failed(
                    f"state directory {self._directory} has no room for {2 * self._slice:,} bytes of changes",
                    self._directory,
                    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
                )
            self._be_short()

    def give_up(self) -> bool:
        """Give a slice up, since the disk is full. Returns False if nothing is left."""
        if self._has <= 0:
            return False
        self._has = max(0, self._has - self._slice)
        os.ftruncate(self._fd, self._has)
        self._be_short()
        return True

    def look(self, now: float) -> None:
        """Take the whole reserve again if the disk has room for it twice."""
        if self._fits() and self._take(self._wanted):
            _log.warning("the disk of the state directory %s has room again: new rows are taken again", self._directory)
            self.shortage, self.due_at = "", None
        else:
            self._be_short()
            self.due_at = now + DISK_CHECK_S

    def close(self) -> None:
        """Close the file; it stays, for the next server. Closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fits(self) -> bool:
        return free_bytes(self._directory)[0] >= 2 * self._wanted - self._has

    def _be_short(self) -> None:
        needed, began = 2 * self._wanted - self._has, not self.shortage
        self.shortage = (
            f"the disk of this server's state is full: {room(self._directory)}, and new rows need {needed:,}. What "
            "ends work (ack, release, drop) goes on. Free some space there, and put again: the server looks every "
            "second"
        )
        if began:
            self.due_at = 0.0
            _log.error("new rows are refused: %s", self.shortage)

    def _take(self, nbytes: int) -> bool:
        """Have `nbytes`. False if the disk does not give them; then as many as before."""
        if nbytes > self._has:
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, self._has)
                return False
        os.ftruncate(self._fd, nbytes)
        self._has = nbytes
        return True
