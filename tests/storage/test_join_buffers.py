"""Pieces are joined in order, and memory is used again only when nobody can see it any more."""

from __future__ import annotations

import random

import numpy as np
import pytest

from transferqueue.storage.columns.joined import PieceJoiner
from transferqueue.storage.memory.join_buffers import JoinBuffers
from transferqueue.storage.memory.private_pages import memory_address

MEMORY = np.random.default_rng(0).integers(0, 255, 4096, dtype=np.uint8)


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    buffers = JoinBuffers(2)
    first = buffers.join([MEMORY[:50].data, MEMORY[10:20].data])
    address = memory_address(first)
    assert first.tobytes() == MEMORY[:50].tobytes() + MEMORY[10:20].tobytes()
    view = first.data[5:]
    del first
    second = buffers.join([MEMORY[50:100].data])
    assert memory_address(second) != address, "a view of it is left"
    assert bytes(view) == MEMORY[5:50].tobytes() + MEMORY[10:20].tobytes()
    del view
    assert memory_address(buffers.join([MEMORY[:60].data])) == address


def test_what_is_beyond_the_kept_buffers_has_memory_of_its_own() -> None:
    buffers = JoinBuffers(1)
    found = [buffers.join([MEMORY[at : at + 9].data]) for at in range(5)]
    assert [each.tobytes() for each in found] == [MEMORY[at : at + 9].tobytes() for at in range(5)]
    assert len(buffers._buffers) == 1


def test_a_buffer_holds_more_and_less_than_before() -> None:
    buffers = JoinBuffers(1)
    for size in (10, 4000, 7, 0, 300):
        assert buffers.join([MEMORY[:size].data]).tobytes() == MEMORY[:size].tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_all_bytes_come_in_order_in_pieces_of_one_size(seed: int) -> None:
    rng = random.Random(seed)
    joiner = PieceJoiner(JoinBuffers(1).join, rng.choice([1, 7, 64, 500, 5000]))
    expected, found = b"", []
    for _ in range(rng.randrange(8)):
        lows = np.array([rng.randrange(4000) for _ in range(rng.randrange(6))], np.int64)
        highs = np.minimum(lows + [rng.choice([1, 3, 64, 900]) for _ in lows], 4096).astype(np.int64)
        expected += b"".join(MEMORY[low:high].tobytes() for low, high in zip(lows, highs, strict=True))
        found += [piece.tobytes() for piece in joiner.add_ranges(MEMORY.data, lows, highs, np.cumsum(highs - lows))]
        more = MEMORY[: rng.choice([0, 1, 64, 1000])]
        expected += more.tobytes()
        found += [piece.tobytes() for piece in joiner.add(more.data)]
    found += [piece.tobytes() for piece in joiner.rest()]
    assert b"".join(found) == expected
    assert all(len(piece) == joiner._piece_bytes for piece in found[:-1])
