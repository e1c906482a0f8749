"""A private directory as an object store: for more rows than fit in memory, on a fast disk.

An object is a file with its key as name. Files are not synced to the device, because they end with their shard, as
memory does.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from transferqueue.errors import NotFound, OutOfMemory, Unreachable, UsageError
from transferqueue.storage.memory.room import room
from transferqueue.transport.system.private_files import private_directory

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_KEY: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")


class DirectoryStore:
    """The store at ``file:///path``. Makes the directory if it is missing. `UsageError` if other users can open it."""

    def __init__(self, address: str, host: str = "") -> None:
        url = urlsplit(address)
        if url.scheme != "file" or url.netloc or not url.path.startswith("/") or url.query or url.fragment:
            raise UsageError(f"store {address!r} is no directory; give file:///absolute/path")
        self._path: Final = private_directory(Path(unquote(url.path)), "directory of a store")

    def put(self, key: str, content: memoryview) -> None:
        """See `ObjectStore`."""
        file = self._file(key)
        try:
            file.write_bytes(content)
        except OSError as error:
            file.unlink(missing_ok=True)
            if error.errno in _FULL:
                raise OutOfMemory(
                    f"{self._path} has no room for {content.nbytes} bytes ({error.strerror}): {room(self._path)}; "
                    "consume rows, or lower --arena-bytes"
                ) from error
            raise self._failed(error) from error

    def get(self, wanted: Sequence[tuple[str, memoryview]]) -> None:
        """See `ObjectStore`."""
        for key, into in wanted:
            try:
                with self._file(key).open("rb") as file:
                    size = file.readinto(into)
                    more = file.read(1)
            except FileNotFoundError:
                raise NotFound(f"object {key} is not in {self._path}") from None
            except OSError as error:
                raise self._failed(error) from error
            if size != into.nbytes or more:
                raise NotFound(f"object {key} in {self._path} has not the {into.nbytes} bytes that it had")

    def remove(self, keys: Sequence[str]) -> None:
        """See `ObjectStore`."""
        for key in keys:
            self._unlink(self._file(key))

    def sweep(self, prefix: str) -> None:
        """See `ObjectStore`."""
        self._file(prefix)
        for file in self._path.glob(f"{prefix}*"):
            self._unlink(file)

    def close(self) -> None:
        """Does nothing."""

    def _file(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise UsageError(f"key {key!r} is no name of a file; use letters, digits, - and _")
        return self._path / key

    def _unlink(self, file: Path) -> None:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> Unreachable:
        return Unreachable(f"the store in {self._path} cannot be used: {error.strerror or error}; look at its disk")
