"""Interned values that this client received from shards of other hosts, so that each crosses once.

Rules:

1. A value is known by its content, the xxh3-128 of its block, and by its layout. Both are compared with the bytes that
   arrived before they are kept; what does not match is handed out as it came, checked by its transfer, and not kept.
2. Values are kept whole: a reply that names some of a block's rows fetches them all, if the missing blocks of its
   column are at most `WHOLE_FACTOR` times what its rows need. Else only its rows cross, as of any column, and nothing
   is kept.
3. Each reply gets a copy, since a batch may be changed in place. So what is kept never changes, and needs no pin.
4. At most `RECEIVED_BYTES_MAX` bytes are kept. Those that were used longest ago go first, and a block of more than a
   quarter of that is neither fetched whole nor kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from transferqueue.limits import PARTS_MAX, RECEIVED_BYTES_MAX
from transferqueue.storage.columns.placement import aligned_copy
from transferqueue.storage.elements.dtypes import I64, U8
from transferqueue.storage.memory.checksum import digest
from transferqueue.wire import codec
from transferqueue.wire import messages as m

_LARGEST_PART: Final = 4
"""A value of more than the bound divided by this would displace all others."""
WHOLE_FACTOR: Final = 4
"""At most so many times the bytes that a reply needs are fetched in order to keep them."""


class ReceivedValues:
    """The latest interned values, by content. Safe from any thread."""

    def __init__(self, bytes_max: int = RECEIVED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._guard = threading.Lock()
        self._values: OrderedDict[tuple[bytes, int, int], U8] = OrderedDict()
        self.nbytes = 0

    def is_worth_keeping(self, at: m.BlockLocation) -> bool:
        """Whether the block has a content, and is so small that it displaces few others."""
        return bool(at.content) and at.nbytes <= self._bytes_max // _LARGEST_PART

    def serves(self, part: m.ReplyColumns, rows: int) -> bool:
        """Whether this part of a reply of so many rows is to come from here: its blocks are here, or are received
        whole."""
        if not all(map(self.is_worth_keeping, part.blocks)):
            return False
        if all(at.rows <= WHOLE_FACTOR for at in part.blocks):  # such as one image each
            return True
        with self._guard:
            missing = np.array([_key(at) not in self._values for at in part.blocks], bool)
        sizes = np.array([at.nbytes for at in part.blocks], np.int64) * missing
        row_counts = np.array([max(1, at.rows) for at in part.blocks])
        return bool(sizes.sum() <= WHOLE_FACTOR * (sizes / row_counts * _rows_needed(part, rows)).sum())

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
        if not self.is_worth_keeping(at) or len(received) != at.nbytes or digest(received) != at.content:
            return
        value = received.copy()
        with self._guard:
            before = self._values.pop(_key(at), None)
            self.nbytes += at.nbytes - (0 if before is None else len(before))
            self._values[_key(at)] = value
            while self.nbytes > self._bytes_max:
                _, oldest = self._values.popitem(last=False)
                self.nbytes -= len(oldest)


def _key(at: m.BlockLocation) -> tuple[bytes, int, int]:
    return at.content, at.nbytes, at.rows


def _rows_needed(part: m.ReplyColumns, rows: int) -> I64:
    """How many rows of each block the part names, each counted once."""
    if not part.blocks:
        return np.zeros(0, np.int64)
    block_of_row = codec.decode_constant(part.block_of_row, "<i4", rows).astype(np.int64)
    slot_of_row = codec.decode_ascending(part.slot_of_row, "<i4", rows)
    distinct = np.unique(block_of_row << 32 | slot_of_row) >> 32
    return np.bincount(distinct, minlength=len(part.blocks))


def whole(at: m.BlockLocation) -> m.ReplyColumns:
    """A part with each row of the block once."""
    return m.ReplyColumns(at.fields, [at], bytes(4), bytes(4))


def received_together(blocks: Sequence[m.BlockLocation]) -> Iterator[list[m.BlockLocation]]:
    """The blocks in lots of equally many rows, as one read takes them."""
    blocks_by_rows: dict[int, list[m.BlockLocation]] = {}
    for at in blocks:
        blocks_by_rows.setdefault(at.rows, []).append(at)
    for those in blocks_by_rows.values():
        for first in range(0, len(those), PARTS_MAX):
            yield those[first : first + PARTS_MAX]
