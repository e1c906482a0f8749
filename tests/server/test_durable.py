"""State directories: what the next server finds, what it refuses, what is swept and what is not."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.server.nodes import Bench, Client, Watched
from tests.server.test_shards import Joined
from transferqueue.errors import AddressInUse, Corruption, UsageError
from transferqueue.limits import MIB, PAGE_BYTES
from transferqueue.policies import Manual, Task
from transferqueue.schema import Field
from transferqueue.server import durable, evidence
from transferqueue.server.durable import Durable
from transferqueue.server.journal import Level
from transferqueue.server.memory import Memory
from transferqueue.server.node import Node, Place
from transferqueue.server.resuming import resume
from transferqueue.server.runtime import served_arena, sweep_arenas
from transferqueue.transport import FileLock, this_host
from transferqueue.wire import messages as m

LEVELS = [Level.PROCESS, Level.DISK]
BIG = Field("x", "int64", (None,))


@pytest.fixture
def shared(tmp_path):
    found = tmp_path / "shm"
    found.mkdir()
    return found


class Life(Bench):
    """A node on a state directory, driven by hand. `crash` ends it as SIGKILL would."""

    def __init__(self, path, level, shared, **options):
        self.state = Durable(path, level, first_epoch=100, arena_bytes=MIB, shared=shared, **options)
        self.watched, self.clients, self.answered = Watched(), 0, {}
        ledger = self.state.ledger
        memory = Memory(self.state.arena.arena, self.state.allocator, len(ledger.state.core.blocks.extents))
        place = Place(
            epoch=ledger.epoch, address="ipc:///x", runtime="/r", version="0", pid=os.getpid(), started_at=0.0
        )
        self.node = Node(ledger, memory, place, watcher=self.watched, durability=self.state)
        self.now = self.state.clock()
        self.lost = resume(self.node, self.state)
        self.deliver()

    def deliver(self):
        self.node.commit()
        super().deliver()

    def crash(self):
        self.state.close()

    @property
    def file(self):
        return Path(self.state.arena.arena.path)


@pytest.fixture
def lives(tmp_path, shared):
    """Starts lives, one after another; the last is ended."""
    made = []

    def start(level=Level.PROCESS, path=tmp_path / "state", **options):
        if made:
            made[-1].crash()
        made.append(Life(path, level, shared, **options))
        made[-1].clients = 100 * len(made)
        return made[-1]

    yield start
    for life in made:
        life.crash()


def again(life, client):
    """The same client, with the next life."""
    found = Client.__new__(Client)
    vars(found).update(vars(client), bench=life, peer=b"reconnected")
    assert found.ask(found.hello).session == client.session
    return found


def held_lock(tmp_path):
    lock = FileLock(tmp_path / "client.lock")
    assert lock.take()
    return lock


@pytest.mark.parametrize("level", LEVELS)
def test_the_next_server_goes_on(lives, level):
    first = lives(level)
    client = first.client()
    client.create_table()
    client.ask(client.put(3))
    leased = client.ask(m.Lease("t", "train", rows=2))
    second = lives(level)
    assert second.node.place.epoch == first.node.place.epoch + 1
    assert second.file == first.file
    client = again(second, client)
    assert client.ask(m.Ack("t", leased.lease, leased.token)) == m.Done(2)
    assert client.ask(m.Lease("t", "train", rows=1)).token > leased.token


def test_extents_that_are_in_use_are_not_lent_again(lives):
    first = lives()
    client = first.client()
    granted = client.ask(m.Grant(100_000))
    client.bench.node.commit()
    used = first.node.memory.used
    second = lives()
    assert (second.node.memory.used, second.node.memory.extents) == (used, 1)
    other = second.client().ask(m.Grant(100_000))
    assert abs(other.offset - granted.offset) >= 100_000
    again(second, client).ask(m.ReturnGrant(granted.extent))
    assert second.node.memory.extents == 1


def test_what_was_not_committed_never_happened(lives):
    first = lives()
    client = first.client()
    client.create_table()
    first.deliver = lambda: None
    client.post(client.put(3))
    second = lives()
    assert second.node.ledger.state.tables["t"].rows_put == 0


def test_time_stands_still_between_lives(lives):
    first = lives()
    client = first.client()
    client.create_table()
    first.pass_time(9.0)
    client.ask(client.put(1))
    second = lives()
    assert first.now <= second.now < first.now + 5


def test_files_are_private(lives):
    life = lives()
    for path in [life.state.path, *life.state.path.iterdir(), life.file.parent, *life.file.parent.iterdir()]:
        mode = path.stat(follow_symlinks=False).st_mode
        assert stat.S_ISLNK(mode) or not mode & 0o077, path


# ---------------------------------------------------------------- clients of the life before


def local(life, lock, **hello):
    return life.client(pid=os.getpid(), host=this_host(), lock=str(lock.path), **hello)


def test_a_client_that_lives_keeps_its_session(lives, tmp_path):
    lock = held_lock(tmp_path)
    first = lives()
    client = local(first, lock)
    client.create_table()
    client.ask(client.put(1))
    leased = client.ask(m.Lease("t", "train", rows=1))
    second = lives()
    assert second.watched.pidfds.keys() == {client.session}
    second.pass_time(4.0)
    assert again(second, client).ask(m.Ack("t", leased.lease, leased.token)) == m.Done(1)
    lock.release()


def test_a_client_that_died_meanwhile_is_found_dead(lives, tmp_path):
    lock = held_lock(tmp_path)
    first = lives()
    client = local(first, lock)
    client.create_table()
    client.ask(client.put(1))
    client.ask(m.Lease("t", "train", rows=1))
    client.ask(m.Grant(5000))
    lock.release()
    second = lives()
    assert len(second.node.sessions) == 0
    assert second.node.memory.extents == 0
    assert second.client().ask(m.Lease("t", "train", rows=1)).content.rows == bytes(8)


def test_memory_of_a_dead_process_stays_while_its_lock_is_held(lives, tmp_path, monkeypatch):
    """A forked child, or a view, holds the lock: leases return at once, memory when the lock is free."""
    lock = held_lock(tmp_path)
    first = lives()
    client = local(first, lock)
    client.ask(m.Grant(5000))
    monkeypatch.setattr(evidence, "_pidfd_of", _no_such_process)
    second = lives()
    assert len(second.node.sessions) == 0
    assert second.node.memory.extents == 1
    third = lives()
    assert third.node.memory.extents == 1
    lock.release()
    third.pass_time(5.0)
    assert third.node.memory.extents == 0


def _no_such_process(pid):
    raise UsageError(f"process {pid} does not exist")


def test_a_distant_client_is_waited_for_and_judged_by_silence(lives):
    first = lives()
    client = first.client(host="elsewhere")
    client.ask(m.Grant(5000))
    second = lives()
    second.pass_time(9.0)
    assert len(second.node.sessions) == 1
    second.pass_time(2.0)
    assert len(second.node.sessions) == 0
    assert second.node.memory.extents == 0


# ---------------------------------------------------------------- what is refused


def test_two_servers_never_have_one_state(lives, tmp_path, shared):
    lives()
    with pytest.raises(AddressInUse, match=r"state directory .*/state is in use by a server that lives; stop it"):
        Durable(tmp_path / "state", Level.PROCESS, first_epoch=1, shared=shared)


def test_another_level_is_refused(lives):
    lives(Level.PROCESS).crash()
    with pytest.raises(
        UsageError, match="was made with durability process, not disk; start with that, or name another"
    ):
        lives(Level.DISK)
    lives(Level.PROCESS)


def test_a_directory_that_others_can_read_is_refused(tmp_path, shared):
    (tmp_path / "state").mkdir(mode=0o755)
    with pytest.raises(UsageError, match=r"state directory .* has mode 755: other users could open the queue"):
        Durable(tmp_path / "state", Level.PROCESS, first_epoch=1, shared=shared)
    assert not list((tmp_path / "state").iterdir())


def test_what_cannot_be_read_is_reported_and_left(lives):
    life = lives()
    life.crash()
    about = life.state.path / "about.json"
    before = about.read_bytes()
    about.write_bytes(b"{")
    with pytest.raises(Corruption, match=r"about.json cannot be read .*restore a snapshot, or start with an empty one"):
        lives()
    about.write_bytes(before)
    lives()


def test_a_journal_without_its_memory_is_refused(lives):
    life = lives()
    life.client()
    life.crash()
    link = life.state.path / "arena"
    target = link.readlink()
    link.unlink()
    with pytest.raises(
        Corruption, match="has a journal, but nothing says which memory it speaks of; restore a snapshot"
    ):
        lives()
    link.symlink_to(target)
    lives()


@pytest.mark.parametrize("level", LEVELS)
def test_an_arena_of_another_size_is_reported(lives, level):
    life = lives(level)
    life.client().ask(m.Grant(MIB // 2))
    life.crash()
    os.truncate(life.file, 4096)
    with pytest.raises(Corruption, match="restore a snapshot"):
        lives(level)


# ---------------------------------------------------------------- sweeping


def test_an_arena_that_a_state_names_is_never_swept(lives, shared):
    life = lives()
    life.crash()
    (root,) = shared.iterdir()
    sweep_arenas(root)
    served_arena(MIB, shared).close()
    assert life.file.exists()
    assert lives().file == life.file


def test_an_arena_that_no_state_names_any_more_is_swept(lives, shared):
    life = lives()
    life.crash()
    for path in life.state.path.iterdir():
        path.unlink()
    served_arena(MIB, shared).close()
    assert not list(shared.iterdir())


def test_an_arena_whose_state_names_another_is_swept(lives, shared, tmp_path):
    life = lives()
    life.crash()
    (life.state.path / "arena").unlink()
    (life.state.path / "arena").symlink_to(tmp_path / "other" / "arena")
    (root,) = shared.iterdir()
    sweep_arenas(root)
    assert not list(root.iterdir())


def test_without_room_on_shared_memory_the_arena_lies_in_the_state(lives, tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "arena_root", lambda shared: None)
    life = lives()
    assert life.file.parent == life.state.path
    client = life.client()
    client.create_table()
    client.ask(client.put(2))
    assert lives().node.ledger.state.tables["t"].rows_put == 2


# ---------------------------------------------------------------- reboots


def reboot(monkeypatch):
    monkeypatch.setattr(durable, "this_boot", lambda: "another boot")


def test_what_level_process_held_is_gone_after_a_reboot_and_told(lives, monkeypatch, caplog):
    life = lives()
    client = life.client()
    client.create_table()
    client.ask(client.put(3))
    life.crash()
    life.file.unlink()
    reboot(monkeypatch)
    second = lives()
    assert 'is gone (was the machine rebooted?); beginning anew. Rows that are lost: {"t": 3}' in caplog.text
    assert not second.node.ledger.state.tables
    assert (second.state.path / "lost-journal.sqlite").exists()
    assert len(second.node.sessions) == 0


def write(life, client, rows, fill):
    """A block of `rows` int64 rows of one value each, written into a grant of the client, and put."""
    granted = client.ask(m.Grant(4096))
    values = b"".join(struct_q(fill) for _ in range(rows))
    offsets = b"".join(struct_q(number) for number in range(rows + 1))
    data = offsets.ljust(-(-len(offsets) // 64) * 64, b"\0") + values
    with open(life.file, "r+b") as file:
        file.seek(granted.offset)
        file.write(data)
    placed = m.Placed(granted.extent, granted.offset, _size(rows), rows, ["x"], [rows])
    return client.ask(m.Put("t", rows, m.Columns(fields=[BIG], blocks=[placed])))


def struct_q(value):
    return value.to_bytes(8, "little", signed=True)


def _size(rows):
    from transferqueue.schema import layout

    return layout([BIG], rows, [rows])[1]


def test_disk_checks_every_block_after_a_reboot_and_serves_none_that_is_damaged(lives, monkeypatch):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    for fill in range(4):
        assert isinstance(write(life, client, 2, fill), m.PutRows)
    client.ask(m.Lease("t", "train", rows=2))
    blocks = life.node.ledger.state.core.blocks.blocks
    assert all(one.at.checksum for one in blocks.values())
    torn = blocks[2].at
    life.crash()
    with open(life.file, "r+b") as file:
        file.seek(torn.offset + torn.nbytes - 1)
        file.write(b"\xff")
    reboot(monkeypatch)
    second = lives(Level.DISK)
    assert second.lost == {"t": [2, 3]}
    client = second.client()
    rows = client.ask(m.Lease("t", "train", rows=8, at_least=1)).content.rows
    assert list(memoryview(rows).cast("q")) == [0, 1, 4, 5, 6, 7]
    table = second.node.ledger.state.tables["t"]
    assert (table.rows_put, table.rows_live, table.rows_dropped) == (8, 6, {"lost": 2})
    third = lives(Level.DISK)
    assert third.lost == {}
    assert third.node.ledger.state.tables["t"].rows_dropped == {"lost": 2}


def test_rows_that_were_kept_lack_their_values_and_weights_are_gone(lives, monkeypatch):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG], retention=Manual()))
    write(life, client, 2, 1)
    leased = client.ask(m.Lease("t", "train", rows=2))
    client.ask(m.Ack("t", leased.lease, leased.token))
    granted = client.ask(m.Grant(4096))
    weight = Field("w", "float32", (4,))
    client.ask(m.Publish("policy", 3, [weight], [m.Placed(granted.extent, granted.offset, 64, 1, ["w"], [0])]))
    life.crash()
    with open(life.file, "r+b") as file:
        file.write(b"\xff" * (64 << 10))
    reboot(monkeypatch)
    second = lives(Level.DISK)
    assert second.lost == {}
    client = second.client()
    table = second.node.ledger.state.tables["t"]
    assert (table.rows_done, table.rows_dropped, table.rows.pages.resident) == (2, {}, 2)
    assert 'does not have "x"' in client.ask(m.Read("t", np.arange(2).tobytes(), ["x"])).text
    assert "version 3" in client.ask(m.Pull("policy", version=3)).text
    assert second.node.memory.extents == 0


def test_within_one_boot_blocks_are_not_read_again(lives):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    write(life, client, 2, 1)
    second = lives(Level.DISK)
    assert second.state.damaged() == []
    assert not second.state.rebooted


def test_a_block_outside_the_arena_is_for_the_ledger_to_refuse(lives):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    granted = client.ask(m.Grant(4096))
    for offset, nbytes in [(1 << 60, 64), (granted.offset, 1 << 50)]:
        placed = m.Placed(granted.extent, offset, nbytes, 1, ["x"], [1])
        assert isinstance(client.ask(m.Put("t", 1, m.Columns(fields=[BIG], blocks=[placed]))), m.Failed)


def test_what_a_client_had_in_a_further_shard_is_free_if_it_died_while_no_server_ran(lives):
    first = lives()
    shard = Joined(first)
    shard.work()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        client = first.client(host=this_host(), pid=process.pid)
        assert client.ask(m.Grant(PAGE_BYTES)).shard == 1
        process.kill()
    second = lives()
    shard.client, shard.epoch, shard.done, shard.waiting = again(second, shard.client), 101, 0, None
    shard.work()
    (there,) = second.node.shards
    assert there.used == 0


def test_the_number_of_a_shard_is_not_given_again_in_a_later_life(lives):
    """A session may have a reply from then, or ask for it again."""
    first = lives()
    shard = Joined(first)
    shard.work()
    assert first.client(host=this_host(), pid=os.getpid()).ask(m.Grant(PAGE_BYTES)).shard == 1
    shard.client.ask(m.Goodbye())
    second = lives()
    Joined(second)
    assert [one.number for one in second.node.shards] == [2]
