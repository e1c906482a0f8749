"""Rows that lie apart, gathered into registered memory for clients that read it: what is staged, for how long, and what
a slow or lost client keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.adapters.nixl.test_ranged_reads import Named, frames
from tests.server.test_bulk import ARENA_BYTES, SESSION, Bench, refused
from transferqueue.adapters.carriers.nixl.shard import staging
from transferqueue.errors import BY_NAME, Unreachable
from transferqueue.limits import BULK_STALL_S, KIB
from transferqueue.storage.memory.arena import Arena
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import messages as m

ROWS = 1024
ORDER = np.random.default_rng(3).permutation(ROWS)


@pytest.fixture
def bench() -> Iterator[Named]:
    arena = Arena.create(None, ARENA_BYTES)
    yield Named(arena)
    arena.close()


def scattered(bench: Named) -> m.BlockLocation:
    """Two ragged columns with rows of 4 KiB in the mean, a dense one, and short rows."""
    lengths = np.random.default_rng(2).integers(0, 8 * KIB, ROWS)
    long = [np.full(n, at % 251, np.uint8) for at, n in enumerate(lengths)]
    return bench.put(
        x=long,
        y=[row[: len(row) // 2] for row in long],
        z=np.random.default_rng(4).integers(0, 255, (ROWS, 10 * KIB), np.uint8),
        w=[str(at) for at in range(ROWS)],
    )


def named(found: list[b.RangesFrame]) -> int:
    return sum(each.nbytes for frame in found for each in frame.ranges if each.address)


def pool(bench: Named) -> staging.StagingPool:
    return bench.registered.staging


def streamed(bench: Named, at: m.BlockLocation) -> bytes:
    bench.say(bench.read(at, ORDER))
    return Bench.frames(bench)


def test_rows_that_lie_apart_are_staged_in_few_ranges(bench: Named) -> None:
    at, bench.made = scattered(bench), b""
    bench.say(bench.read_ranges(at, ORDER))
    found = frames(bench)
    assert bench.made == streamed(bench, at)
    assert bench.in_arena(found) == 0
    assert named(found) > len(bench.made) - 32 * KIB, "all but the first offsets"
    assert sum(len(frame.ranges) for frame in found) < 4 * len(found)
    assert max(named([frame]) for frame in found) <= 2 * staging.SLOT_BYTES
    assert pool(bench).taken == 0, "all are taken, so all are free"
    assert len(bench.exchange) == 0


def test_the_next_slots_are_gathered_while_the_client_reads_and_no_more_than_its_share(bench: Named) -> None:
    at = scattered(bench)
    bench.say(bench.read_ranges(at, ORDER))
    for _ in range(20):
        bench.exchange.advance()
        bench.exchange.prepare()
    held = pool(bench).taken
    assert 3 <= held <= staging.SLOTS_PER_READ
    sent = len(bench.heard())
    assert not bench.exchange.busy(), "it waits for its client"
    bench.say(b.FlowAck(1, 1))
    assert pool(bench).taken < held
    bench.exchange.advance()
    assert len(bench.heard()) >= 1
    assert sent >= 3


def test_a_client_that_acknowledges_every_fourth_frame_gets_everything(bench: Named) -> None:
    at = scattered(bench)
    bench.say(bench.read_ranges(at, ORDER))
    taken, done = 0, False
    for _ in range(200):
        bench.exchange.advance()
        for _, head, _ in bench.heard():
            taken, done = taken + 1, head.last
            if done or taken % 4 == 0:
                bench.say(b.FlowAck(1, taken))
    assert done
    assert pool(bench).taken == 0


@pytest.mark.parametrize("end", ["stall", "session", "connection", "next read", "a lie"])
def test_slots_return_however_a_read_ends(bench: Named, end: str) -> None:
    at = scattered(bench)
    bench.say(bench.read_ranges(at, ORDER))
    bench.exchange.advance()
    bench.heard()
    assert pool(bench).taken > 0
    if end == "stall":
        bench.exchange.tick(BULK_STALL_S - 1)
        assert pool(bench).taken > 0
        bench.exchange.tick(BULK_STALL_S)
    elif end == "session":
        bench.tickets.close(SESSION)
        bench.exchange.tick(1)
    elif end == "connection":
        bench.exchange.lost(b"p")
    elif end == "next read":
        bench.say(bench.read(at, [1]))
    else:
        bench.say(b.FlowAck(1, 99))
        with pytest.raises(BY_NAME["ProtocolError"], match="99 bulk frames were acknowledged"):
            raise refused(bench)
    assert pool(bench).taken == 0


def test_a_client_that_asks_again_and_again_and_takes_nothing_keeps_no_slot_for_ever(bench: Named) -> None:
    at = scattered(bench)
    bench.say(bench.read_ranges(at, ORDER))
    bench.exchange.advance()
    for bench.now in (10.0, 20.0, BULK_STALL_S - 1):
        bench.exchange.now = bench.now
        bench.say(b.FlowAck(1, 1))
        bench.exchange.tick(bench.now)
        bench.exchange.advance()
    assert bench.exchange.next_deadline() == 10.0 + BULK_STALL_S, "one was taken then"
    bench.exchange.tick(10.0 + BULK_STALL_S - 1)
    assert pool(bench).taken > 0
    bench.heard()
    bench.exchange.tick(10.0 + BULK_STALL_S)
    with pytest.raises(BY_NAME["Disconnected"], match="none of its frames was taken"):
        raise refused(bench)
    assert (pool(bench).taken, len(bench.exchange)) == (0, 0)


def test_a_read_that_finds_no_free_slot_gets_content(bench: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOTS_MAX", 4)
    at, bench.made = scattered(bench), b""
    bench.say(bench.read_ranges(at, ORDER), peer=b"stopped")
    for _ in range(8):
        bench.exchange.advance()
        bench.exchange.prepare()
    bench.heard()
    assert pool(bench).taken == 4
    bench.say(bench.read_ranges(at, ORDER))
    found = frames(bench)
    assert named(found) == 0
    assert bench.made == streamed(bench, at)


def test_memory_that_cannot_be_registered_is_not_asked_for_again(bench: Named, monkeypatch: Any) -> None:
    tried: list[int] = []

    def refuse(address: int, nbytes: int) -> object:
        tried.append(nbytes)
        raise Unreachable("ulimit -l")

    monkeypatch.setattr(bench.agent, "register", refuse)
    at = scattered(bench)
    for _ in range(2):
        bench.made = b""
        bench.say(bench.read_ranges(at, ORDER))
        assert named(frames(bench)) == 0
        assert bench.made == streamed(bench, at)
    assert len(tried) == 1


def test_what_is_read_late_does_not_match(bench: Named) -> None:
    """A client that stood still reads a slot after it was given to another read."""
    at, bench.made = scattered(bench), b""
    bench.say(bench.read_ranges(at, ORDER), peer=b"stopped")
    bench.exchange.advance()
    ((_, frame, content),) = bench.heard()
    assert bench.bytes_of(frame, content)
    bench.exchange.lost(b"stopped")
    bench.say(bench.read_ranges(at, ORDER[::-1]))
    frames(bench)
    with pytest.raises(AssertionError):
        bench.bytes_of(frame, content)


def test_offsets_that_are_damaged_take_no_slot_for_ever(bench: Named) -> None:
    at = scattered(bench)
    bench.arena[: at.nbytes].view(np.int64)[:] = 1 << 40
    bench.say(bench.read_ranges(at, ORDER))
    with pytest.raises(BY_NAME["Corruption"], match="point outside"):
        raise refused(bench)
    assert pool(bench).taken == 0


def test_small_parts_and_small_gathers_are_content(bench: Named) -> None:
    at, bench.made = bench.put(x=[np.full(60, row % 251, np.uint8) for row in range(900)]), b""
    bench.say(bench.read_ranges(at, np.random.default_rng(1).permutation(900)))
    assert named(frames(bench)) == 0
    assert pool(bench).taken == 0


def test_what_is_staged_is_deregistered_at_the_end(bench: Named) -> None:
    bench.made = b""
    bench.say(bench.read_ranges(scattered(bench), ORDER))
    frames(bench)
    assert len(bench.agent.regions) >= 1
    bench.registered.close()
    assert not bench.agent.regions
