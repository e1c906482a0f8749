"""Blocks of remote shards on their way into a snapshot: a file without a name, so that nothing outlives the process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

from transferqueue.server.durability.snapshot_directory import writing_to
from transferqueue.storage.elements.dtypes import U8


class BlockSpool:
    """Keeps the bytes of blocks in a file in `directory`. First `add` all, then `read` any. For one thread.

    Raises:
        OutOfMemory: the disk is full.
        UsageError: the disk cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with writing_to(directory):
            path = directory / "spool"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            path.unlink()
        self._file: Final = os.fdopen(fd, "w+b")
        self._places: dict[int, tuple[int, int]] = {}
        """Offset and size in the file, by block."""
        self._end = 0
        self._mapped: U8 | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def add(self, block: int, content: U8) -> None:
        """Append the bytes of a block."""
        with writing_to(self._directory):
            self._file.write(content.data)
        self._places[block] = self._end, self._end + len(content)
        self._end += len(content)

    def read(self, block: int) -> U8:
        """The bytes of a block that was added: a view of the file, which stays valid after `close`."""
        start, end = self._places[block]
        if start == end:
            return np.empty(0, np.uint8)
        if self._mapped is None:
            with writing_to(self._directory):
                self._file.flush()
            self._mapped = np.frombuffer(
                mmap.mmap(self._file.fileno(), self._end, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
            )
        return self._mapped[start:end]

    def close(self) -> None:
        """Close the file. The system removes it with the last view."""
        self._mapped = None
        self._file.close()
