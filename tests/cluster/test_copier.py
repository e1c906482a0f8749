"""Copy orders carried out over memory of this process: what is read in pieces, what is left out, and what is written
together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from transferqueue.cluster import copier
from transferqueue.cluster.copier import Copier, CopyMemory
from transferqueue.errors import Corruption, Disconnected, ShardLost
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import messages as m

PIECE = 1024


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "COPY_ORDER_BYTES", PIECE)


class Memory:
    """The memory of one shard, which refuses a read that names a freed block as a bulk endpoint does."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.bytes = np.random.default_rng(7).integers(0, 256, size).astype(np.uint8)
        self.freed: set[int] = set()
        self.damaged: set[int] = set()
        self.reads: list[int] = []
        self.writes: list[tuple[int, int]] = []
        self.on_write: Callable[[], object] = lambda: None

    def read(self, blocks: Sequence[m.BlockLocation]) -> list[U8]:
        self.reads.append(len(blocks))
        if self.freed.intersection(at.block for at in blocks):
            raise Disconnected("its block or extent was freed since")
        if self.damaged.intersection(at.block for at in blocks):
            raise Corruption("the bytes did not cross in 3 attempts")
        return [self.read_part(at, 0, at.nbytes) for at in blocks]

    def read_part(self, block: m.BlockLocation, first: int, end: int) -> U8:
        return self.bytes[block.offset + first : block.offset + end]

    def write(self, target: m.Granted, offset: int, content: U8) -> None:
        assert target.offset <= offset <= offset + len(content) <= target.offset + target.nbytes
        self.bytes[offset : offset + len(content)] = content
        self.writes.append((offset, len(content)))
        self.on_write()


class Memories:
    """Shards of a deployment by number."""

    def __init__(self, **shards: Memory) -> None:
        self.shards = {int(name[1:]): memory for name, memory in shards.items()}

    @contextmanager
    def open(self, number: int, own_number: int) -> Iterator[CopyMemory]:
        if number not in self.shards:
            raise ShardLost(f"shard {number} is gone")
        yield self.shards[number]


def block(number: int, shard: int, offset: int, nbytes: int, checksum: int = 0) -> m.BlockLocation:
    return m.BlockLocation(number, shard, number, offset, nbytes, 1, [], [], checksum)


def order(blocks: Sequence[m.BlockLocation]) -> m.CopyOrder:
    """Into shard 3, one after the other."""
    offsets = np.cumsum([0, *(at.nbytes for at in blocks)]).tolist()
    return m.CopyOrder(3, m.Granted(99, 3, 0, 1 << 16), list(blocks), offsets[:-1])


def made(memories: Memories, busy: Callable[[], int] = lambda: 0, **options: Any) -> Copier:
    return Copier(None, memories, busy, **options)  # type: ignore[arg-type]  # an order is handed to it here


def test_small_neighbours_are_read_and_written_together_and_large_blocks_in_pieces() -> None:
    source, target = Memory(), Memory(1 << 16)
    target.bytes[:] = 0
    blocks = [block(1, 1, 0, 128), block(2, 1, 8192, 3 * PIECE + 64), block(3, 1, 512, 64), block(4, 1, 640, 64)]
    assert sorted(made(Memories(s1=source, s3=target)).carry_out(order(blocks))) == [1, 2, 3, 4]
    expected = np.concatenate([source.bytes[at.offset : at.offset + at.nbytes] for at in blocks])
    assert (target.bytes[: len(expected)] == expected).all()
    assert source.reads == [3]
    large, last = 128, 128 + 3 * PIECE + 64
    assert target.writes == [(large + PIECE * n, min(PIECE, 3 * PIECE + 64 - PIECE * n)) for n in range(4)] + [
        (0, 128),
        (last, 128),
    ]


def test_each_block_is_one_write_where_writes_are_objects() -> None:
    target = Memory()
    blocks = [block(number, 1, 64 * number, 64) for number in range(1, 4)]
    made(Memories(s1=Memory(), s3=target), one_by_one=True).carry_out(order(blocks))
    assert target.writes == [(0, 64), (64, 64), (128, 64)]


def test_a_block_that_does_not_match_its_checksum_is_not_copied(caplog: pytest.LogCaptureFixture) -> None:
    source, target = Memory(), Memory()
    good = checksum(source.bytes[64:128])
    large = checksum(source.bytes[4096 : 4096 + 2 * PIECE])
    blocks = [
        block(1, 1, 0, 64, checksum=5), block(2, 1, 64, 64, checksum=good),
        block(3, 1, 4096, 2 * PIECE, checksum=large), block(4, 2, 4096, 2 * PIECE, checksum=5),
    ]  # fmt: skip
    assert sorted(made(Memories(s1=source, s2=Memory(), s3=target)).carry_out(order(blocks))) == [2, 3]
    assert "block 1 in shard 1 does not match its checksum" in caplog.text
    assert "block 4 in shard 2 does not match its checksum" in caplog.text


def test_blocks_that_were_freed_meanwhile_do_not_hold_up_the_others() -> None:
    source = Memory()
    source.freed = {3, 6}
    blocks = [block(number, 1, 64 * number, 64) for number in range(1, 9)]
    assert made(Memories(s1=source, s3=Memory())).carry_out(order(blocks)) == [1, 2, 4, 5, 7, 8]


def test_a_block_that_its_shard_cannot_read_whole_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    source = Memory()
    source.damaged = {2}
    blocks = [block(number, 1, 64 * number, 64) for number in range(1, 5)]
    assert made(Memories(s1=source, s3=Memory())).carry_out(order(blocks)) == [1, 3, 4]
    assert "block 2 in shard 1 is not copied: the bytes did not cross" in caplog.text


def test_a_large_block_that_is_damaged_does_not_hold_up_the_small_ones(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [block(1, 1, 4096, 2 * PIECE, checksum=5), block(2, 1, 64, 64)]
    assert made(Memories(s1=Memory(), s3=Memory())).carry_out(order(blocks)) == [2]
    assert "block 1 in shard 1 does not match its checksum" in caplog.text


def test_a_source_that_is_gone_costs_its_blocks_only() -> None:
    blocks = [block(1, 1, 0, 64), block(2, 2, 64, 64)]
    assert made(Memories(s2=Memory(), s3=Memory())).carry_out(order(blocks)) == [2]
    assert made(Memories(s1=Memory(), s2=Memory())).carry_out(order(blocks)) == [], "the target is gone"


def test_empty_blocks_are_copied() -> None:
    assert made(Memories(s1=Memory(), s3=Memory())).carry_out(order([block(1, 1, 0, 0)])) == [1]


def test_it_pauses_after_each_piece_while_clients_use_the_endpoint_and_stops_at_once() -> None:
    target, waits = Memory(), []
    copying = made(Memories(s1=Memory(), s3=target), lambda: 1, clock=iter(range(100)).__next__)
    copying._stopping.wait = waits.append  # type: ignore[method-assign,assignment]
    copying.carry_out(order([block(1, 1, 0, 2 * PIECE), block(2, 1, 8192, 64)]))
    assert waits == [1, 1, 1]
    target.on_write = copying.stop
    with pytest.raises(Disconnected, match="the shard stops"):
        copying.carry_out(order([block(1, 1, 0, 2 * PIECE)]))
    assert len(target.writes) == 4
