"""State directories: what the next server finds, what it refuses, what is swept and what is not."""

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.server.lives import BIG, Life, again, write
from tests.server.test_shards import Joined
from transferqueue.errors import AddressInUse, Corruption, UsageError
from transferqueue.limits import MIB, PAGE_BYTES
from transferqueue.policies import Manual, Task
from transferqueue.schema import Field
from transferqueue.server.__main__ import main
from transferqueue.server.durability import journal_head as head
from transferqueue.server.durability import recovery as past
from transferqueue.server.durability import state_directory as durable
from transferqueue.server.durability.journal import SqliteJournal, read_journal
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.durability_level import Level
from transferqueue.server.process.supervisor import EXIT_REPORTED, EXIT_WRONG_CALL
from transferqueue.server.runtime_directory import remove_stale_arenas, served_arena
from transferqueue.server.sessions import liveness as evidence
from transferqueue.storage.memory.checksum import checksum
from transferqueue.transport import FileLock, this_host
from transferqueue.wire import messages as m

LEVELS = [Level.PROCESS, Level.DISK]


@pytest.fixture
def shared(tmp_path):
    found = tmp_path / "shm"
    found.mkdir()
    return found


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

    start.path = tmp_path
    yield start
    for life in made:
        life.crash()


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
    leased = client.ask(m.LeaseRequest("t", "train", rows=2))
    second = lives(level)
    assert second.coordinator.identity.epoch == first.coordinator.identity.epoch + 1
    assert second.file == first.file
    client = again(second, client)
    assert client.ask(m.Ack("t", leased.lease, leased.token)) == m.DoneReply(2)
    assert client.ask(m.LeaseRequest("t", "train", rows=1)).token > leased.token


def test_extents_that_are_in_use_are_not_lent_again(lives):
    first = lives()
    client = first.client()
    granted = client.ask(m.Grant(100_000))
    client.bench.coordinator.commit()
    used = first.coordinator.memory.used
    second = lives()
    assert (second.coordinator.memory.used, second.coordinator.memory.extents) == (used, 1)
    other = second.client().ask(m.Grant(100_000))
    assert abs(other.offset - granted.offset) >= 100_000
    again(second, client).ask(m.ReturnGrant(granted.extent))
    assert second.coordinator.memory.extents == 1


def test_what_was_not_committed_never_happened(lives):
    first = lives()
    client = first.client()
    client.create_table()
    first.deliver = lambda: None
    client.post(client.put(3))
    second = lives()
    assert second.coordinator.ledger.state.tables["t"].rows_put == 0


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
    leased = client.ask(m.LeaseRequest("t", "train", rows=1))
    second = lives()
    assert second.watched.pidfds.keys() == {client.session}
    second.pass_time(4.0)
    assert again(second, client).ask(m.Ack("t", leased.lease, leased.token)) == m.DoneReply(1)
    lock.release()


def test_a_client_that_died_meanwhile_is_found_dead(lives, tmp_path):
    lock = held_lock(tmp_path)
    first = lives()
    client = local(first, lock)
    client.create_table()
    client.ask(client.put(1))
    client.ask(m.LeaseRequest("t", "train", rows=1))
    client.ask(m.Grant(5000))
    lock.release()
    second = lives()
    assert len(second.coordinator.sessions) == 0
    assert second.coordinator.memory.extents == 0
    assert second.client().ask(m.LeaseRequest("t", "train", rows=1)).content.rows == bytes(8)


def test_memory_of_a_dead_process_stays_while_its_lock_is_held(lives, tmp_path, monkeypatch):
    """A forked child, or a view, holds the lock: leases return at once, memory when the lock is free."""
    lock = held_lock(tmp_path)
    first = lives()
    client = local(first, lock)
    client.ask(m.Grant(5000))
    monkeypatch.setattr(evidence, "_pidfd_of", _no_such_process)
    second = lives()
    assert len(second.coordinator.sessions) == 0
    assert second.coordinator.memory.extents == 1
    third = lives()
    assert third.coordinator.memory.extents == 1
    lock.release()
    third.pass_time(5.0)
    assert third.coordinator.memory.extents == 0


def _no_such_process(pid):
    raise UsageError(f"process {pid} does not exist")


def test_a_distant_client_is_waited_for_and_judged_by_silence(lives):
    first = lives()
    client = first.client(host="elsewhere")
    client.ask(m.Grant(5000))
    second = lives()
    second.pass_time(9.0)
    assert len(second.coordinator.sessions) == 1
    second.pass_time(2.0)
    assert len(second.coordinator.sessions) == 0
    assert second.coordinator.memory.extents == 0


# ---------------------------------------------------------------- what is refused


def test_two_servers_never_have_one_state(lives, tmp_path, shared):
    lives()
    with pytest.raises(AddressInUse, match=r"state directory .*/state is in use by a live server; stop it"):
        StateDirectory(tmp_path / "state", Level.PROCESS, first_epoch=1, shared=shared)


def test_another_level_is_refused(lives):
    lives(Level.PROCESS).crash()
    with pytest.raises(UsageError, match="has durability process, not disk; start with that, or name another"):
        lives(Level.DISK)
    lives(Level.PROCESS)


def test_a_directory_that_others_can_read_is_refused(tmp_path, shared):
    (tmp_path / "state").mkdir(mode=0o755)
    with pytest.raises(UsageError, match=r"state directory .* has mode 755: other users could open the queue"):
        StateDirectory(tmp_path / "state", Level.PROCESS, first_epoch=1, shared=shared)
    assert not list((tmp_path / "state").iterdir())


@pytest.mark.parametrize("data", [b"{", None])
def test_about_is_written_again_from_the_arena(lives, data):
    life = lives()
    life.client().create_table()
    life.crash()
    about = life.state.path / "about.json"
    before = about.read_bytes()
    about.unlink() if data is None else about.write_bytes(data)
    assert "t" in lives().coordinator.ledger.state.tables
    assert about.read_bytes() == before


def test_without_its_link_it_is_told_where_the_memory_was(lives, shared):
    life = lives()
    life.client()
    life.crash()
    link = life.state.path / "arena"
    target = link.readlink()
    link.unlink()
    (root,) = shared.iterdir()
    remove_stale_arenas(root)
    with pytest.raises(Corruption, match=rf"the link arena, .*, is missing; .*ln -s {target} {link}"):
        lives()
    link.symlink_to(target)
    lives()


@pytest.mark.parametrize("name", ["journal.sqlite", "arena"])
def test_nothing_is_touched_before_the_journal_was_read(lives, name):
    """An empty start used to punch the arena, so that putting the journal back did not help."""
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    write(life, client, 2, 7)
    life.crash()
    kept = life.state.path / name
    aside = kept.with_name("elsewhere")
    kept.rename(aside)
    before = contents(life.state.path)
    with pytest.raises(
        Corruption, match=r"Nothing was changed\. Put the files back .*serve --durability disk .*--accept-loss"
    ):
        lives(Level.DISK)
    assert contents(life.state.path) == before
    aside.rename(kept)
    second = lives(Level.DISK)
    assert second.state.damaged() == []
    assert second.coordinator.ledger.state.tables["t"].rows_put == 2


def contents(path):
    return {
        file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and not file.name.endswith("-shm")
    }


def test_reading_a_log_leaves_no_file(lives, tmp_path):
    life = lives()
    life.client().create_table()
    for name in ("journal.sqlite", "journal.sqlite-wal"):  # as a server that is killed leaves them
        shutil.copyfile(life.state.path / name, tmp_path / name)
    kept = read_journal(tmp_path / "journal.sqlite")
    assert kept.turn == life.state.ledger._journal.turn
    assert sorted(file.name for file in tmp_path.glob("journal*")) == ["journal.sqlite", "journal.sqlite-wal"]
    (tmp_path / "journal.sqlite-shm").write_bytes(bytes(32768))  # a reader was killed
    SqliteJournal(tmp_path / "journal.sqlite", Level.PROCESS).close()
    assert [file.name for file in tmp_path.glob("journal*")] == ["journal.sqlite"]


def test_a_loss_that_is_accepted_leaves_the_files_aside(lives, caplog):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    write(life, client, 2, 7)
    life.crash()
    journal = life.state.path / "journal.sqlite"
    journal.write_bytes(b"")
    for number in (1, 2):
        second = lives(Level.DISK, accept_loss=True)
        assert f"The server accepts the loss and kept the files in {life.state.path}/lost-{number}" in caplog.text
        assert not second.coordinator.ledger.state.tables
        kept = life.state.path / f"lost-{number}"
        assert {"journal.sqlite", "about.json", "arena"} <= {one.name for one in kept.iterdir()}
        assert len((kept / "arena").read_bytes()) == MIB + PAGE_BYTES
        second.client()
        second.crash()
        journal.write_bytes(b"")
    with pytest.raises(Corruption):
        lives(Level.DISK)


def test_the_command_says_which_command_accepts_the_loss(lives, tmp_path, capsys):
    life = lives(Level.DISK)
    life.client()
    life.crash()
    (life.state.path / "journal.sqlite").unlink()
    where = ["--address", f"ipc://{tmp_path}/run/q.sock", "--durability", "disk", "--state", str(life.state.path)]
    assert main(where) == EXIT_REPORTED
    told = capsys.readouterr().err
    assert "has no journal (journal.sqlite is missing or empty), though its arena" in told
    assert f"transferqueue serve --durability disk --state {life.state.path} --accept-loss" in told
    assert main([*where[:2], "--accept-loss"]) == EXIT_WRONG_CALL
    assert "accept_loss is for a state directory" in capsys.readouterr().err


def test_accepting_a_loss_loses_nothing_that_is_whole(lives):
    lives().client().create_table()
    assert "t" in lives(accept_loss=True).coordinator.ledger.state.tables


def test_memory_that_vanished_without_a_reboot_is_no_reason_to_begin_anew(lives):
    life = lives()
    client = life.client()
    client.create_table()
    client.ask(client.put(3))
    life.crash()
    life.file.unlink()
    with pytest.raises(Corruption, match=r'is missing, though the machine was not .*Lost rows: {"t": 3}'):
        lives()
    assert not lives(accept_loss=True).coordinator.ledger.state.tables


def test_a_server_that_died_while_it_made_its_files_leaves_a_new_directory(lives, shared, monkeypatch):
    for step in ("_make", "_take_head", "_write_about"):
        monkeypatch.setattr(StateDirectory, step, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lives()
        monkeypatch.undo()
    monkeypatch.setattr(Path, "symlink_to", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lives()
    monkeypatch.undo()
    lives()
    (root,) = shared.iterdir()
    assert len(list(root.iterdir())) == 1


def test_a_directory_of_an_earlier_build_is_refused(lives):
    life = lives()
    life.client()
    life.crash()
    (life.state.path / "about.json").write_text('{"level":"process","boot":"x"}')
    with pytest.raises(
        UsageError, match=r"was written by an earlier build .*drain its tables or take a snapshot there"
    ):
        lives(accept_loss=True)


def test_the_state_of_another_version_is_refused(lives, monkeypatch):
    lives().client()
    monkeypatch.setattr(past, "STATE", bytes(16))
    with pytest.raises(UsageError, match=r"written by asyncflow-transferqueue .* whose format of the state differs"):
        lives(accept_loss=True)


@pytest.mark.parametrize("level", LEVELS)
def test_an_arena_of_another_size_is_reported(lives, level):
    life = lives(level)
    life.client().ask(m.Grant(MIB // 2))
    life.crash()
    os.truncate(life.file, 4096)
    with pytest.raises(Corruption, match="was replaced or cut"):
        lives(level)


# ---------------------------------------------------------------- sweeping


def test_an_arena_that_a_state_names_is_never_swept(lives, shared):
    life = lives()
    life.crash()
    (root,) = shared.iterdir()
    remove_stale_arenas(root)
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
    remove_stale_arenas(root)
    assert not list(root.iterdir())


def test_without_room_on_shared_memory_the_arena_lies_in_the_state(lives, tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "arena_root", lambda shared: None)
    life = lives()
    assert life.file.parent == life.state.path
    client = life.client()
    client.create_table()
    client.ask(client.put(2))
    assert lives().coordinator.ledger.state.tables["t"].rows_put == 2


# ---------------------------------------------------------------- reboots


def reboot(monkeypatch):
    for module in (head, durable):
        monkeypatch.setattr(module, "boot_name", lambda: "another boot")


def test_what_level_process_held_is_gone_after_a_reboot_and_told(lives, monkeypatch, caplog):
    life = lives()
    client = life.client()
    client.create_table()
    client.ask(client.put(3))
    life.crash()
    life.file.unlink()
    reboot(monkeypatch)
    second = lives()
    assert "a reboot cleared that; the server starts with an empty queue, and kept the files in" in caplog.text
    assert 'Lost rows: {"t": 3}' in caplog.text
    assert not second.coordinator.ledger.state.tables
    assert (second.state.path / "lost-1" / "journal.sqlite").exists()
    assert len(second.coordinator.sessions) == 0


def test_disk_checks_every_block_after_a_reboot_and_serves_none_that_is_damaged(lives, monkeypatch):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    for fill in range(4):
        assert isinstance(write(life, client, 2, fill), m.PutRows)
    client.ask(m.LeaseRequest("t", "train", rows=2))
    blocks = life.coordinator.ledger.state.core.blocks.blocks
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
    rows = client.ask(m.LeaseRequest("t", "train", rows=8, at_least=1)).content.rows
    assert list(memoryview(rows).cast("q")) == [0, 1, 4, 5, 6, 7]
    table = second.coordinator.ledger.state.tables["t"]
    assert (table.rows_put, table.rows_live, table.rows_dropped) == (8, 6, {"lost": 2})
    third = lives(Level.DISK)
    assert third.lost == {}
    assert third.coordinator.ledger.state.tables["t"].rows_dropped == {"lost": 2}


def test_rows_that_were_kept_lack_their_values_and_weights_are_gone(lives, monkeypatch, caplog):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG], retention=Manual()))
    write(life, client, 2, 1)
    leased = client.ask(m.LeaseRequest("t", "train", rows=2))
    client.ask(m.Ack("t", leased.lease, leased.token))
    granted = client.ask(m.Grant(4096))
    weight = Field("w", "float32", (4,))
    placed = m.WrittenBlock(granted.extent, granted.offset, 64, 1, ["w"], [0], checksum=checksum(bytes(64)))
    client.ask(m.Publish("policy", 3, [weight], [placed]))
    life.crash()
    with open(life.file, "r+b") as file:
        file.write(b"\xff" * (64 << 10))
    reboot(monkeypatch)
    second = lives(Level.DISK)
    assert second.lost == {}
    # No task waits for it, so no row is lost: the log alone tells.
    assert 'table "t", field "x": rows 0, 1' in caplog.text
    client = second.client()
    table = second.coordinator.ledger.state.tables["t"]
    assert (table.rows_done, table.rows_dropped, table.rows.pages.resident) == (2, {}, 2)
    assert 'do not have "x"' in client.ask(m.ReadRequest("t", np.arange(2).tobytes(), ["x"])).text
    assert "version 3" in client.ask(m.Pull("policy", version=3)).text
    assert second.coordinator.memory.extents == 0


def test_blocks_on_a_disk_are_checked_without_a_reboot_too(lives, monkeypatch):
    monkeypatch.setattr(durable, "arena_root", lambda shared: None)  # level process: the arena lies in the state too
    for level in LEVELS:
        life = lives(level, lives.path / level)
        client = life.client()
        client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
        write(life, client, 2, 1)
        write(life, client, 2, 2)
        at = next(iter(life.coordinator.ledger.state.core.blocks.blocks.values())).at
        life.crash()
        with open(life.file, "r+b") as file:
            file.seek(at.offset + at.nbytes - 1)
            file.write(b"\xff")
        second = lives(level, lives.path / level)
        assert not second.state.rebooted
        assert second.lost == {"t": [0, 1]}


def test_a_block_outside_the_arena_is_for_the_ledger_to_refuse(lives):
    life = lives(Level.DISK)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    granted = client.ask(m.Grant(4096))
    for offset, nbytes in [(1 << 60, 64), (granted.offset, 1 << 50)]:
        placed = m.WrittenBlock(granted.extent, offset, nbytes, 1, ["x"], [1], checksum=1)
        refused = client.ask(m.PutRequest("t", 1, m.Columns(fields=[BIG], blocks=[placed])))
        assert isinstance(refused, m.Failed)
        assert "checksum" not in refused.text


def test_a_block_without_a_checksum_is_refused_on_a_disk(lives):
    life = lives(Level.DISK)
    client = life.client()
    assert client.welcome.checksums
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    granted = client.ask(m.Grant(4096))
    placed = m.WrittenBlock(granted.extent, granted.offset, 256, 1, ["x"], [1])
    for request in (m.PutRequest("t", 1, m.Columns([BIG], [placed])), m.Publish("c", 0, [BIG], [placed])):
        refused = client.ask(request)
        assert refused.error == "UsageError"
        assert refused.text.startswith("block of x has no checksum: this server keeps rows on disk")
    assert not lives(path=lives.path / "memory").client().welcome.checksums


def test_a_put_that_names_all_memory_again_and_again_is_refused_without_reading_it(lives):
    """At level ``disk`` the server took the checksum of each block before it looked whether the block was granted:
    65,536 blocks of 16 MiB, in a message of 2 MB, kept everybody waiting for minutes."""
    life = lives(Level.DISK, arena_bytes=16 * MIB)
    client = life.client()
    client.ask(m.CreateTable("t", tasks=[Task("train", ["x"])], fields=[BIG]))
    granted = client.ask(m.Grant(4096))
    block = m.WrittenBlock(granted.extent, 0, 16 * MIB, 1, ["x"], [1], checksum=1)
    began = time.thread_time()
    for count in (1, 1 << 16):
        assert isinstance(client.ask(m.PutRequest("t", 1, m.Columns([BIG], [block] * count))), m.Failed)
    assert time.thread_time() - began < 10


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
    (there,) = second.remote.shards.remote.values()
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
    assert list(second.remote.shards.remote) == [2]
