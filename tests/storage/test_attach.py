"""An arena outlives its process: what was lent is there for the next one, all else is given back."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from transferqueue.errors import Corruption, InternalError
from transferqueue.limits import MIB, PAGE_BYTES
from transferqueue.storage import Allocator, Arena


def left_behind(tmp_path: Path, capacity: int = 64 * MIB) -> Path:
    """The file of an arena whose process is gone, with extents at 0 and at 1 MiB."""
    arena = Arena.create(tmp_path, capacity)
    arena.ensure(0, 8 * MIB)
    with open(arena.path, "r+b") as file:
        file.write(b"first")
        file.seek(MIB)
        file.write(b"second")
        file.seek(2 * MIB)
        file.write(b"freed")
    arena.close(unlink=False)
    return Path(arena.path)


def test_what_was_lent_is_kept_and_all_else_given_back(tmp_path: Path) -> None:
    file = left_behind(tmp_path)
    allocator = Allocator.holding(64 * MIB, [(MIB, 5000), (0, PAGE_BYTES)])
    arena = Arena.attach(file, allocator)
    with arena.view(0, 5) as one, arena.view(MIB, 6) as two, arena.view(2 * MIB, 5) as three:
        assert (bytes(one), bytes(two), bytes(three)) == (b"first", b"second", bytes(5))
    assert arena.backed == 3 * PAGE_BYTES
    assert os.stat(file).st_blocks * 512 <= arena.backed + PAGE_BYTES
    extent = allocator.allocate(MIB) or -1
    assert extent == PAGE_BYTES or extent >= MIB + 2 * PAGE_BYTES
    arena.ensure(extent, MIB)
    arena.sync()
    arena.close()
    assert not file.exists()


def test_an_allocator_made_from_extents_is_the_one_that_lent_them() -> None:
    dice = random.Random(5)
    first = Allocator(4 * MIB)
    lent: dict[int, int] = {}
    for _ in range(300):
        if lent and dice.random() < 0.4:
            gone = dice.choice(sorted(lent))
            first.free(gone, lent.pop(gone))
        elif (offset := first.allocate(nbytes := dice.randint(1, 60_000))) is not None:
            lent[offset] = nbytes
    second = Allocator.holding(4 * MIB, list(lent.items()))
    assert second.used == first.used
    assert second.free_ranges() == first.free_ranges()
    for offset, nbytes in lent.items():
        second.free(offset, nbytes)
    assert second.free_ranges() == [(0, 4 * MIB)]


@pytest.mark.parametrize(
    "lent", [[(0, 5000), (4096, 100)], [(100, 100)], [(0, 0)], [(4 * MIB - 4096, 8192)], [(-4096, 10)]]
)
def test_extents_that_cannot_be_are_corruption(lent: list[tuple[int, int]]) -> None:
    with pytest.raises(Corruption, match=r"is invalid in an arena of 4194304: .*restore a snapshot"):
        Allocator.holding(4 * MIB, lent)


def test_an_arena_that_is_gone_or_another_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Corruption, match=r"arena .*nothing cannot be opened: No such file"):
        Arena.attach(tmp_path / "nothing", Allocator(MIB))
    file = left_behind(tmp_path)
    with pytest.raises(Corruption, match="has 67108864 bytes, not 1048576; another file replaced it"):
        Arena.attach(file, Allocator(MIB))


def test_only_bytes_of_an_open_arena_are_viewed(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, MIB)
    for offset, nbytes in ((-1, 4), (0, MIB + 1), (MIB, 1)):
        with pytest.raises(InternalError, match="are not in an open arena"):
            arena.view(offset, nbytes)
    arena.close()
    with pytest.raises(InternalError, match="are not in an open arena"):
        arena.view(0, 1)
