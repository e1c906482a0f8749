"""Bytes on a disk that changed while the server runs: found by a client that asks for it, before anybody has them."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.errors import Corruption, UsageError
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.durability_level import Level
from transferqueue.server.process.assembly import ServerProcess
from transferqueue.transport import IpcAddress


@pytest.fixture
def disk(tmp_path):
    """The address of a server at level disk, and the file of its memory."""
    made = Future()

    def live():
        state = StateDirectory(tmp_path / "state", Level.DISK, first_epoch=1, arena_bytes=16 << 20)
        made.set_result(server := ServerProcess(IpcAddress(tmp_path / "run" / "q.sock"), state))
        server.run()

    thread = threading.Thread(target=live)
    thread.start()
    server = made.result(20)
    yield server.address, tmp_path / "state" / "arena"
    server.stop()
    thread.join(20)


def flip(file, value):
    """Change a bit of the only place where this number lies."""
    data = file.read_bytes()
    at = data.index(np.int64(value).tobytes())
    assert data.count(np.int64(value).tobytes()) == 1
    with open(file, "r+b") as arena:
        arena.seek(at)
        arena.write(bytes([data[at] ^ 1]))


def filled(queue):
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"], retry=tq.Retry(attempts=2))])
    for row in range(3):
        table.put(x=[np.arange(3) + 1_000_003 * (row + 1)])
    return table


def test_damaged_rows_are_named_and_never_handed_out(disk):
    address, file = disk
    with tq.connect(address) as queue, tq.connect(address, verify=True) as careful:
        filled(queue)
        flip(file, 1_000_003 * 2)
        table = careful.table("t")
        with pytest.raises(
            Corruption, match=r'rows 1 of table "t" are damaged: block \d+ .*with their x, does not match'
        ):
            table.read([0, 1, 2])
        for _ in range(2):
            with pytest.raises(Corruption, match=r'rows 1 of task "train" \(table "t"\) are damaged'):
                table.lease("train", rows=3, timeout_s=20)
        with table.lease("train", rows=2, timeout_s=20) as batch:
            assert batch.rows.tolist() == [0, 2]
        found = queue.audit().tables["t"]
        assert (found.rows_done, found.rows_dropped) == (2, 1)


def test_damage_of_what_rows_continue_is_theirs(disk):
    address, file = disk
    with tq.connect(address) as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        first, other = table.put(x=[[2_000_003, 1], [5]])
        second, third = table.put(x=[[3_000_017], [7]], parent=[first, -1])
        last = int(table.put(x=[[9]], parent=second)[0])
        with tq.connect(address, verify=True) as careful:
            assert careful.table("t").read(last)["x"].list() == [[2_000_003, 1, 3_000_017, 9]]
        flip(file, 3_000_017)
        with tq.connect(address, verify=True) as careful:
            assert careful.table("t").read([first, other])["x"].list() == [[2_000_003, 1], [5]]
            with pytest.raises(Corruption, match=r"rows 2, 3, 4 of .* are damaged"):
                careful.table("t").read([first, other, second, third, last])


def test_who_does_not_ask_gets_them(disk):
    """What the README says of this level; `verify` costs a pass over the bytes."""
    address, file = disk
    with tq.connect(address) as queue:
        table = filled(queue)
        flip(file, 1_000_003)
        assert table.read([0])["x"].list()[0][0] != 1_000_003


def test_a_block_is_compared_once(disk):
    address, file = disk
    with tq.connect(address, verify=True) as queue:
        table = filled(queue)
        assert len(table.read([0, 1, 2])) == 3
        flip(file, 1_000_003)
        table.read([0])  # it was right when it came


def test_what_cannot_be_compared_is_refused(disk):
    address, _ = disk
    with pytest.raises(UsageError, match="verify='yes' is neither True nor False"):
        tq.connect(address, verify="yes")
    with (
        tq.connect() as queue,
        pytest.raises(UsageError, match=r"have none: it does not keep rows on a disk; connect without"),
    ):
        tq.connect(queue.address, verify=True)
    with pytest.raises(UsageError, match="have none"):
        tq.connect(verify=True)
