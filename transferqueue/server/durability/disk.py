"""The disk of a state directory: which errors mean that it is full or fails, and a reserve for a full disk.

1. A disk that is full, over its quota, or gives errors damages nothing: all commits are whole. Such an error is
   `DiskFailed`, never `Corruption`. It may end the server, which goes on from its journal when the disk works again.
2. A server keeps a file of `DISK_RESERVE_BYTES` beside its journal (less for a small arena or disk). When a commit
   finds the disk full, the server gives the file up in slices and commits again.
3. From the first slice on the server is *short*: it refuses requests that add work, with `Full`, and carries out those
   that end work. Every `DISK_CHECK_S` it checks whether the disk has room for the reserve twice. Then it takes the
   reserve again, and is no longer short.
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
"""The name of the reserve in a state directory."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FAULTY: Final = frozenset({errno.EIO, errno.EROFS, errno.ESTALE})
_PRIMARY: Final = 0xFF
"""The bits of an SQLite error code that tell its kind."""
_FULL_CODES: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
"""SQLite reports a full quota, or a file that may not grow, as a failed write."""
_NO_DISK_CODES: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_NOMEM,
        sqlite3.SQLITE_IOERR_DATA,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    }
)
"""Of the kind "disk I/O error" although the disk works: a file is too short, memory is missing, or checksums differ."""


def disk_error(error: BaseException | None) -> OSError | sqlite3.Error | None:
    """The disk error that `error` is, or was raised from; None if no disk is involved."""
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
    """The error of a server whose disk failed.

    Args:
        subject: the operation that failed, such as ``journal FILE cannot be written``.
        directory: on that disk.
        cause: the disk's error.
    """
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
    """Turn errors of a disk into `DiskFailed`; other errors pass."""
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
    """The reserve in `directory` (rule 2), or as much of it as has room.

    `shortage` says why requests that add work are refused now ("": they are not). `due_at` is the time of the next
    `look`; None: no look is needed.

    Args:
        arena_bytes: of the rows that the journal describes.
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
        """Take the reserve, or as much as half of the free bytes hold. `DiskFailed` if even a slice has no room."""
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
        """Give up a slice, since the disk is full. Returns False if none is left."""
        if self._has <= 0:
            return False
        self._has = max(0, self._has - self._slice)
        os.ftruncate(self._fd, self._has)
        self._be_short()
        return True

    def look(self, now: float) -> None:
        """Take the whole reserve again if the disk has room for it twice."""
        if self._fits() and self._take(self._wanted):
            _log.warning(
                "the disk of the state directory %s has room again: the server accepts new rows", self._directory
            )
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
            f"the disk of this server's state is full: {room(self._directory)}, and new rows need {needed:,}. The "
            "server still carries out ack, release and drop. Free some space there, and put again: the server checks "
            "every second"
        )
        if began:
            self.due_at = 0.0
            _log.error("the server refuses new rows: %s", self.shortage)

    def _take(self, nbytes: int) -> bool:
        """Reserve `nbytes`. Returns False, and changes nothing, if the disk does not have them."""
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
