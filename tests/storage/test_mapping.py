"""Pins, privacy and reuse, on real memory and with real garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.storage.shards import Block, Shard
from transferqueue.errors import BatchEnded, Corruption, Disconnected, Forked, OutOfMemory, ProtocolError
from transferqueue.schema import Field
from transferqueue.storage import Mapping
from transferqueue.storage.memory import mapping
from transferqueue.storage.memory.private_pages import drop_pages, map_private, unmap

NUMBERS = np.arange(4096, dtype=np.int64)


def one_block(shard: Shard, value: Any = NUMBERS) -> Block:
    (block,) = shard.put({"x": value})
    return block


def resident(address: int, nbytes: int) -> bytes:
    """For each page whether it is in memory (mincore)."""
    pages = (ctypes.c_ubyte * (nbytes // 4096))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert libc.mincore(address, nbytes, pages) == 0
    return bytes(pages)


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


# ---------------------------------------------------------------- pins


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "numpy slice": lambda a: a[3:5],
    "numpy slice of a slice": lambda a: a[1:][2:][3:5],
    "numpy of another dtype": lambda a: a.view(np.float32).reshape(-1, 2)[1:],
    "numpy transposed": lambda a: a.reshape(64, -1).T,
    "torch": torch.from_numpy,
    "torch slice": lambda a: torch.from_numpy(a)[3:5],
    "torch of another dtype": lambda a: torch.from_numpy(a).view(torch.bfloat16)[::2],
    "torch storage": lambda a: torch.from_numpy(a).untyped_storage(),
    "arrow buffer": lambda a: pa.py_buffer(a).slice(8, 16),
    "arrow array": lambda a: pa.Array.from_buffers(pa.int64(), 10, [None, pa.py_buffer(a)])[2:4],
    "arrow array of numpy": lambda a: pa.array(a)[3:5],
    "memoryview": lambda a: memoryview(a)[3:5],
    "dlpack": lambda a: torch.from_dlpack(a)[1:],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_any_view_keeps_the_pin_and_the_last_returns_it_once(shard: Shard, hold: Callable[[Any], Any]) -> None:
    block = one_block(shard)
    held = hold(shard.mapping.pin([block])[block.block].view(np.int64))
    gc.collect()
    assert shard.released == []
    del held
    gc.collect()
    assert shard.released == [block.block]


def test_a_nested_tensor_and_an_arrow_column_keep_the_pin(shard: Shard) -> None:
    blocks = shard.put({"x": [[1, 2], [3]]})
    for take in ("nested", "arrow", "ragged"):
        shard.released.clear()
        held = getattr(shard.column("x", blocks), take)()
        gc.collect()
        assert shard.released == []
        del held
        gc.collect()
        assert shard.released == [blocks[0].block]


def test_blocks_of_one_extent_are_told_together_and_once_per_reply(shard: Shard) -> None:
    block = one_block(shard)
    first, second = replace(block, block=7, nbytes=64), replace(block, block=8, offset=block.offset + 64, nbytes=64)
    one = shard.mapping.pin([first, second, first])
    two = shard.mapping.pin([first])
    assert sorted(one) == [7, 8]
    kept = one[8]
    del one
    assert shard.released == []
    del two
    assert shard.released == [7]
    del kept
    assert sorted(shard.released) == [7, 7, 8]


def test_bytes_outside_the_arena_are_corruption_and_leave_no_pin(shard: Shard) -> None:
    block = one_block(shard)
    for wrong in (
        replace(block, block=9, offset=shard.arena.capacity),
        replace(block, block=9, offset=-4096),
        replace(block, block=9, offset=block.offset + 1),
        replace(block, block=9, nbytes=shard.arena.capacity + 64),
    ):
        with pytest.raises(Corruption, match=r"block 9 at .* is not an aligned piece of the arena"):
            shard.mapping.pin([block, wrong])
    gc.collect()
    assert shard.released == []
    assert not shard.mapping._open_pages().viewed


def test_copies_are_this_processes_own_and_hold_nothing(shard: Shard) -> None:
    block = one_block(shard)
    copy = shard.mapping.copies([block])[block.block]
    shard.mapping.writable(block.offset, block.nbytes)[:8] = bytes([255] * 8)
    assert copy.view(np.int64).tolist() == NUMBERS.tolist()
    assert not shard.mapping._open_pages().viewed
    with pytest.raises(Corruption, match="is not an aligned piece of the arena"):
        shard.mapping.copies([replace(block, offset=shard.arena.capacity)])
    del copy
    assert shard.released == []


def test_if_not_all_can_be_mapped_nothing_is_held(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = one_block(shard), one_block(shard)
    held = shard.mapping.pin([second])  # so that another look at the second needs a mapping of its own
    monkeypatch.setattr(mapping, "map_private", lambda *_: map_private(0, 1, 1))  # which the kernel refuses
    with pytest.raises(OutOfMemory, match=r"1 bytes of the arena cannot be mapped .*; raise vm.max_map_count"):
        shard.mapping.pin([first, second])
    gc.collect()
    assert shard.released == []
    assert list(shard.mapping._open_pages().viewed) == [second.extent]
    assert list(held) == [second.block]


def test_views_outlive_the_mapping_and_their_pins_are_still_told(shard: Shard) -> None:
    block = one_block(shard)
    view = shard.mapping.pin([block])[block.block].view(np.int64)[: len(NUMBERS)]
    shard.mapping.close()
    gc.collect()
    assert np.array_equal(view, NUMBERS)
    del view
    assert shard.released == [block.block]
    with pytest.raises(Disconnected, match="was closed in this process; connect again"):
        shard.mapping.pin([block])
    with pytest.raises(Disconnected, match="was closed in this process; connect again"):
        shard.mapping.writable(0, 64)


def test_a_batch_that_ended_lets_go_of_what_nobody_views(shard: Shard) -> None:
    blocks = shard.put({"x": NUMBERS.reshape(64, -1), "y": [[1], [2, 3]] * 32})
    leased = shard.lease(blocks)
    from transferqueue.storage import Column, RowPlacement

    placement = RowPlacement(leased, np.zeros(64, np.int32), np.arange(64, dtype=np.int32))
    x, y = Column(shard.fields["x"], placement), Column(shard.fields["y"], placement)
    view = x.numpy()
    leased.end('the batch of task "train" ended: its lease was acknowledged')
    for use in (x.numpy, y.nested, y.list, lambda: y[0], lambda: x[3:5].torch()):
        with pytest.raises(BatchEnded, match='the batch of task "train" ended'):
            use()
    gc.collect()
    assert shard.released == []
    assert np.array_equal(view.reshape(-1), NUMBERS)
    del view
    assert shard.released == [blocks[0].block]


def test_pins_may_end_in_any_thread_and_inside_a_collection(shard: Shard) -> None:
    block = one_block(shard)
    threads = 4

    def churn() -> None:
        for _ in range(200):
            cycle: list[Any] = [shard.mapping.pin([block])]
            cycle.append(cycle)  # only the collector can end this one

    workers = [threading.Thread(target=churn) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    gc.collect()
    assert shard.released == [block.block] * 200 * threads
    assert not shard.mapping._open_pages().viewed


# ---------------------------------------------------------------- privacy


def test_nobody_sees_what_is_changed_in_a_view(shard: Shard) -> None:
    block = one_block(shard)
    other = Mapping.open(shard.arena.path, shard.arena.capacity, print)
    mine = shard.mapping.pin([block])[block.block].view(np.int64)
    mine[:] = -1
    again = shard.mapping.pin([block])[block.block].view(np.int64)
    theirs = other.pin([block])[block.block].view(np.int64)
    written = np.frombuffer(shard.mapping.writable(block.offset, block.nbytes), np.int64)
    for view in (again, theirs, written):
        assert np.array_equal(view[: len(NUMBERS)], NUMBERS)
    other.close()


def test_a_neighbour_put_into_a_page_that_was_changed_is_seen_as_it_is(shard: Shard) -> None:
    first = replace(one_block(shard), nbytes=64)
    view = shard.mapping.pin([first])[first.block]
    view[:] = 255  # this process now has its own copy of the page, with old bytes where the next block will be
    neighbour = replace(first, block=99, offset=first.offset + 64)
    shard.mapping.writable(neighbour.offset, 64)[:] = b"n" * 64
    assert bytes(shard.mapping.pin([neighbour])[99]) == b"n" * 64
    assert bytes(view) == b"\xff" * 64


def test_reused_memory_shows_the_new_bytes_and_never_the_private_copy(shard: Shard) -> None:
    block = one_block(shard)
    for generation in range(3):
        view = shard.mapping.pin([block])[block.block]
        view[:] = 255
        del view
        new = NUMBERS + generation
        np.frombuffer(shard.mapping.writable(block.offset, block.nbytes), np.int64)[: len(new)] = new
        found = shard.mapping.pin([block])[block.block].view(np.int64)[: len(new)]
        assert np.array_equal(found, new)
        del found
    assert shard.released == [block.block] * 6


def test_private_pages_are_dropped_before_the_pin_is_told(shard: Shard) -> None:
    block = one_block(shard, np.zeros((1, 1 << 20), np.uint8))
    seen: list[int] = []
    mapping = Mapping.open(shard.arena.path, shard.arena.capacity, lambda blocks: seen.append(private_kilobytes(place)))
    view = mapping.pin([block])[block.block]
    place = address_of(view)
    view[:] = 1
    assert private_kilobytes(place) >= 1024
    del view
    assert seen == [0]
    mapping.close()


def private_kilobytes(address: int) -> int:
    """Private dirty memory of the mapping that has this address, as the kernel counts it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "Anonymous:":
            return int(line.split()[1])
    return 0


def test_where_pages_cannot_be_dropped_they_are_mapped_anew() -> None:
    fd = os.memfd_create("locked")
    os.ftruncate(fd, 8192)
    libc = ctypes.CDLL(None, use_errno=True)
    address = map_private(fd, 0, 8192)
    libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert libc.mlock(address, 8192) == 0
    ctypes.memset(address, 255, 8192)
    os.pwrite(fd, b"new", 0)
    drop_pages(address, 8192, fd, 0)
    assert ctypes.string_at(address, 3) == b"new"
    unmap(address, 8192)
    os.close(fd)


def test_the_view_is_the_shared_memory_itself(shard: Shard) -> None:
    block = one_block(shard, np.ones((64, 512 << 10), np.uint8))
    before = anonymous_kilobytes()
    column = shard.column("x", [block])
    view = column.numpy()
    assert view.sum() == 32 << 20
    assert anonymous_kilobytes() - before < 2048, "reading a view copies nothing"
    low = shard.mapping._open_pages().address
    assert low + block.offset <= address_of(view) < low + block.offset + block.nbytes
    assert column.torch().data_ptr() == address_of(view)


def anonymous_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


# ---------------------------------------------------------------- fork, and bad arenas


def test_a_forked_child_returns_nothing_and_is_told_so(shard: Shard) -> None:
    block = one_block(shard)
    view = shard.mapping.pin([block])[block.block]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            shard.mapping.pin([block])
        except Forked as error:
            os.write(write, str(error).encode())
        del view
        gc.collect()
        os.write(write, f" released={shard.released}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "this queue was opened before os.fork; connect again in the child released=[]"
    assert bytes(view[:8]) == bytes(8)
    del view
    assert shard.released == [block.block]


def test_an_arena_that_is_gone_or_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Disconnected, match=r"cannot be opened .No such file or directory.: its server is gone"):
        Mapping.open(str(tmp_path / "gone"), 1 << 20, print)
    (tmp_path / "short").write_bytes(b"x" * 100)
    with pytest.raises(ProtocolError, match="has 100 bytes, but its server says 1048576; it is another file"):
        Mapping.open(str(tmp_path / "short"), 1 << 20, print)


def test_an_arena_beyond_the_address_space_is_refused(tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 42)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "huge")], capture_output=True, text=True, check=True
    )
    assert "of 4398046511104 bytes cannot be mapped" in done.stdout


LIMITED = """
import resource, sys
from transferqueue.errors import OutOfMemory
from transferqueue.storage import Mapping
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    Mapping.open(sys.argv[1], 1 << 42, print)
except OutOfMemory as error:
    print(error)
"""


def test_another_process_sees_the_bytes_and_not_our_changes(shard: Shard) -> None:
    block = one_block(shard)
    view = shard.mapping.pin([block])[block.block]
    view[:] = 255
    script = (
        "import sys, numpy as np\n"
        "from types import SimpleNamespace as Block\n"
        "from transferqueue.storage import Mapping\n"
        "path, capacity, offset, nbytes = sys.argv[1], *map(int, sys.argv[2:])\n"
        "view = Mapping.open(path, capacity, print).pin([Block(block=3, extent=1, offset=offset, nbytes=nbytes)])[3]\n"
        "print(int(view.view(np.int64)[:4096].sum()))\n"
    )
    numbers = [str(number) for number in (shard.arena.capacity, block.offset, block.nbytes)]
    done = subprocess.run(
        [sys.executable, "-c", script, shard.arena.path, *numbers], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == str(NUMBERS.sum())


def test_a_column_of_none_of_the_rows(shard: Shard) -> None:
    blocks = shard.put({"x": [[1, 2], [3]]}, [Field("x", "int32", (None,))])
    column = shard.column("x", blocks, [])
    assert column.list() == []
    assert column.padded().shape == (0, 0)
