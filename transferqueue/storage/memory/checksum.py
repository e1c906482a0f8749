"""Checksums of blocks (xxh3-64): computed before bytes leave a process, checked after they arrive or are read from
disk. Digests (xxh3-128) distinguish the contents of shared blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash

from transferqueue.errors import Corruption

Bytes = bytes | bytearray | memoryview | np.ndarray
"""Contiguous bytes, in any of these types."""
UNCHECKED: Final = 0
"""No checksum, for a block that is only in memory."""


def checksum(block: Bytes) -> int:
    """The xxh3-64 of the bytes; 1 if that is 0, which means `UNCHECKED`."""
    return xxhash.xxh3_64_intdigest(block) or 1  # type: ignore[arg-type,unused-ignore]


def digest(block: Bytes) -> bytes:
    """The xxh3-128 of the bytes, 16 bytes big-endian, to distinguish contents."""
    return xxhash.xxh3_128_digest(block)  # type: ignore[arg-type,unused-ignore]


def verify(block: Bytes, expected: int, subject: str) -> None:
    """Raise `Corruption`, naming `subject`, unless the bytes have this checksum (`UNCHECKED`: no check)."""
    if expected == UNCHECKED:
        return
    actual = checksum(block)
    if actual != expected:
        raise Corruption(f"{subject}: checksum {actual:016x} instead of {expected:016x}; its bytes changed on the way")
