"""Cold blocks go to a disk when memory is short, and come back when a request needs them: a node, in time that the test decides."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.server.nodes import Bench, lease
from transferqueue.errors import Impossible, UsageError
from transferqueue.ledger.effects import MustWait
from transferqueue.ledger.rows.cold_blocks import ColdBlocks
from transferqueue.limits import KIB, LOAD_STUCK_S, LOAD_TRIES, MIB, PAGE_BYTES, SPILL_PAUSE_S
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.server.spill.spill_file import (
    BlocksLoaded,
    BlocksWritten,
    BlockToLoad,
    BlockToWrite,
    SpilledBlock,
    SpillFile,
    mapped,
)
from transferqueue.server.spill.spiller import Spiller
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import messages as m

ARENA = 16 * PAGE_BYTES
BODY = Field("body", "int64", (PAGE_BYTES // 8,))


class Space:
    """A disk that answers when the test says so."""

    def __init__(self, arena):
        self.arena, self.files, self.jobs, self.ready = arena, {}, [], []
        self.fails_writes, self.fails_loads, self.damages = "", 0, False

    def write(self, extent, blocks):
        self.jobs.append(lambda: self._write(extent, blocks))

    def load(self, offset, blocks):
        self.jobs.append(lambda: self._load(offset, blocks))

    def free(self, places):
        kept = list(places)
        if kept:
            self.jobs.append(lambda: [self.files.pop(place.block, None) for place in kept] and None)

    def answers(self):
        ready, self.ready = self.ready, []
        return ready

    def read(self, place):
        return np.frombuffer(self.files[place.block], np.uint8)

    def stop(self):
        pass

    def _write(self, extent, blocks):
        if self.fails_writes:
            return BlocksWritten(extent, [], self.fails_writes)
        for block in blocks:
            self.files[block.block] = bytes(self.arena.view(block.offset, block.nbytes))
        return BlocksWritten(
            extent,
            [SpilledBlock(block.block, 0, block.nbytes, checksum(self.files[block.block])) for block in blocks],
            "",
        )

    def _load(self, offset, blocks):
        numbers = [block.place.block for block in blocks]
        if self.fails_loads:
            self.fails_loads -= 1
            return BlocksLoaded(offset, [], dict.fromkeys(numbers, "no such sector"), [])
        if self.damages:
            return BlocksLoaded(offset, [], {}, numbers)
        for block in blocks:
            self.arena._map[block.offset : block.offset + block.place.nbytes] = self.files[block.place.block]
        return BlocksLoaded(offset, numbers, {}, [])


class SpillBench(Bench):
    """A node with 16 pages of memory, of which new rows may have 12, and those that come back 14, and a table whose rows have a page each."""

    def __init__(self):
        super().__init__(ARENA)
        self.space = Space(self.arena)
        self.spiller = self.coordinator.spiller = Spiller(
            self.coordinator.ledger, self.coordinator.memory, self.space, 64 * MIB
        )
        self.producer, self.worker = self.client(), self.client()
        self.producer.create_table(fields=[BODY], tasks=[Task("train", needs=["body"], lease_s=100.0)])
        self.waits = []

    def put(self, number):
        """Put one row that has a page of this number. Waits for memory until the disk has answered."""
        call = self.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows"))
        self.settle()
        granted = self.producer.take(call)
        assert isinstance(granted, m.Granted), granted
        self.write(granted, number)

    def write(self, granted, number):
        self.arena._map[granted.offset : granted.offset + PAGE_BYTES] = bytes([number]) * PAGE_BYTES
        block = m.WrittenBlock(granted.extent, granted.offset, PAGE_BYTES, 1, ["body"], [0])
        self.producer.ask(m.PutRequest("t", 1, m.Columns(fields=[BODY], blocks=[block])))

    def settle(self):
        """The disk does all its jobs, and the node hears of each."""
        while self.space.jobs:
            self.work()

    def work(self):
        """The disk does one job, and the node hears of it."""
        answer = self.space.jobs.pop(0)()
        self.space.ready += [answer] if answer is not None else []
        self.coordinator.tick(self.now)
        self.deliver()

    def bytes_of(self, reply):
        """The number that each row of a reply holds, by its bytes in the arena."""
        (part,) = reply.content.parts
        seen = []
        for at in part.blocks:
            values = set(self.arena.view(at.offset, at.nbytes))
            assert len(values) == 1
            seen.append(values.pop())
        return seen

    def lease(self, rows=1, wait_s=20.0):
        call = self.worker.post(lease(rows, wait_s))
        self.settle()
        return self.worker.take(call)

    def finish(self, reply):
        """Unpin and ack a lease."""
        blocks = [at.block for part in reply.content.parts for at in part.blocks]
        self.worker.post(m.Unpin(np.array(blocks, "<i8").tobytes(), np.ones(len(blocks), "<i8").tobytes()))
        self.worker.ask(m.Ack("t", reply.lease, reply.token))

    def stats(self):
        return self.spiller.plain()


@pytest.fixture
def bench():
    bench = SpillBench()
    yield bench
    bench.close()


def test_four_times_the_memory_goes_in_and_comes_out_equal(bench):
    for number in range(64):
        bench.put(number)
        assert bench.coordinator.memory.used <= ARENA
    assert bench.stats()["blocks"] >= 64 - 14
    for number in range(0, 64, 4):
        reply = bench.lease(4)
        assert bench.bytes_of(reply) == [number, number + 1, number + 2, number + 3]
        bench.finish(reply)
    stats = bench.stats()
    assert stats["spilled_blocks"] == stats["loaded_blocks"] >= 64 - 14
    assert (stats["blocks"], stats["bytes"], bench.space.files) == (0, 0, {})
    assert bench.coordinator.memory.used == 0


def test_nothing_is_written_while_there_is_room(bench):
    for number in range(10):  # five eighths
        bench.put(number)
    assert not bench.space.jobs
    assert bench.stats()["spilled_blocks"] == 0


def test_pinned_blocks_stay_and_the_latest_leave_first(bench):
    for number in range(8):
        bench.put(number)
    held = bench.lease(4)
    for number in range(8, 40):
        bench.put(number)
    assert bench.bytes_of(held) == [0, 1, 2, 3]
    reply = bench.lease(2)
    assert bench.bytes_of(reply) == [4, 5]
    assert bench.stats()["loaded_blocks"] == 0, "the rows that are leased next were in memory"


def test_a_block_that_is_pinned_while_it_is_written_stays(bench):
    for number in range(10):
        bench.put(number)
    call = bench.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows"))  # above the mark: begins to write
    assert bench.space.jobs
    reply = bench.worker.ask(lease(10, 1.0))
    bench.settle()
    assert bench.bytes_of(reply) == list(range(10))
    assert bench.stats()["blocks"] == 0
    assert not bench.space.files
    assert isinstance(bench.producer.take(call), m.Granted)


def test_a_lease_that_does_not_wait_has_its_rows_loaded_for_the_next_one(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    call = bench.worker.post(lease(4, 0.0))
    bench.pass_time(0.0)
    refused = bench.worker.take(call)
    assert "on the disk" in refused.text
    bench.settle()
    assert bench.bytes_of(bench.worker.ask(lease(4, 0.0))) == [8, 9, 10, 11]


def test_a_read_waits_for_its_rows(bench):
    for number in range(40):
        bench.put(number)
    call = bench.worker.post(m.ReadRequest("t", np.array([25, 0], "<i8").tobytes()))
    assert bench.worker.take(call) is None
    bench.settle()
    assert bench.bytes_of(bench.worker.take(call)) == [0, 25]


def test_rows_that_do_not_fit_together_are_refused_at_once(bench):
    for number in range(40):
        bench.put(number)
    refused = bench.worker.ask(lease(15, 20.0))
    assert isinstance(refused, m.Failed)
    assert refused.error == "Impossible"
    assert "ask for fewer rows at a time" in refused.text


def test_a_load_without_memory_lets_those_behind_it_go_and_ends_at_its_deadline(bench):
    for number in range(60):
        bench.put(number)
    held = bench.lease(10)
    other = bench.client()
    large = bench.worker.post(lease(12, 5.0))
    small = other.post(m.ReadRequest("t", np.array([55], "<i8").tobytes()))
    bench.settle()
    assert bench.worker.take(large) is None
    for _ in range(3):
        bench.pass_time(LOAD_STUCK_S)
        bench.settle()
    assert isinstance(other.take(small), m.ReadRows)
    bench.pass_time(5.0)
    refused = bench.worker.take(large)
    assert refused.error == "DeadlineExceeded"
    assert "on the disk" in refused.text
    assert bench.bytes_of(held) == list(range(10))
    bench.pass_time(2 * LOAD_STUCK_S)
    assert bench.coordinator.next_deadline() is None or bench.coordinator.next_deadline() > bench.now, "it spins"


def test_a_full_disk_pauses_and_nothing_is_lost(bench):
    bench.space.fails_writes = "No space left on device"
    for number in range(12):
        bench.put(number)
    call = bench.producer.post(m.Grant(PAGE_BYTES, wait_s=60.0, use="rows"))
    bench.settle()
    assert bench.producer.take(call) is None
    assert bench.stats()["paused"] == "No space left on device"
    assert bench.stats()["blocks"] == 0
    assert not bench.space.jobs, "it tries again at once"
    bench.space.fails_writes = ""
    bench.pass_time(SPILL_PAUSE_S)
    bench.settle()
    assert isinstance(bench.producer.take(call), m.Granted)
    assert bench.stats()["paused"] == ""
    assert bench.bytes_of(bench.lease(4)) == [0, 1, 2, 3]


def test_rows_come_back_from_a_full_disk_while_producers_fill_the_memory(bench):
    for number in range(40):
        bench.put(number)
    bench.space.fails_writes = "No space left on device"
    calls = [bench.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows")) for _ in range(14)]
    bench.settle()
    assert bench.producer.take(calls[-1]) is None
    call = bench.worker.post(m.ReadRequest("t", np.array([25, 26], "<i8").tobytes()))
    bench.settle()
    assert bench.bytes_of(bench.worker.take(call)) == [25, 26]


def test_a_full_disk_ends_a_wait_at_its_deadline_as_a_full_arena_does(bench):
    bench.space.fails_writes = "No space left on device"
    for number in range(12):
        bench.put(number)
    call = bench.producer.post(m.Grant(PAGE_BYTES, wait_s=7.0, use="rows"))
    bench.settle()
    for _ in range(4):
        bench.pass_time(2.0)
        bench.settle()
    refused = bench.producer.take(call)
    assert refused.error == "DeadlineExceeded"
    assert "No space left on device" in refused.text


def test_a_block_that_is_read_at_last_is_served(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(10))
    bench.space.fails_loads = LOAD_TRIES - 1
    assert bench.bytes_of(bench.lease(1)) == [10]
    assert bench.stats()["lost_blocks"] == 0


@pytest.mark.parametrize("fault", ["damaged", "unreadable"])
def test_lost_bytes_end_their_rows_and_are_never_served(bench, fault):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(10))
    bench.space.damages, bench.space.fails_loads = fault == "damaged", 1000 if fault == "unreadable" else 0
    call = bench.worker.post(lease(1, 20.0))
    for _ in range(LOAD_TRIES):
        bench.work()
        if bench.stats()["lost_blocks"]:
            break
    bench.space.damages, bench.space.fails_loads = False, 0
    bench.settle()
    assert bench.stats()["lost_blocks"] == 1
    assert bench.bytes_of(bench.worker.take(call)) == [11], "the next row"
    audit = bench.coordinator.ledger.observe(m.Observe("audit"), bench.now)["tables"]["t"]
    assert audit["dropped"] == {"lost": 1}


def test_rows_that_end_give_the_disk_its_space(bench):
    for number in range(40):
        bench.put(number)
    assert bench.space.files
    bench.producer.ask(m.DropTable("t"))
    bench.settle()
    assert (bench.space.files, bench.stats()["bytes"]) == ({}, 0)
    assert bench.coordinator.memory.used == 0


def test_rows_that_end_while_they_are_loaded(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    bench.worker.post(lease(4, 20.0))
    assert bench.space.jobs
    bench.producer.ask(m.DropTable("t"))
    bench.settle()
    assert (bench.space.files, bench.stats()["bytes"], bench.coordinator.memory.used) == ({}, 0, 0)


def test_a_worker_that_dies_while_its_rows_are_loaded_keeps_nobody_waiting(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    bench.worker.post(lease(4, 20.0))
    bench.worker.ask(m.Goodbye())
    bench.worker = bench.client()
    assert bench.bytes_of(bench.lease(4)) == [8, 9, 10, 11]


def test_ranks_of_a_shared_batch_get_their_shares(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    seen = []
    for rank in range(2):
        call = bench.worker.post(lease(8, 20.0, world=2, rank=rank))
        bench.settle()
        seen += bench.bytes_of(bench.worker.take(call))
    assert sorted(seen) == list(range(8, 16))


def test_versions_of_weights_stay_in_memory(bench):
    granted = bench.worker.ask(m.Grant(PAGE_BYTES, wait_s=1.0, use="weights"))
    block = m.WrittenBlock(granted.extent, granted.offset, PAGE_BYTES, 1, ["w"], [0])
    field = Field("w", "int64", (PAGE_BYTES // 8,))
    reply = bench.worker.ask(m.Publish("policy", 1, [field], [block], keep=1))
    assert not isinstance(reply, m.Failed), reply
    for number in range(40):
        bench.put(number)
    pulled = bench.worker.ask(m.Pull("policy", 0))
    assert pulled.blocks[0].shard == 0


def test_a_snapshot_reads_what_is_on_disk_while_it_comes_back(bench):
    for number in range(40):
        bench.put(number)
    taken = bench.coordinator.ledger.take_snapshot(bench.now)
    places = bench.spiller.hold()
    spilled = {at.block for at in taken.blocks.values() if at.shard == -1}
    assert spilled
    assert spilled == places.keys()
    for _ in range(10):
        bench.finish(bench.lease(4))
    assert set(bench.space.files) == spilled
    assert all(len(set(bench.spiller.read(place).tobytes())) == 1 for place in places.values())
    bench.spiller.release()
    bench.settle()
    assert not bench.space.files


# ---------------------------------------------------------------- the file


class HeardFile(SpillFile):
    """Remembers that it has stirred."""

    def __init__(self, directory, nbytes, arena):
        self.heard = threading.Event()
        super().__init__(directory, nbytes, arena, self.heard.set)


@pytest.fixture
def file(bench, tmp_path):
    tmp_path.chmod(0o700)
    file = HeardFile(tmp_path, 16 * MIB, lambda: mapped(bench.arena.path, ARENA))
    yield file
    file.stop()


def answer_of(file):
    assert file.heard.wait(20.0)
    file.heard.clear()
    (answer,) = file.answers()
    return answer


def test_the_file_has_no_name_and_returns_what_it_was_given(bench, file, tmp_path):
    bench.arena._map[: 2 * PAGE_BYTES] = bytes(range(256)) * (2 * PAGE_BYTES // 256)
    file.write(1, [m_block(5, 0, 100), m_block(6, PAGE_BYTES, 0)])
    written = answer_of(file)
    assert [place.block for place in written.places] == [5, 6]
    assert list(tmp_path.iterdir()) == []
    assert file.read(written.places[0]).tobytes() == bytes(range(100))
    file.load(8 * PAGE_BYTES, [BlockToLoad(place, 8 * PAGE_BYTES) for place in written.places[:1]])
    assert answer_of(file) == BlocksLoaded(8 * PAGE_BYTES, [5], {}, [])
    assert bytes(bench.arena.view(8 * PAGE_BYTES, 100)) == bytes(range(100))
    changed = written.places[0]._replace(checksum=7)
    file.load(8 * PAGE_BYTES, [BlockToLoad(changed, 8 * PAGE_BYTES)])
    assert answer_of(file).damaged == [5]
    beyond = written.places[0]._replace(offset=64 * MIB)
    file.load(8 * PAGE_BYTES, [BlockToLoad(beyond, 8 * PAGE_BYTES)])
    assert "ends at byte" in answer_of(file).failed[5]


def test_a_stop_beside_a_thread_that_takes_the_last_job_closes_the_file(file, monkeypatch):
    jobs = file._jobs
    late = SimpleNamespace(put=jobs.put, get=jobs.get, get_nowait=jobs.get_nowait, empty=lambda: False)
    monkeypatch.setattr(file, "_jobs", late)  # `empty` says what was true a moment before
    file.stop()
    assert not file._thread.is_alive()


def test_a_stop_does_not_wait_for_a_disk_that_never_answers(file, monkeypatch, caplog):
    monkeypatch.setattr("transferqueue.server.spill.spill_file.STOP_S", 0.01)
    answers = threading.Event()
    file._jobs.put(lambda: (file.heard.set(), answers.wait(20.0)))
    assert file.heard.wait(20.0)
    file.stop()
    assert "has not answered for" in caplog.text
    answers.set()
    file._thread.join(20.0)
    assert not file._thread.is_alive()


def test_small_blocks_count_as_they_are_loaded_side_by_side():
    def cold(rooms):
        registry = SimpleNamespace(blocks={at: SimpleNamespace(at=m_block(at, 0, 64), replicas=2) for at in range(640)})
        found = ColdBlocks(registry, rooms * PAGE_BYTES, list)
        found.on_disk = dict(registry.blocks)
        return found

    assert isinstance(cold(10).want(range(640)), MustWait)
    with pytest.raises(Impossible, match="40,960 bytes"):
        cold(9).want(range(640))


def test_the_bound_is_kept_and_freed_space_is_used_again(bench, file):
    def write():
        file.write(1, [m_block(number, 0, ARENA) for number in range(256)])
        return answer_of(file)

    assert ARENA == 64 * KIB
    full = write()
    assert len(full.places) == 256
    file.write(2, [m_block(999, 0, 1)])
    assert "--spill-bytes allows" in answer_of(file).error
    file.free(full.places)
    assert len(write().places) == 256


def test_what_cannot_be_a_spill_directory_is_refused(bench, tmp_path):
    tmp_path.chmod(0o700)

    def make(directory, nbytes):
        SpillFile(directory, nbytes, lambda: mapped(bench.arena.path, ARENA), lambda: None)

    with pytest.raises(UsageError, match=r"--spill-bytes 1,048,576 is below"):
        make(tmp_path, MIB)
    with pytest.raises(UsageError, match="bytes that are free in"):
        make(tmp_path, 1 << 60)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="spill directory"):
        make(tmp_path / "file" / "below", 16 * MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def m_block(number, offset, nbytes):
    return BlockToWrite(number, offset, nbytes, 0)
