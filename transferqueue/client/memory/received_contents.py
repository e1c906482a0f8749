"""Values by content that this client received from shards of other hosts, so that each crosses once: the reader's half
of `Repeat`.

1. A value is known by its content, the xxh3-128 of its block. The client compares it with the bytes that arrived before
   it keeps them. Bytes that do not match are handed out as they came, checked by their transfer, and not kept.
2. Each reply gets a copy, since a batch may be changed in place. So kept values never change, and need no pin.
3. At most `RECEIVED_BYTES_MAX` bytes are kept. The values that were used longest ago go first, and a value of more than
   a quarter of that is not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from transferqueue.limits import RECEIVED_BYTES_MAX
from transferqueue.storage.columns.placement import aligned_copy
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import digest
from transferqueue.wire import messages as m

_LARGEST_PART: Final = 4
"""A value of more than the bound divided by this would displace all others."""


class ReceivedContents:
    """The latest values, by content. Safe from any thread."""

    def __init__(self, bytes_max: int = RECEIVED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._guard = threading.Lock()
        self._values: OrderedDict[tuple[bytes, int], U8] = OrderedDict()
        self.nbytes = 0

    def may_keep(self, at: m.BlockLocation) -> bool:
        """Whether the block is a value by content, and so small that it displaces few others."""
        return bool(at.content) and at.rows == 1 and at.nbytes <= self._bytes_max // _LARGEST_PART

    def copy_of(self, at: m.BlockLocation) -> U8 | None:
        """The bytes of this block; None if they are not here."""
        with self._guard:
            value = self._values.get(_key(at))
            if value is None:
                return None
            self._values.move_to_end(_key(at))
        return aligned_copy(value)

    def add(self, at: m.BlockLocation, received: U8) -> None:
        """Keep a copy of the bytes of this block, if they are what its content says."""
        if not self.may_keep(at) or len(received) != at.nbytes or digest(received) != at.content:
            return
        value = received.copy()
        with self._guard:
            before = self._values.pop(_key(at), None)
            self.nbytes += at.nbytes - (0 if before is None else len(before))
            self._values[_key(at)] = value
            while self.nbytes > self._bytes_max:
                _, oldest = self._values.popitem(last=False)
                self.nbytes -= len(oldest)


def _key(at: m.BlockLocation) -> tuple[bytes, int]:
    return at.content, at.nbytes
