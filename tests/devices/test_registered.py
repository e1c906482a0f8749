"""What of an arena is registered: pages that it has, once, in slices, within a bound, and given up when nothing
copies."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from tests.devices.late import LateDevice
from transferqueue.limits import ARENA_STEP_BYTES, MIB
from transferqueue.storage.devices.registered import RegisteredPages, close_unused
from transferqueue.storage.memory import page_holds
from transferqueue.storage.memory.arena import Arena
from transferqueue.storage.memory.mapping import Mapping, granted_place, pinned_place


class Block:
    def __init__(self, offset: int, nbytes: int, block: int = 1, extent: int = 1) -> None:
        self.offset, self.nbytes, self.block, self.extent = offset, nbytes, block, extent


class Opened:
    """An arena, mapped; its pages registered with a device."""

    def __init__(self, capacity: int = 1 << 30, bytes_max: int = 1 << 40) -> None:
        self.arena = Arena.create(None, capacity)
        self.mapping = Mapping.open(self.arena.path, capacity, print)
        self.device = LateDevice()
        self.pages = RegisteredPages(self.mapping._open_pages(), bytes_max)

    def write(self, offset: int, data: bytes) -> None:
        self.arena.ensure(offset, len(data))
        self.mapping.writable(offset, len(data))[:] = data

    def range(self, offset: int, nbytes: int):
        return self.pages.range(self.device, offset, nbytes)

    def registered(self) -> list[tuple[int, int]]:
        """Registered bytes of the arena, in MiB."""
        base = self.pages._address
        return sorted(((at - base) // MIB, (at - base + size) // MIB) for at, size in self.device.regions.items())


@pytest.fixture
def opened():
    made = Opened()
    yield made
    made.pages.close()
    made.arena.close()


def test_only_pages_that_the_file_has_are_registered_and_none_is_made(opened: Opened) -> None:
    for at in (0, 1, 2, 8):
        opened.write(at * MIB, b"x" * MIB)
    opened.range(MIB, 4096).end()
    assert opened.registered() == [(0, 3)]
    opened.range(8 * MIB, MIB).end()
    assert opened.registered() == [(0, 3), (8, 9)]
    assert opened.arena.backed == 4 * MIB
    assert os.stat(opened.arena.path).st_blocks * 512 == 4 * MIB


def test_growth_registers_what_is_new_and_nothing_twice(opened: Opened) -> None:
    opened.write(0, b"x" * MIB)
    opened.range(0, MIB).end()
    opened.write(MIB, b"y" * MIB)
    found = opened.range(MIB // 2, MIB)
    assert [size for _, size in found.pieces] == [MIB // 2, MIB // 2]
    assert opened.registered() == [(0, 1), (1, 2)]
    opened.range(0, 2 * MIB).end()
    assert opened.device.registered_ever == 2


def test_a_region_ends_at_its_slice(opened: Opened) -> None:
    start = ARENA_STEP_BYTES - MIB
    opened.write(start, b"x" * (2 * MIB))
    found = opened.range(start, 2 * MIB)
    assert [size for _, size in found.pieces] == [MIB, MIB]
    assert opened.registered() == [(63, 64), (64, 65)]


def test_memory_that_is_granted_and_not_yet_written_is_registered(opened: Opened) -> None:
    opened.arena.ensure(0, 4 * MIB)
    opened.range(MIB, 2 * MIB).end()
    assert opened.registered() == [(1, 3)]


def test_registered_pages_are_not_returned_until_they_are_given_up(opened: Opened) -> None:
    opened.write(0, b"x" * (4 * MIB))
    used = opened.range(0, MIB)
    opened.arena.punch(0, 8 * MIB)
    assert opened.arena.backed == 4 * MIB
    opened.pages.give_up()
    assert opened.registered() == [(0, 4)], "a copy uses it"
    used.end()
    used.end()
    opened.pages.give_up()
    assert opened.registered() == []
    opened.arena.punch_again()
    assert opened.arena.backed == 0


def test_while_the_owner_returns_pages_nothing_is_registered(opened: Opened) -> None:
    opened.write(0, b"x" * (4 * MIB))
    seen: list[object] = []

    def registers_meanwhile(_offset: int, _nbytes: int) -> bool:
        seen.append(opened.range(0, MIB))
        return True

    opened.arena.before_punch = registers_meanwhile
    opened.arena.punch(2 * MIB, 2 * MIB)
    assert seen == [None]
    assert not opened.device.regions
    assert opened.range(0, MIB) is not None


def test_the_bound_gives_up_the_longest_unused_and_refuses_what_is_all_in_use() -> None:
    opened = Opened(bytes_max=2 * MIB)
    for at in (0, 2, 4, 6):
        opened.write(at * MIB, b"x" * MIB)
    opened.range(0, MIB).end()
    second = opened.range(2 * MIB, MIB)
    opened.range(4 * MIB, MIB).end()
    assert opened.registered() == [(2, 3), (4, 5)]
    third = opened.range(4 * MIB, MIB)
    assert opened.range(6 * MIB, MIB) is None
    second.end()
    opened.range(6 * MIB, MIB).end()
    assert opened.registered() == [(4, 5), (6, 7)]
    third.end()
    opened.pages.close()
    assert not opened.device.regions


def test_a_device_that_cannot_register_is_asked_once(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    opened.write(0, b"x" * MIB)
    asked: list[int] = []
    opened.device.register = lambda address, nbytes: bool(asked.append(nbytes))  # type: ignore[method-assign]
    assert opened.range(0, MIB) is None
    assert opened.range(0, MIB) is None
    assert asked == [MIB]
    assert "cannot register" in caplog.text
    opened.arena.punch(0, MIB)
    assert opened.arena.backed == 0, "what was refused is not held"


def test_where_pages_cannot_be_held_none_is_registered_and_all_are_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a kernel without these locks (gVisor)."""

    def lacks_locks(*_: object) -> object:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(page_holds.fcntl, "fcntl", lacks_locks)
    opened = Opened()
    opened.write(0, b"x" * MIB)
    assert opened.range(0, MIB) is None
    assert "no open file description locks" in caplog.text
    opened.arena.punch(0, MIB)
    assert opened.arena.backed == 0
    opened.pages.close()
    opened.arena.close()


def test_two_devices_of_a_class_share_pages_and_each_ends_what_it_registered(opened: Opened) -> None:
    first, second = opened.device, LateDevice("late:1")
    opened.write(0, b"x" * MIB)
    opened.range(0, MIB).end()
    opened.write(4 * MIB, b"x" * MIB)
    opened.device = second
    for at in (0, 4 * MIB):
        opened.range(at, MIB).end()
    assert len(first.regions) == len(second.regions) == 1
    opened.pages.give_up()
    assert not first.regions
    assert not second.regions


def test_threads_register_each_page_once(opened: Opened) -> None:
    opened.write(0, b"x" * (8 * MIB))
    threads = [threading.Thread(target=lambda at=at: opened.range(at * MIB, MIB).end()) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert opened.registered() == [(0, 8)]


def test_a_forked_child_ends_no_hold_of_its_parent(opened: Opened) -> None:
    opened.write(0, b"x" * (4 * MIB))
    opened.range(0, MIB).end()
    child = os.fork()
    if not child:
        opened.pages.give_up()
        opened.pages.close()
        os._exit(opened.range(0, 64 * MIB) is not None)
    assert os.waitpid(child, 0)[1] == 0
    opened.arena.punch(0, 4 * MIB)
    assert opened.arena.backed == 4 * MIB
    assert opened.registered() == [(0, 4)]


def test_places_are_told_of_pinned_and_granted_memory_and_of_nothing_else(opened: Opened) -> None:
    opened.write(0, b"x" * MIB)
    views = opened.mapping.pin([Block(4096, 8192)])[1]
    again = opened.mapping.pin([Block(4096, 8192)])[1]  # mapped by itself, since the extent is viewed already
    copies = opened.mapping.copies([Block(4096, 8192)])[1]
    for memory in (views[64:].view(np.int64), np.ndarray((8,), np.int64, views, 64), again[64:]):
        place = pinned_place(memory)
        assert place is not None
        assert place.offset == 4096 + 64
    assert pinned_place(copies) is None
    assert pinned_place(np.arange(4)) is None
    granted = granted_place(np.frombuffer(opened.mapping.writable(MIB, 4096), np.uint8))
    assert granted is not None
    assert granted.offset == MIB
    assert granted_place(views) is None
    assert granted_place(np.zeros(8, np.uint8)) is None


def test_what_an_arena_had_registered_ends_with_its_mapping() -> None:
    from transferqueue.storage.devices.registered import registered_pages

    opened = Opened()
    opened.write(0, b"x" * MIB)
    pages = registered_pages(opened.mapping._open_pages(), opened.device)
    pages.range(opened.device, 0, MIB).end()  # type: ignore[union-attr]
    assert opened.device.regions
    opened.pages.close()
    opened.mapping.close()
    close_unused()
    assert not opened.device.regions
