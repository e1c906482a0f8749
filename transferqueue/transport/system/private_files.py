"""Files and directories that belong to one user: 0700 and 0600 whatever the umask says, written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from transferqueue.directories import make_directories
from transferqueue.errors import UsageError


def private_directory(path: Path, called: str = "runtime directory") -> Path:
    """Make `path` (0700) if it is missing. `UsageError` if it is, or was, open to other users. called: in messages."""
    try:
        make_directories(path)
        found = path.stat(follow_symlinks=False)
    except OSError as error:
        raise UsageError(f"{called} {path} cannot be made: {error.strerror}; name another") from error
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"{called} {path} belongs to user {found.st_uid}, not to {os.geteuid()}; name a directory of your own "
            "(TRANSFERQUEUE_RUNTIME, the address, or --keys names it)"
        )
    if found.st_mode & 0o077:
        raise UsageError(
            f"{called} {path} has mode {found.st_mode & 0o777:o}: other users could open the queue; "
            f"chmod 700 {path}, or name a directory of your own"
        )
    return path


def read_private(path: Path, bytes_max: int) -> bytes:
    """The bytes of a regular file that is this user's and 0600. `FileNotFoundError`, else `UsageError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"file {path} cannot be read: {error.strerror}; name another") from error
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UsageError(
                f"file {path} has mode {found.st_mode & 0o777:o} and user {found.st_uid}: a secret must be a regular "
                f"file of user {os.geteuid()} alone; chmod 600 {path}"
            )
        if found.st_size > bytes_max:
            raise UsageError(f"file {path} has {found.st_size:,} bytes; at most {bytes_max:,} are read")
        return file.read(bytes_max)


def write_private(path: Path, data: bytes) -> None:
    """Make or replace the file (0600), so that at any instant it is the old one or the new one, also after a crash."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        made.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            made.unlink()
        raise
    settle(path.parent)


def settle(directory: Path) -> None:
    """The names in this directory are on the device when this returns."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
