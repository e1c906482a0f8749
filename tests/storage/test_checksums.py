from __future__ import annotations

import numpy as np
import pytest

from transferqueue.errors import Corruption
from transferqueue.storage import verify
from transferqueue.storage.memory.checksum import checksum

BLOCK = np.arange(100, dtype=np.uint8)


def test_a_checksum_is_xxh3_of_the_bytes_however_they_are_held() -> None:
    assert checksum(b"") == 0x2D06800538D394C2  # from the specification of XXH3
    assert checksum(BLOCK) == checksum(BLOCK.tobytes()) == checksum(memoryview(BLOCK.tobytes()))


def test_a_changed_byte_is_corruption() -> None:
    verify(BLOCK, checksum(BLOCK), "block 7")
    verify(BLOCK, 0, "a block that never left the machine")
    changed = BLOCK.copy()
    changed[50] ^= 1
    with pytest.raises(Corruption, match=r"block 7: checksum .* instead of .*; its bytes changed on the way"):
        verify(changed, checksum(BLOCK), "block 7")
