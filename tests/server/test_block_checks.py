"""Blocks that are compared at the shard, since their readers get a part: what is compared, when, how often, and what
leaves before."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests.server.test_bulk import ARENA_BYTES, Bench, refused
from transferqueue.errors import Corruption, ProtocolError
from transferqueue.limits import MIB
from transferqueue.server.shards import block_checks
from transferqueue.server.shards.block_checks import CHECK_STEP_BYTES, BlockChecks, PartCheck
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.backing import Range
from transferqueue.storage.memory.checksum import checksum
from transferqueue.transport.bulk import protocol as b

MEMORY = np.random.default_rng(1).integers(0, 255, 10 * MIB + 100, np.uint8)
PLACE = Range(3, 0, len(MEMORY))
PIECES = 11


@pytest.fixture
def memory() -> np.ndarray:
    return MEMORY.copy()


@pytest.fixture
def checks() -> BlockChecks:
    return BlockChecks()


def check(checks: BlockChecks, memory: np.ndarray, first: int = 0, last: int = len(MEMORY)) -> PartCheck:
    made = checks.check(PLACE, memory, checksum(MEMORY), 1, (first, last))
    made.begin()
    return made


def compared(checks: BlockChecks, *parts: PartCheck) -> int:
    """Pieces that were compared until all parts are."""
    before = checks.tick()
    while [part for part in parts if not part.step()]:
        pass
    return checks.tick() - before - 1


def test_the_first_part_has_all_of_its_block_compared_and_others_what_they_touch(
    checks: BlockChecks, memory: np.ndarray
) -> None:
    assert compared(checks, check(checks, memory, 0, 10)) == PIECES
    assert compared(checks, check(checks, memory, MIB - 1, 2 * MIB + 1)) == 3
    assert compared(checks, check(checks, memory, 9 * MIB, 9 * MIB + 1)) == 1
    assert compared(checks, check(checks, memory, 0, 0)) == 0, "no bytes"
    assert compared(checks, check(checks, memory)) == PIECES, "again: what was whole before may be damaged now"


def test_parts_that_are_read_together_are_compared_together(checks: BlockChecks, memory: np.ndarray) -> None:
    ranks = [check(checks, memory) for _ in range(8)]
    assert compared(checks, *ranks) == PIECES
    ranks = [check(checks, memory) for _ in range(8)]
    assert compared(checks, *ranks) == PIECES
    first = check(checks, memory)
    first.step()
    later = check(checks, memory)
    assert compared(checks, first, later) == PIECES, "the four pieces before it began are compared once more"


def test_a_step_is_short_and_says_how_much_is_left(checks: BlockChecks, memory: np.ndarray) -> None:
    part, before = check(checks, memory), checks.tick()
    assert part.nbytes == PIECES * MIB
    assert not part.step()
    assert checks.tick() - before - 1 == CHECK_STEP_BYTES // MIB
    assert part.nbytes == PIECES * MIB, "they were compared before the block was known, and may be compared again"
    assert not part.step()
    assert part.step()
    assert part.nbytes == 0


@pytest.mark.parametrize("at", [0, 5 * MIB, len(MEMORY) - 1])
def test_damage_is_found_before_and_after_the_block_is_known(checks: BlockChecks, memory: np.ndarray, at: int) -> None:
    memory[at] ^= 1
    with pytest.raises(Corruption, match=r"block 1 \(bytes 0 to 10,485,860\) does not match its checksum"):
        compared(checks, check(checks, memory))
    memory[at] ^= 1
    assert compared(checks, check(checks, memory)) == PIECES
    memory[at] ^= 1
    for _ in range(2):
        with pytest.raises(Corruption, match="does not match its checksum"):
            compared(checks, check(checks, memory))


def test_another_checksum_is_compared_anew(checks: BlockChecks, memory: np.ndarray) -> None:
    compared(checks, check(checks, memory))
    with pytest.raises(Corruption):
        compared(checks, checks.check(PLACE, memory, 17, 1, (0, 1)))


def test_what_is_known_goes_with_its_extent_and_is_bounded(
    checks: BlockChecks, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(checks, check(checks, memory))
    checks.keep_only(lambda extent: extent == PLACE.extent)
    assert len(checks) == 1
    checks.keep_only(lambda _: False)
    assert len(checks) == 0
    monkeypatch.setattr(block_checks, "BLOCKS_MAX", 2)
    for extent in range(5):
        checks.check(PLACE._replace(extent=extent), memory, 1, 1, (0, 1))
        assert len(checks) <= 2


# ---------------------------------------------------------------- behind a read


@pytest.fixture
def bench() -> Iterator[Bench]:
    arena = Arena.create(None, ARENA_BYTES)
    yield Bench(arena)
    arena.close()


def part_of(bench: Bench, cut: b.BulkCut, number: int = 1, sums: int = 1) -> b.ReadColumns:
    """A read of a part of 16 MiB, whose checksum is named."""
    at = bench.at
    asked = bench.read(at, number=number)
    part = msgspec.structs.replace(asked.parts[0], slices={"x": cut}, sums=[bench.sum] * sums)
    return msgspec.structs.replace(asked, parts=[part])


@pytest.fixture
def values(bench: Bench) -> np.ndarray:
    values = np.random.default_rng(2).random((1, 2048, 2048), np.float32)
    bench.at = bench.put(x=values)
    bench.sum = checksum(bench.arena[: bench.at.nbytes])
    return values[0]


COLUMNS = b.BulkCut([], [[512, 1024]])


def test_a_part_is_read(bench: Bench, values: np.ndarray) -> None:
    for _ in range(2):
        bench.say(part_of(bench, COLUMNS))
        assert bench.frames() == values[:, 512:1024].tobytes()
    bench.say(part_of(bench, b.BulkCut([100, 300], [])))
    assert bench.frames() == values[100:300].tobytes()


def test_the_last_frame_waits_for_the_comparison_and_others_do_not(bench: Bench, values: np.ndarray) -> None:
    bench.say(part_of(bench, COLUMNS))
    turns, heads = 0, []
    while not (heads and heads[-1].last):
        assert bench.exchange.busy()
        bench.exchange.advance()
        turns += 1
        for _, head, _ in bench.heard():
            heads.append(head)
            bench.say(b.FlowAck(1, head.number + 1))
    assert len(heads) == 4
    assert turns >= 4 + 16 * MIB // CHECK_STEP_BYTES - 1


def test_bytes_that_were_sent_and_then_damaged_end_the_read(bench: Bench, values: np.ndarray) -> None:
    """What was damaged just before it was read cannot be told from that: so the comparison comes after."""
    bench.say(part_of(bench, COLUMNS))
    bench.exchange.advance()
    ((_, head, _),) = bench.heard()
    assert (head.number, head.last) == (0, False)
    bench.arena[4 * 512] ^= 1
    with pytest.raises(Corruption, match="does not match its checksum"):
        bench.frames()
    assert len(bench.exchange) == 0


def test_memory_that_was_freed_meanwhile_is_not_called_damaged(bench: Bench, values: np.ndarray) -> None:
    bench.say(part_of(bench, b.BulkCut([0, 8], [])))
    bench.tickets.revoke(bench.at.extent)
    bench.arena[: bench.at.nbytes] = 0
    for _ in range(9):
        bench.exchange.prepare()
    assert "was freed since" in str(refused(bench))


def test_a_read_with_other_numbers_of_checksums_is_refused(bench: Bench, values: np.ndarray) -> None:
    bench.say(part_of(bench, COLUMNS, sums=2))
    with pytest.raises(ProtocolError, match="names 2 checksums for 1 blocks"):
        raise refused(bench)


def test_a_read_with_much_to_compare_sends_no_frame_before(
    bench: Bench, values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is never silent for as long as all of it takes."""
    monkeypatch.setattr("transferqueue.server.shards.shard_transfer.BACKLOG_BYTES_MAX", 8 * MIB)
    few = part_of(bench, b.BulkCut([0, 8], []))
    more = part_of(bench, COLUMNS)
    bench.say(msgspec.structs.replace(few, parts=[*few.parts, *more.parts]))
    assert bench.frames() == values[:8].tobytes() + values[:, 512:1024].tobytes()
