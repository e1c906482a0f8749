"""Pages that a process holds stay in the arena; the kernel ends its holds with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transferqueue.limits import DEVICE_IDLE_S, MIB
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.page_holds import claim, hold, let_go, open_again, unheld

HOLDER = """
import os, sys
from transferqueue.storage.memory.page_holds import hold
fd = os.open(sys.argv[1], os.O_RDWR)
assert hold(fd, int(sys.argv[2]), int(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["memfd", "file"])
def arena(request: pytest.FixtureRequest, tmp_path: Path):
    made = Arena.create(None if request.param == "memfd" else tmp_path, 64 * MIB)
    yield made
    made.close()


def blocks_of(arena: Arena) -> int:
    return os.stat(arena.path).st_blocks * 512


def test_parts_that_others_hold_are_left_out(arena: Arena) -> None:
    fd, owner = open_again(arena._fd), arena._fd
    assert unheld(owner, 0, 16 * MIB) == [(0, 16 * MIB)]
    assert hold(fd, 2 * MIB, 4 * MIB)
    assert hold(fd, 8 * MIB, 9 * MIB)
    assert unheld(owner, 0, 16 * MIB) == [(0, 2 * MIB), (4 * MIB, 8 * MIB), (9 * MIB, 16 * MIB)]
    assert unheld(owner, 3 * MIB, 4 * MIB) == []
    let_go(fd, 2 * MIB, 3 * MIB)
    let_go(fd, 3 * MIB, 3 * MIB)  # of no bytes
    assert unheld(owner, 0, 4 * MIB) == [(0, 3 * MIB)]
    os.close(fd)
    assert unheld(owner, 0, 16 * MIB) == [(0, 16 * MIB)]


def test_who_claims_pages_keeps_holders_away_and_holders_keep_claims_away(arena: Arena) -> None:
    fd = open_again(arena._fd)
    assert claim(arena._fd, 0, MIB)
    assert not hold(fd, 0, 2 * MIB)
    assert hold(fd, MIB, 2 * MIB)
    let_go(arena._fd, 0, MIB)
    assert hold(fd, 0, 2 * MIB)
    assert not claim(arena._fd, 0, 4096)
    os.close(fd)


def test_held_pages_are_neither_trimmed_nor_punched_and_return_after(arena: Arena) -> None:
    allocator = Allocator(arena.capacity)
    offset = allocator.allocate(32 * MIB)
    assert offset == 0
    arena.ensure(0, 32 * MIB)
    arena._map[8 * MIB : 8 * MIB + 4] = b"kept"  # type: ignore[index]
    allocator.free(0, 32 * MIB)
    fd = open_again(arena._fd)
    assert hold(fd, 8 * MIB, 12 * MIB)
    arena.punch(0, 32 * MIB)
    assert arena.backed == 4 * MIB
    assert bytes(arena._map[8 * MIB : 8 * MIB + 4]) == b"kept"  # type: ignore[index]
    arena.punch_again()
    assert arena.backed == 4 * MIB
    os.close(fd)
    arena.punch(40 * MIB, MIB)  # a later call takes what is free by then
    assert arena.backed == 0
    assert blocks_of(arena) == 0


def test_trim_returns_what_nobody_holds(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferqueue.storage.memory.arena.surplus", lambda backed, used: backed - used)
    allocator = Allocator(arena.capacity)
    assert allocator.allocate(32 * MIB) == 0
    arena.ensure(0, 32 * MIB)
    allocator.free(0, 32 * MIB)
    fd = open_again(arena._fd)
    assert hold(fd, 8 * MIB, 12 * MIB)
    assert arena.trim(allocator) == 28 * MIB
    assert (arena.backed, allocator.warm, arena.held) == (4 * MIB, 4 * MIB, True)
    os.close(fd)
    assert arena.trim(allocator) == 4 * MIB
    assert not arena.held


def test_a_server_trims_again_when_pages_were_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferqueue.storage.memory.arena.surplus", lambda backed, used: backed - used)
    memory = OwnShardMemory(Arena.create(None, 64 * MIB))
    place = memory.take(8 * MIB)
    assert place is not None
    memory.due_at = None  # no page is reserved ahead
    fd = open_again(memory.arena._fd)
    assert hold(fd, place[0], place[0] + MIB)
    memory.give_back(*place, now=0.0)
    memory.trim(100.0)
    assert memory.arena.backed == MIB
    assert memory.due_at == 100.0 + DEVICE_IDLE_S
    os.close(fd)
    memory.trim(200.0)
    assert memory.arena.backed == 0
    assert memory.due_at is None


def test_holds_end_with_their_process_and_are_seen_by_the_next_owner(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 64 * MIB)
    arena.ensure(0, 32 * MIB)
    file = arena._file
    assert file is not None
    command = [sys.executable, "-c", HOLDER, str(file), "0", str(4 * MIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        arena.close(unlink=False)
        again = Arena.attach(file, Allocator.holding(64 * MIB, [(16 * MIB, MIB)]))
        assert again.backed == 5 * MIB  # what is allocated, and what is held
        again.punch(0, 16 * MIB)
        assert again.backed == 5 * MIB
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    again.punch_again()
    assert again.backed == MIB
    again.close()
