"""Compares the blocks of which a client reads a part with their checksums, before the read ends.

The receiver of a whole block compares its checksum. The receiver of a part cannot: the checksum covers bytes that do
not cross. So it names the checksum, and the shard compares (docs/decisions/remote-bytes.md).

1. The last frame of a part ends its read. It leaves only when every byte of the block that may be in the part was
   compared *after* the checksum of that frame was computed. So the shard detects bytes that were damaged when they were
   read, however old the damage: an earlier comparison does not count.
2. For the first part of a block the shard compares all of it, and keeps a sum of each `CHECKED_PIECE_BYTES`. For a
   later part it compares the pieces in the part's range.
3. Clocks count comparisons and frames. Parts that are read at the same time share comparisons: one that follows the
   reads of two parts counts for both. So when the ranks of an engine read one tensor together, it is compared about
   once.
4. A step compares at most `CHECK_STEP_BYTES`, so that transfers take turns. A read with `BACKLOG_BYTES_MAX` to compare
   sends no frame before.
5. The sums of at most `BLOCKS_MAX` blocks are kept. Beyond that all are dropped, and blocks are compared whole again.

No I/O. Used by one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import xxhash

from transferqueue.errors import Corruption
from transferqueue.limits import MIB
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import Range
from transferqueue.storage.memory.checksum import checksum

CHECKED_PIECE_BYTES: Final = MIB
"""Bytes of one sum: less than most slices of a tensor. A sum has 8 bytes."""
CHECK_STEP_BYTES: Final = 4 * MIB
"""Compared in one step: half a millisecond."""
BACKLOG_BYTES_MAX: Final = 64 * MIB
"""A peer with this much to compare gets no frame for some hundredths of a second."""
BLOCKS_MAX: Final = 1 << 14


class CheckedBlock:
    """The sums of one block's pieces, once all of it matched `expected`. `read_at`: when each piece was last
    compared."""

    def __init__(self, nbytes: int, expected: int) -> None:
        self.expected: Final = expected
        self.pieces: Final = max(1, -(-nbytes // CHECKED_PIECE_BYTES))
        self.sums: list[int] = []
        self.read_at = [0] * self.pieces
        self.is_known = False
        self._whole = xxhash.xxh3_64()

    def take_next(self, memory: U8, now: int) -> bool | None:
        """Compute the sum of the next piece of a block without sums. Returns whether the whole block matches; None: not
        all of it is compared yet."""
        at = len(self.sums)
        piece = _piece(memory, at)
        self._whole.update(piece)  # type: ignore[arg-type,unused-ignore]
        self.sums.append(checksum(piece))
        self.read_at[at] = now
        if len(self.sums) < self.pieces:
            return None
        self.is_known = (self._whole.intdigest() or 1) == self.expected
        if not self.is_known:
            self._forget()
        return self.is_known

    def matches(self, memory: U8, at: int, now: int) -> bool:
        """Compare a piece with its sum. If it does not match, the block's sums are dropped."""
        self.read_at[at] = now
        if checksum(_piece(memory, at)) == self.sums[at]:
            return True
        self._forget()
        return False

    def _forget(self) -> None:
        self.sums, self.is_known, self._whole = [], False, xxhash.xxh3_64()


def _piece(memory: U8, at: int) -> U8:
    return memory[at * CHECKED_PIECE_BYTES : (at + 1) * CHECKED_PIECE_BYTES]


class PartCheck:
    """The comparisons that one part of a read needs of a block. `span`: the bytes of the block that enclose the
    part."""

    def __init__(
        self, checks: BlockChecks, block: CheckedBlock, memory: U8, subject: str, span: tuple[int, int]
    ) -> None:
        self._checks, self._block, self._memory, self._subject = checks, block, memory, subject
        self._pieces = deque(range(span[0] // CHECKED_PIECE_BYTES, -(-span[1] // CHECKED_PIECE_BYTES)))
        self._since = 0

    def begin(self) -> None:
        """The checksum of the part's last byte has been computed."""
        self._since = self._checks.tick()

    @property
    def nbytes(self) -> int:
        """The most bytes that are left to compare."""
        block = self._block
        pieces = 0 if block.is_known else block.pieces - len(block.sums)
        return max(pieces, len(self._pieces)) * CHECKED_PIECE_BYTES

    def step(self) -> bool:
        """Compare some pieces. Returns whether all is compared. `Corruption` if the block is damaged."""
        for _ in range(CHECK_STEP_BYTES // CHECKED_PIECE_BYTES):
            if self._is_compared():
                return True
            if self._compare_next() is False:
                raise Corruption(
                    f"{self._subject} does not match its checksum: its bytes changed in the memory of this shard, and "
                    "the read does not count; write it again"
                )
        return self._is_compared()

    def _is_compared(self) -> bool:
        block, pieces = self._block, self._pieces
        while block.is_known and pieces and block.read_at[pieces[0]] > self._since:
            pieces.popleft()
        return block.is_known and not pieces

    def _compare_next(self) -> bool | None:
        now = self._checks.tick()
        if self._block.is_known:
            return self._block.matches(self._memory, self._pieces.popleft(), now)
        return self._block.take_next(self._memory, now)


class BlockChecks:
    """The sums of the blocks of one shard."""

    def __init__(self) -> None:
        self._now = 0
        self._blocks: dict[tuple[Range, int], CheckedBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def tick(self) -> int:
        """Count one event, and return its time."""
        self._now += 1
        return self._now

    def check(self, place: Range, memory: U8, expected: int, number: int, span: tuple[int, int]) -> PartCheck:
        """The comparisons for a part within the bytes `span` of block `number`. `memory`: all of the block."""
        address = memory.__array_interface__["data"][0]  # of a store, each read has its own copy
        block = self._blocks.get((place, address))
        if block is None or block.expected != expected:
            if len(self._blocks) >= BLOCKS_MAX:
                self._blocks.clear()
            block = self._blocks[place, address] = CheckedBlock(len(memory), expected)
        return PartCheck(self, block, memory, f"block {number} (bytes {place.offset:,} to {place.end:,})", span)

    def keep_only(self, lives: Callable[[int], bool]) -> None:
        """Drop the sums of blocks whose extents are gone."""
        for key in [key for key in self._blocks if not lives(key[0].extent)]:
            del self._blocks[key]
