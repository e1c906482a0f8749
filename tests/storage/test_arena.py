from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from transferqueue.errors import OutOfMemory, UsageError
from transferqueue.limits import ARENA_SLICE_BYTES, MIB, PAGE_BYTES
from transferqueue.storage import Allocator, Arena, Mapping, available_bytes
from transferqueue.storage.memory.arena import KEEP_BYTES, TRIM_BYTES, surplus


def pages_of(path: str) -> int:
    return os.stat(path).st_blocks * 512


def test_an_arena_takes_no_pages_before_they_are_asked_for() -> None:
    arena = Arena.create(None, 1 << 40)
    assert os.stat(arena.path).st_size == 1 << 40
    assert pages_of(arena.path) == arena.backed == 0
    arena.ensure(0, 5000)
    assert pages_of(arena.path) == arena.backed == 2 * PAGE_BYTES
    arena.ensure(PAGE_BYTES, PAGE_BYTES)
    assert arena.backed == 2 * PAGE_BYTES
    arena.close()
    assert not os.path.exists(arena.path)


def test_an_arena_grows_ahead_slice_by_slice() -> None:
    arena = Arena.create(None, 1 << 40)
    arena.ensure(ARENA_SLICE_BYTES, PAGE_BYTES)
    end = 2 * ARENA_SLICE_BYTES + PAGE_BYTES
    turns = [(arena.grow(0, end), arena.backed - PAGE_BYTES) for _ in range(3)]
    assert turns == [(True, ARENA_SLICE_BYTES), (False, end - PAGE_BYTES), (False, end - PAGE_BYTES)]
    assert pages_of(arena.path) == end
    arena.close()


def test_an_arena_does_not_grow_past_its_end() -> None:
    arena = Arena.create(None, 1 << 20)
    assert not arena.grow(PAGE_BYTES, 1 << 30)
    assert arena.backed == (1 << 20) - PAGE_BYTES
    arena.close()


def test_a_served_arena_is_private_to_its_user_and_goes_with_its_owner(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1 << 20)
    assert Path(arena.path).parent == tmp_path
    assert stat.S_IMODE(os.stat(arena.path).st_mode) == 0o600
    arena.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_can_be_left_for_those_who_restart(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1 << 20)
    arena.close(unlink=False)
    assert [str(path) for path in tmp_path.iterdir()] == [arena.path]


@pytest.mark.parametrize(
    ("capacity", "error", "message"),
    [
        (0, UsageError, "an arena of 0 bytes is invalid"),
        (-5, UsageError, "an arena of -5 bytes is invalid"),
        (1 << 62, OutOfMemory, "cannot be made: .*; ask for less"),
    ],
)
def test_a_capacity_that_is_none_is_refused(capacity: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Arena.create(None, capacity)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no arena can be made in .*missing: No such file or directory; give a directory"
    ):
        Arena.create(tmp_path / "missing", 1 << 20)


def test_bytes_beyond_the_arena_are_refused() -> None:
    arena = Arena.create(None, 1 << 20)
    with pytest.raises(OutOfMemory, match=f"beyond the arena's {1 << 20}"):
        arena.ensure(0, (1 << 20) + 1)
    assert arena.backed == 0
    arena.close()


def test_more_than_the_file_system_has_is_a_typed_error() -> None:
    size = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        arena = Arena.create(Path(directory), 2 * size)
        with pytest.raises(
            OutOfMemory,
            match=r"cannot grow by \d+ bytes \(No space left on device\): it has 0; .* bytes free; free rows",
        ):
            arena.ensure(0, size + PAGE_BYTES)
        assert arena.backed == pages_of(arena.path) == 0
        arena.close()


FULL = """
import sys
import tempfile
from pathlib import Path
from transferqueue.errors import OutOfMemory
from transferqueue.storage import Arena
arena = Arena.create(Path(sys.argv[1]), 1 << 28)
arena.ensure(0, 2 << 20)  # less than a step is there: as much as is needed is taken
assert arena.backed == 2 << 20, arena.backed
try:
    arena.ensure(2 << 20, 2 << 20)
except OutOfMemory as error:
    print(error)
assert arena.backed == 2 << 20
arena.ensure(2 << 20, 1 << 20)
arena.close()
"""


def test_a_full_disk_is_a_typed_error_and_nothing_is_lost(tmp_path: Path) -> None:
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = 'mount -t tmpfs -o size=3m none "$1" && { test -z "$3" || exec "$2" -c "$3" "$1"; }'
    command = [*mount, script, "sh", str(tmp_path), sys.executable]
    if shutil.which("unshare") is None or subprocess.run([*command, ""], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no user mount a small file system")
    done = subprocess.run([*command, FULL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot grow by 2097152 bytes (No space left on device): it has 2097152; " in done.stdout
    assert "bytes free; free rows, enlarge" in done.stdout


def test_cold_pages_go_back_and_what_is_lent_stays() -> None:
    arena, allocator = Arena.create(None, 1 << 30), Allocator(1 << 30)
    mapping = Mapping.open(arena.path, arena.capacity, print)
    extents = [allocator.allocate(8 * MIB) or 0 for _ in range(32)]
    for extent in extents:
        arena.ensure(extent, 8 * MIB)
        mapping.writable(extent, 8 * MIB)[:8] = b"livelive"
    assert arena.trim(allocator) == 0
    for extent in extents[1:]:
        allocator.free(extent, 8 * MIB)
    given = arena.trim(allocator)
    assert arena.backed == pages_of(arena.path) == 256 * MIB - given
    assert arena.backed <= 1.1 * allocator.used + KEEP_BYTES + PAGE_BYTES
    assert arena.trim(allocator) == 0
    assert bytes(mapping.writable(extents[0], 8)) == b"livelive"
    backed, again = arena.backed, allocator.allocate(8 * MIB) or 0
    arena.ensure(again, 8 * MIB)
    assert arena.backed == backed, "what stayed warm is lent first"
    whole = allocator.allocate(200 * MIB) or 0
    arena.ensure(whole, 200 * MIB)
    assert bytes(mapping.writable(whole + 100 * MIB, 8)) == bytes(8), "what was given back comes back as zeros"
    mapping.close()
    arena.close()


def test_pages_that_nobody_needs_are_given_back_when_told() -> None:
    arena = Arena.create(None, 4 * MIB)
    arena.ensure(0, 4 * MIB)
    arena.punch(MIB, 2 * MIB)
    assert pages_of(arena.path) == arena.backed == 2 * MIB
    arena.ensure(0, 4 * MIB)
    assert pages_of(arena.path) == 4 * MIB
    arena.close()


@pytest.mark.parametrize(
    ("backed", "used", "given"),
    [(0, 0, 0), (TRIM_BYTES, 0, 0), (TRIM_BYTES + PAGE_BYTES, 0, TRIM_BYTES + PAGE_BYTES - KEEP_BYTES), (MIB, MIB, 0)],
)
def test_how_many_pages_are_too_many(backed: int, used: int, given: int) -> None:
    assert surplus(backed, used) == given


def test_a_small_arena_is_never_trimmed() -> None:
    arena, allocator = Arena.create(None, TRIM_BYTES), Allocator(TRIM_BYTES)
    extent = allocator.allocate(TRIM_BYTES) or 0
    arena.ensure(extent, TRIM_BYTES)
    allocator.free(extent, TRIM_BYTES)
    assert arena.trim(allocator) == 0
    arena.close()


def test_room_is_what_the_file_system_or_the_machine_has(tmp_path: Path) -> None:
    assert 0 < available_bytes(tmp_path) <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert available_bytes(None) > 64 * MIB
    assert resource.getpagesize() == PAGE_BYTES


def test_pages_that_a_device_has_registered_are_not_returned_before_they_are_given_up() -> None:
    arena = Arena.create(None, 64 * MIB)
    arena.ensure(0, 4 * MIB)
    arena.ensure(8 * MIB, 4 * MIB)
    assert arena.backed_runs(0, 64 * MIB) == [(0, 4 * MIB), (8 * MIB, 12 * MIB)]
    assert arena.backed_runs(MIB, 9 * MIB) == [(MIB, 4 * MIB), (8 * MIB, 9 * MIB)]
    asked: list[tuple[int, int]] = []

    def needed(offset: int, nbytes: int) -> bool:
        asked.append((offset, nbytes))
        return False

    arena.before_punch = needed
    arena.punch(0, 4 * MIB)
    assert (asked, arena.backed, pages_of(arena.path)) == ([(0, 4 * MIB)], 8 * MIB, 8 * MIB)
    arena.ensure(MIB, MIB)
    arena.punch_again()
    assert arena.backed == 8 * MIB, "still"
    arena.before_punch = lambda _offset, _nbytes: True
    arena.punch_again()
    assert arena.backed_runs(0, 64 * MIB) == [(MIB, 2 * MIB), (8 * MIB, 12 * MIB)], "but for what is wanted again"
    assert pages_of(arena.path) == 5 * MIB
    arena.punch_again()
    arena.close()
