"""Holds on pages of an arena: while a process has one, the arena's owner does not return these pages to the system.

A device that has registered memory keeps the pages of that moment. If the owner returned them (``MADV_REMOVE``) and the
file got new ones, the device would read the old bytes for ever, and its writes would be lost. So a process that
registers pages takes a shared lock on their bytes of the arena's file, and the owner returns only pages on which it
gets an exclusive one.

The kernel keeps these locks (Linux, open file description locks). It releases them when their process dies, in any way.
They need no message, and a restarted server sees them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

from transferqueue.errors import OutOfMemory

_FLOCK: Final = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""
_TAKEN: Final = frozenset({errno.EAGAIN, errno.EACCES})
_NO_LOCKS: Final = frozenset({errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system without these locks: no process can hold pages there, and the owner returns them freely."""


def open_again(fd: int) -> int:
    """The file of `fd`, opened once more for reading and writing. Holds taken with the result are its own, and end when
    it is closed."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OutOfMemory(f"the arena cannot be opened again to hold pages of it: {error.strerror}") from error


def hold(fd: int, start: int, end: int) -> bool:
    """Hold the pages of ``[start, end)``. Returns False, and holds nothing, if their owner returns some of them now, or
    the file system has no locks."""
    return _locked(fd, fcntl.F_RDLCK, start, end) is True


def can_hold(fd: int) -> bool:
    """Whether this kernel and file system have such locks."""
    if _locked(fd, fcntl.F_RDLCK, 0, 1) is None:
        return False
    let_go(fd, 0, 1)
    return True


def let_go(fd: int, start: int, end: int) -> None:
    """End the holds of `fd` on these pages."""
    _locked(fd, fcntl.F_UNLCK, start, end)


def claim(fd: int, start: int, end: int) -> bool:
    """Keep other processes from holding these pages until `let_go`, for their owner, which is about to return them.
    Returns False if another process holds some."""
    return _locked(fd, fcntl.F_WRLCK, start, end) is not False


def unheld(fd: int, start: int, end: int) -> list[tuple[int, int]]:
    """The parts of ``[start, end)`` that no other process holds now, ascending. `fd` is the owner's."""
    parts: list[tuple[int, int]] = []
    left = [(start, end)]
    while left:
        low, high = left.pop()
        taken = _other(fd, low, high)
        if taken is None:
            parts.append((low, high))
        else:
            around = (low, min(taken[0], high)), (max(taken[1], low), high)
            left += [(first, other) for first, other in around if first < other]
    return sorted(parts)


def _other(fd: int, start: int, end: int) -> tuple[int, int] | None:
    """First and last byte (exclusive) of another process's hold in ``[start, end)``; None if there is none."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
    try:
        kind, _, first, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return None if kind == fcntl.F_UNLCK else (first, first + length if length else end)


def _locked(fd: int, kind: int, start: int, end: int) -> bool | None:
    """Whether the lock was taken; None: the file system has no locks. An empty range needs no lock: a length of 0 would
    mean all later bytes."""
    if start >= end:
        return True
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, end - start, 0))
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True
