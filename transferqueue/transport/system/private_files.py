"""Files (0600) and directories (0700) of one user, whatever the umask is. A file is written whole or not at all, others
by `write_durably` too."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from transferqueue.errors import UsageError

TRIES_MAX: Final = 100
"""A directory is made again this often if another process removes it, empty, before its status is read."""


def make_directories(path: Path) -> None:
    """Make a directory and its missing parents, each 0700. Directories that exist stay as they are.

    Not ``mkdir(parents=True)``: that gives the mode only to the last directory, and a user who may write to a parent
    can replace its entries.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)  # another process may make it at the same time


def private_directory(path: Path, called: str = "runtime directory") -> Path:
    """Make `path` (0700) if it is missing, and return it. `UsageError` if it is not a directory of this user alone.
    Messages name the directory as `called`."""
    try:
        status = _made(path)
    except OSError as error:
        raise UsageError(f"{called} {path} cannot be made: {error.strerror}; name another") from error
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{called} {path} belongs to user {status.st_uid}, not to {os.geteuid()}; name a directory of your own "
            "(TRANSFERQUEUE_RUNTIME, the address, or --keys names it)"
        )
    if status.st_mode & 0o077:
        raise UsageError(
            f"{called} {path} has mode {status.st_mode & 0o777:o}: other users could open the queue; "
            f"chmod 700 {path}, or name a directory of your own"
        )
    return path


def _made(path: Path) -> os.stat_result:
    """Make the directory if it is missing, and return its status. A process that stops may remove it in between while
    it is empty."""
    for _ in range(TRIES_MAX - 1):
        with suppress(
            FileNotFoundError, FileExistsError
        ):  # the second if it existed, and was removed before `mkdir` looked
            make_directories(path)
            return path.stat(follow_symlinks=False)
    make_directories(path)
    return path.stat(follow_symlinks=False)


def read_private(path: Path, bytes_max: int) -> bytes:
    """The content of a regular file of this user with mode 0600. `FileNotFoundError` if it does not exist, else
    `UsageError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"file {path} cannot be read: {error.strerror}; name another") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UsageError(
                f"file {path} has mode {status.st_mode & 0o777:o} and user {status.st_uid}: a secret must be a regular "
                f"file of user {os.geteuid()} alone; chmod 600 {path}"
            )
        if status.st_size > bytes_max:
            raise UsageError(f"file {path} has {status.st_size:,} bytes; at most {bytes_max:,} are allowed")
        return file.read(bytes_max)


def write_private(path: Path, data: bytes) -> None:
    """`write_durably` with mode 0600, also by several processes at once."""
    _write(path, data, path.with_name(f".{path.name}.{secrets.token_hex(8)}"), 0o600)


def write_durably(path: Path, data: bytes) -> None:
    """Make or replace the file, which only one process may do at a time. At any instant, also after a crash, it has
    either its old content or all of the new, and when this returns, the new."""
    new = path.with_name(f".{path.name}.partial")
    new.unlink(missing_ok=True)  # of a process that was killed in between
    _write(path, data, new, 0o666)


def _write(path: Path, data: bytes, new: Path, mode: int) -> None:
    """Write the missing file `new`, and give it the name `path`."""
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        new.replace(path)
    finally:
        with suppress(FileNotFoundError):  # it has its place
            new.unlink()
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Block until the bytes of this file, or the names in this directory, are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
