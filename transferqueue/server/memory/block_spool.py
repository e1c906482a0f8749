"""Blocks of remote shards on their way into other files: a file without a name, which ends with the process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import numpy as np

from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import UNCHECKED, checksum
from transferqueue.wire.messages import BlockLocation


class BlockSpool:
    """Keeps the bytes of blocks in a file in `directory`. First `add` all, then `read` any. For one thread.

    Args:
        writing: around what may raise `OSError`, which it may turn into another error.
    """

    def __init__(self, directory: Path, writing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._writing = writing
        with writing():
            path = directory / "spool"
            path.unlink(missing_ok=True)  # of a server that was killed before the next line but one
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            path.unlink(missing_ok=True)
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
        with self._writing():
            self._file.write(content.data)
        self._places[block] = self._end, self._end + len(content)
        self._end += len(content)

    def add_checked(self, memory: U8, blocks: Iterable[tuple[BlockLocation, int]]) -> list[int]:
        """Append blocks that lie in `memory` at these offsets. Returns the numbers of those that do not match their
        checksum, and are not added."""
        damaged = []
        for at, offset in blocks:
            content = memory[offset : offset + at.nbytes]
            if at.checksum in (UNCHECKED, checksum(content)):
                self.add(at.block, content)
            else:
                damaged.append(at.block)
        return damaged

    def read(self, block: int) -> U8:
        """The bytes of a block that was added: a view of the file, which stays valid after `close`."""
        start, end = self._places[block]
        if start == end:
            return np.empty(0, np.uint8)
        if self._mapped is None:
            with self._writing():
                self._file.flush()
            self._mapped = np.frombuffer(
                mmap.mmap(self._file.fileno(), self._end, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
            )
        return self._mapped[start:end]

    def close(self) -> None:
        """Close the file. The system removes it with the last view."""
        self._mapped = None
        self._file.close()
