"""Checksums of blocks: xxh3-64, computed where bytes leave a process or a disk, checked where they arrive."""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash

from transferqueue.errors import Corruption

Bytes = bytes | bytearray | memoryview | np.ndarray
"""Contiguous bytes, as whoever has them holds them."""
UNCHECKED: Final = 0
"""The checksum of a block whose bytes never left the machine."""


def checksum(block: Bytes) -> int:
    """xxh3-64 of the bytes. Never `UNCHECKED`: the one digest in 2**64 that is 0 is told as 1."""
    return xxhash.xxh3_64_intdigest(block) or 1  # type: ignore[arg-type,unused-ignore]


def verify(block: Bytes, expected: int, subject: str) -> None:
    """Raise `Corruption`, naming `subject`, unless the bytes have this checksum (`UNCHECKED`: no check)."""
    if expected == UNCHECKED:
        return
    found = checksum(block)
    if found != expected:
        raise Corruption(f"{subject}: checksum {found:016x} instead of {expected:016x}; its bytes changed on the way")
