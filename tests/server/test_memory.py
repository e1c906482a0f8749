"""Extents lent, and pages taken ahead of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from transferqueue.limits import ARENA_SLICE_BYTES, ARENA_STEP_BYTES, GIB, MIB
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.storage import Arena


@pytest.fixture
def memory() -> Iterator[OwnShardMemory]:
    arena = Arena.create(None, GIB)
    yield OwnShardMemory(arena)
    arena.close()


def settle(memory: OwnShardMemory, now: float = 0.0) -> int:
    """Turns of a loop that has nothing else to do, until nothing is due at `now`."""
    turns = 0
    while (due := memory.due_at) is not None and due <= now:
        memory.trim(now)
        turns += 1
    return turns


def test_pages_are_taken_ahead_a_little_at_a_time(memory: OwnShardMemory) -> None:
    memory.take(MIB)
    assert memory.arena.backed == MIB
    memory.trim(0.0)
    assert memory.arena.backed == MIB + ARENA_SLICE_BYTES
    assert settle(memory) == math.ceil(ARENA_STEP_BYTES / ARENA_SLICE_BYTES) - 1
    assert memory.arena.backed == MIB + ARENA_STEP_BYTES
    assert memory.due_at is None


def test_what_is_ahead_is_lent_without_growing_and_made_up_for(memory: OwnShardMemory) -> None:
    memory.take(MIB)
    settle(memory)
    backed = memory.arena.backed
    memory.take(ARENA_STEP_BYTES // 2 + MIB)
    assert memory.arena.backed == backed
    settle(memory)
    assert memory.arena.backed == memory.used + ARENA_STEP_BYTES


def test_a_flow_through_the_same_memory_grows_nothing(memory: OwnShardMemory) -> None:
    for _ in range(100):
        offset, nbytes = memory.take(8 * MIB) or (0, 0)
        settle(memory)
        memory.give_back(offset, nbytes, now=0.0)
    assert memory.arena.backed <= 8 * MIB + 2 * ARENA_STEP_BYTES


def test_pages_that_were_given_back_are_not_taken_again_for_nothing(memory: OwnShardMemory) -> None:
    offset, nbytes = memory.take(512 * MIB) or (0, 0)
    settle(memory)
    memory.give_back(offset, nbytes, now=0.0)
    settle(memory, now=10.0)
    assert memory.arena.backed <= ARENA_STEP_BYTES
    assert memory.due_at is None


def test_growing_ends_where_the_arena_does(memory: OwnShardMemory) -> None:
    memory.take(GIB - MIB)
    settle(memory)
    assert memory.arena.backed == GIB
