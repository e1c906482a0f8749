"""The arenas that one session maps, and the pins that it holds.

The session's lock file stays locked for as long as a view lives in this process, also after the queue was
closed: the server reuses pinned memory only once it can take that lock (docs/decisions/memory.md). So an array that a
program keeps is never overwritten, however the session ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.memory.grants import CommitOutcome, WriteRegion
from transferqueue.client.session.operation_runner import BlockingWork, Operation
from transferqueue.client.session.session_lock import SessionLock
from transferqueue.errors import Unreachable
from transferqueue.limits import COPIED_BYTES_MAX
from transferqueue.schema import NO_SLICES, Field, Slice
from transferqueue.storage import Mapping as Arena
from transferqueue.storage.columns.column import Column
from transferqueue.storage.columns.placement import MappedBlocks, RowPlacement
from transferqueue.storage.memory.mapping import Pins, Release
from transferqueue.wire import codec
from transferqueue.wire import messages as m

_ONE: Final = 4
"""Bytes of one item of `ReplyColumns`."""


class MappedMemory:
    """Writes into granted extents, and pins blocks that replies named. Safe from any thread.

    `arenas` has the path of each shard's arena. `on_release` is called with blocks whose pins return; it runs in
    finalizers.
    """

    def __init__(
        self,
        arenas: Mapping[int, str],
        capacity: int,
        on_release: Release,
        lock: SessionLock | None,
    ) -> None:
        self._own = dict(arenas)
        self._paths = dict(arenas)
        self._capacities = dict.fromkeys(arenas, capacity)
        self._tell = on_release
        self._lock_file = lock
        self._arenas: dict[int, Arena] = {}
        self._guard = threading.RLock()  # reentrant: a finalizer may run inside
        self._pins = 0
        self._returned: list[int] = []
        """Pins that finalizers returned and `_pins` still counts. Appending is one step, which nothing interrupts."""
        self._closed = False

    def map(self, further: Mapping[int, tuple[str, int]]) -> None:
        """Map these remote shards too: path and capacity by number. Views of shards that are gone stay valid."""
        with self._guard:
            paths = self._own | {number: path for number, (path, _) in further.items()}
            gone = [number for number in self._arenas if paths.get(number) != self._paths[number]]
            self._paths = paths
            self._capacities |= {number: capacity for number, (_, capacity) in further.items()}
            for number in gone:
                self._arenas.pop(number).close()

    torn: Final = CommitOutcome.REFUSED
    """Outcome of a region into which a write failed: no late frame can arrive there, so the next put may write."""

    def write(self, region: WriteRegion, nbytes: int, fill: Callable[[memoryview], object]) -> BlockingWork:
        """Let `fill` write `nbytes` into the region. The session's lock is held until it has."""
        return BlockingWork(nbytes, partial(self.write_now, region, nbytes, fill))

    def write_now(self, region: WriteRegion, nbytes: int, fill: Callable[[memoryview], object]) -> None:
        """The same, in this thread."""
        arena = self._arenas.get(region.shard) or self._arena(region.shard)
        self._count(1)
        try:
            fill(arena.writable(region.offset, nbytes))
        finally:
            self._count(-1)

    def columns(
        self,
        parts: Sequence[m.ReplyColumns],
        fields: Mapping[str, Field],
        rows: int,
        slices: Mapping[str, Slice] = NO_SLICES,
    ) -> Operation[tuple[dict[str, Column], list[MappedBlocks]]]:
        """The columns of one reply, and the blocks that hold their memory. Reads no bytes. The pins return when the
        last view is collected, or at once if this fails."""
        yield from ()  # an operation that asks for nothing
        memory = self.pin_all({block.block: block for part in parts for block in part.blocks}.values())
        columns: dict[str, Column] = {}
        held: list[MappedBlocks] = []
        for part in parts:
            blocks = MappedBlocks(part.blocks, [memory[block.block] for block in part.blocks], fields)
            placement = placement_of(part, blocks, rows)
            held.append(blocks)
            columns |= {name: Column(fields[name], placement, slices.get(name)) for name in part.fields}
        return columns, held

    def pin(self, shard: int, blocks: Collection[m.BlockLocation]) -> dict[int, NDArray[np.uint8]]:
        """The bytes of each block of this shard that a reply named, each once. Its pin returns when the last view is
        collected; that of few bytes, which are copied, at once."""
        if not blocks:
            return {}
        arena = self._arenas.get(shard) or self._arena(shard)
        copied = sum([block.nbytes for block in blocks]) <= COPIED_BYTES_MAX
        self._count(len(blocks))
        try:
            memory = arena.copies(blocks) if copied else arena.pin(blocks)
        except BaseException:
            self._released(Pins([block.block for block in blocks]))
            raise
        if copied:
            self._released(Pins([block.block for block in blocks], copied=True))
        return memory

    def pin_all(self, blocks: Iterable[m.BlockLocation]) -> dict[int, NDArray[np.uint8]]:
        """The same for blocks of several mapped shards."""
        by_shard: dict[int, dict[int, m.BlockLocation]] = {}
        for block in blocks:
            by_shard.setdefault(block.shard, {})[block.block] = block
        memory: dict[int, NDArray[np.uint8]] = {}
        for shard, members in by_shard.items():
            memory |= self.pin(shard, members.values())
        return memory

    def close(self) -> None:
        """End writing and pinning. Views stay valid, and the session's lock is held until the last one is collected."""
        with self._guard:
            self._closed = True
            for arena in self._arenas.values():
                arena.close()
            self._count(0)

    def _arena(self, shard: int) -> Arena:
        with self._guard:
            arena = self._arenas.get(shard)
            if arena is None:
                if shard not in self._paths:
                    raise Unreachable(f"shard {shard} is not one that the server named ({sorted(self._paths)})")
                arena = Arena.open(self._paths[shard], self._capacities[shard], self._released)
                self._arenas[shard] = arena
        return arena

    def _released(self, pins: Pins) -> None:
        """Runs in finalizers: takes no lock, since an interrupt could leave it taken. May be called again with the same
        pins, where an interrupt stopped the finalizer."""
        self._tell(pins)
        if not pins.counted:
            pins.counted = True
            self._returned.append(pins.total)
        if self._closed:
            self._unlock_if_unused()

    def _count(self, change: int) -> None:
        with self._guard:
            if self._returned:
                back = self._returned[:]
                del self._returned[: len(back)]  # first: other threads must not see fewer pins than there are
                self._pins -= sum(back)
            self._pins += change
            if self._closed:
                self._unlock_if_unused()

    def _unlock_if_unused(self) -> None:
        """Release the session's lock if no view or write is left. Releasing it twice is allowed."""
        if self._lock_file is not None and self._pins == sum(self._returned):
            self._lock_file.release()


def placement_of(part: m.ReplyColumns, blocks: MappedBlocks, rows: int) -> RowPlacement:
    """Where the values of a part lie, one for each row, or for each node of a tree. One run of one block needs no
    array."""
    rows = part.values(rows)
    if rows and len(part.block_of_row) == len(part.slot_of_row) == _ONE:
        block, first = (int.from_bytes(item, "little", signed=True) for item in (part.block_of_row, part.slot_of_row))
        return RowPlacement.of_run(blocks, block, first, rows)
    return RowPlacement(
        blocks,
        codec.decode_constant(part.block_of_row, "<i4", rows),
        codec.decode_ascending(part.slot_of_row, "<i4", rows),
    )
