"""A shard as a process sees it: arena, allocator and mapping together, on real shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transferqueue.schema import Field
from transferqueue.storage import Allocator, Arena, Column, MappedBlocks, RowPlacement, block_writers
from transferqueue.storage import Mapping as Mapped
from transferqueue.storage.inputs.prepare import prepare


@dataclass
class Block:
    """What a reply says of a block."""

    block: int
    extent: int
    offset: int
    nbytes: int
    rows: int
    fields: list[str]
    counts: list[int]
    slots: np.ndarray[Any, Any] | None = None


@dataclass
class Shard:
    arena: Arena
    allocator: Allocator
    mapping: Mapped
    released: list[int]
    fields: dict[str, Field] = field(default_factory=dict)
    blocks: int = 0

    def put(self, columns: Mapping[str, Any], fields: Sequence[Field] = (), rows: int | None = None) -> list[Block]:
        """Write columns as a client does; a block for each set of columns that share values alike."""
        declared = {one.name: one for one in fields}
        prepared = [prepare(name, value, declared.get(name), rows) for name, value in columns.items()]
        return [self._place(draft) for draft in block_writers(prepared)]

    def _place(self, draft: Any) -> Block:
        offset = self.allocator.allocate(max(draft.nbytes, 1))
        assert offset is not None
        self.arena.ensure(offset, max(draft.nbytes, 1))
        draft.write(self.mapping.writable(offset, draft.nbytes))
        self.fields |= {one.name: one for one in draft.fields}
        self.blocks += 1
        names = [one.name for one in draft.fields]
        return Block(
            self.blocks, self.blocks, offset, draft.nbytes, draft.stored_rows, names, list(draft.counts), draft.slots
        )

    def lease(self, blocks: Sequence[Block]) -> MappedBlocks:
        """What one reply lends."""
        found = self.mapping.pin(blocks)
        return MappedBlocks(blocks, [found[block.block] for block in blocks], self.fields)

    def column(self, name: str, blocks: Sequence[Block], at: Sequence[tuple[int, int]] | None = None) -> Column:
        """A column over rows (index of block, slot); None: all rows of the first block, as its writer gave them."""
        if at is None:
            slots = blocks[0].slots if blocks[0].slots is not None else range(blocks[0].rows)
            at = [(0, int(slot)) for slot in slots]
        places = np.array(at, np.int32).reshape(-1, 2)
        return Column(self.fields[name], RowPlacement(self.lease(blocks), places[:, 0].copy(), places[:, 1].copy()))

    def round_trip(self, value: Any, declared: Field | None = None, rows: int | None = None) -> Column:
        """Put one column and view it."""
        name = declared.name if declared else "x"
        blocks = self.put({name: value}, [declared] if declared else (), rows)
        return self.column(name, blocks)


@contextmanager
def opened_shard() -> Iterator[Shard]:
    """A shard on a memfd, gone at the end."""
    arena = Arena.create(None, 256 << 20)
    released: list[int] = []
    mapping = Mapped.open(arena.path, arena.capacity, released.extend)
    try:
        yield Shard(arena, Allocator(arena.capacity), mapping, released)
    finally:
        mapping.close()
        arena.close()
