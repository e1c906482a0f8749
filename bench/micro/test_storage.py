"""Encode, gather, pin and allocate: the data plane without a server. `nbytes` is what one round moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from bench.contenders.tensors import flat_bytes, tensor
from bench.workloads import KIB, MIB, WORKLOADS, Flat, Workload, columns, same
from transferqueue.schema import Field
from transferqueue.storage import (
    Allocator,
    Arena,
    BlockWriter,
    Column,
    MappedBlocks,
    Mapping,
    RowPlacement,
    block_writers,
)
from transferqueue.storage.inputs.prepare import prepare

ENCODED = ("dense_1", "dense_32", "dense_128", "ragged_1", "ragged_32", "ragged_128", "ragged_bf16", "text", "images")


@pytest.fixture
def shared() -> Iterator[Callable[[int], memoryview]]:
    """Memory of an arena, warm, as a client writes it."""
    arena = Arena.create(None, 256 * MIB)
    mapping = Mapping.open(arena.path, arena.capacity, lambda blocks: None)

    def warm(nbytes: int) -> memoryview:
        arena.ensure(0, nbytes)
        out = mapping.writable(0, nbytes)
        out[:] = bytes(nbytes)
        return out

    yield warm
    mapping.close()
    arena.close()


def prepared(batch: dict[str, Any]) -> BlockWriter:
    [draft] = block_writers([prepare(name, value) for name, value in batch.items()])
    return draft


def encode(batch: dict[str, Any], out: memoryview) -> BlockWriter:
    draft = prepared(batch)
    draft.write(out[: draft.nbytes])
    return draft


@pytest.mark.parametrize("name", ENCODED)
def test_encode(benchmark: Any, shared: Callable[[int], memoryview], name: str) -> None:
    """Columns as users hold them, into shared memory."""
    expected = columns(WORKLOADS[name], 0)
    batch = {field: tensor(flat) for field, flat in expected.items()}
    out = shared(prepared(batch).nbytes)
    benchmark.extra_info["nbytes"] = sum(flat.values.nbytes for flat in expected.values())
    draft = benchmark(encode, batch, out)
    check(draft, out, expected)


@dataclass(frozen=True)
class Held:
    """Where a block lies in an arena."""

    block: int
    extent: int
    offset: int
    nbytes: int


class At:
    """Where a draft lies: what a reply says of a block."""

    def __init__(self, draft: BlockWriter, block: int) -> None:
        self.block, self.nbytes, self.rows = block, draft.nbytes, draft.rows
        self.fields = [field.name for field in draft.fields]
        self.counts = draft.counts


def placed(
    parts: list[tuple[BlockWriter, Any]], block_of_row: np.ndarray, slot_of_row: np.ndarray
) -> dict[str, Column]:
    """The columns of rows that lie in these blocks."""
    fields = {field.name: field for field in parts[0][0].fields}
    memory = [np.frombuffer(out, np.uint8)[: draft.nbytes] for draft, out in parts]
    blocks = MappedBlocks([At(draft, at) for at, (draft, _) in enumerate(parts)], memory, fields)
    placement = RowPlacement(blocks, block_of_row.astype(np.int32), slot_of_row.astype(np.int32))
    return {name: Column(field, placement) for name, field in fields.items()}


def ready(field: Field, column: Column) -> Any:
    if field.ragged:
        return column.nested()
    return column.torch() if field.dense else list(column)


def check(draft: BlockWriter, out: memoryview, expected: dict[str, Flat]) -> None:
    rows = np.arange(draft.rows)
    found = placed([(draft, out)], np.zeros_like(rows), rows)
    for name, flat in expected.items():
        assert same(flat, *flat_bytes(ready(found[name].field, found[name])))


def _blocks(workload: Workload, count: int) -> list[tuple[BlockWriter, Any]]:
    """`count` puts of the workload's rows, each in memory of its own."""
    batch = {name: tensor(flat) for name, flat in columns(workload, 0).items()}
    parts = []
    for _ in range(count):
        draft = prepared(batch)
        out = np.zeros(draft.nbytes + 64, np.uint8)
        at = -out.ctypes.data % 64
        draft.write(memoryview(out)[at : at + draft.nbytes])
        parts.append((draft, memoryview(out)[at:]))
    return parts


@pytest.mark.parametrize("kind", ["contiguous", "random"])
@pytest.mark.parametrize("name", ["dense_8", "dense_128", "ragged_8", "ragged_128"])
def test_get_one_block(benchmark: Any, name: str, kind: str) -> None:
    """All columns of 1,024 rows, or of 256 at random, of one block."""
    workload = WORKLOADS[name]
    parts = _blocks(workload, 1)
    rows = np.arange(1024) if kind == "contiguous" else np.random.default_rng(0).permutation(1024)[:256]
    benchmark.extra_info["nbytes"] = workload.nbytes * len(rows) // 1024

    def get() -> list[torch.Tensor]:
        found = placed(parts, np.zeros_like(rows), rows)
        return [ready(column.field, column) for column in found.values()]

    tensors = benchmark(get)
    expected = columns(workload, 0)
    for flat, got in zip(expected.values(), tensors, strict=True):
        assert same(flat.pick(rows), *flat_bytes(got))


SMALL = Workload("small", "ragged", 1, 4, 4096)


@pytest.mark.parametrize("blocks", [64, 1024])
def test_gather_of_small_blocks(benchmark: Any, blocks: int) -> None:
    """One row from each of many blocks: what a batch of single-row puts looks like."""
    parts = _blocks(SMALL, blocks)
    rows = np.arange(blocks)
    benchmark.extra_info["nbytes"] = SMALL.nbytes * blocks

    def get() -> list[torch.Tensor]:
        found = placed(parts, rows, np.zeros_like(rows))
        return [column.nested() for column in found.values()]

    tensors = benchmark(get)
    assert all(len(got) == blocks for got in tensors)


@pytest.mark.parametrize("blocks", [1, 64])
def test_pin_and_let_go(benchmark: Any, blocks: int) -> None:
    """What holding the blocks of a batch costs that reads none of them: an extent and 64 KiB each."""
    told: list[int] = []
    arena = Arena.create(None, 256 * MIB)
    mapping = Mapping.open(arena.path, arena.capacity, told.extend)
    arena.ensure(0, blocks * MIB)
    held = [Held(block, block, block * MIB, 64 * KIB) for block in range(blocks)]

    def pin() -> None:
        mapping.pin(held)

    benchmark(pin)
    assert len(told) % blocks == 0
    assert sorted(told[-blocks:]) == list(range(blocks))
    mapping.close()
    arena.close()


def test_allocate_and_free(benchmark: Any) -> None:
    """A pair, among ten thousand extents of mixed sizes of which every second is free."""
    allocator = Allocator(64 << 30)
    sizes = cycle([4096, 65536, MIB, 4 * MIB])
    taken = [(allocator.allocate(size), size) for size, _ in zip(sizes, range(10_000), strict=False)]
    for offset, size in taken[::2]:
        assert offset is not None
        allocator.free(offset, size)

    def pair() -> None:
        offset = allocator.allocate(65536)
        assert offset is not None
        allocator.free(offset, 65536)

    before = allocator.used
    benchmark(pair)
    assert allocator.used == before
