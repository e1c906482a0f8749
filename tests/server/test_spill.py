"""Cold blocks go to a disk when memory is short, and come back when a request needs them: a node, in time that the test
decides."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.server.nodes import lease
from tests.server.spilling import ARENA, BODY, SpillBench
from transferqueue.errors import Impossible
from transferqueue.ledger.effects import Blocked, Effects
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot
from transferqueue.ledger.rows.blocks import BlockRegistry
from transferqueue.ledger.rows.cold_arena import ON_DISK, ColdArena
from transferqueue.ledger.rows.cold_blocks import ColdBlocks
from transferqueue.ledger.table_state import SharedState
from transferqueue.limits import LOAD_STUCK_S, LOAD_TRIES, PAGE_BYTES, SPILL_PAUSE_S, SPILL_SILENT_S
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m


@pytest.fixture
def bench():
    bench = SpillBench()
    yield bench
    bench.close()


def test_four_times_the_memory_goes_in_and_comes_out_equal(bench):
    for number in range(64):
        bench.put(number)
        assert bench.used <= ARENA
    assert bench.stats().blocks >= 64 - 14
    for number in range(0, 64, 4):
        reply = bench.lease(4)
        assert bench.bytes_of(reply) == [number, number + 1, number + 2, number + 3]
        bench.finish(reply)
    stats = bench.stats()
    assert stats.spilled_blocks == stats.loaded_blocks >= 64 - 14
    assert (stats.blocks, stats.bytes, bench.space.files) == (0, 0, {})
    bench.settle()
    assert bench.used == 0


def test_nothing_is_written_while_there_is_room(bench):
    for number in range(10):  # five eighths
        bench.put(number)
    assert not bench.jobs
    assert bench.stats().spilled_blocks == 0


def test_pinned_blocks_stay_and_the_latest_leave_first(bench):
    for number in range(8):
        bench.put(number)
    held = bench.lease(4)
    for number in range(8, 40):
        bench.put(number)
    assert bench.bytes_of(held) == [0, 1, 2, 3]
    reply = bench.lease(2)
    assert bench.bytes_of(reply) == [4, 5]
    assert bench.stats().loaded_blocks == 0, "the rows that are leased next were in memory"


def test_a_block_that_is_pinned_while_it_is_written_stays(bench):
    for number in range(10):
        bench.put(number)
    call = bench.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows"))  # above the mark: begins to write
    assert bench.jobs
    reply = bench.worker.ask(lease(10, 1.0))
    bench.settle()
    assert bench.bytes_of(reply) == list(range(10))
    assert bench.stats().blocks == 0
    assert not bench.space.files
    assert isinstance(bench.producer.take(call), m.Granted)


@pytest.mark.parametrize("why", ["pinned", "failed"])
def test_whoever_waits_for_memory_goes_on_waiting_for_it_though_blocks_were_written_in_vain(bench, why):
    """So little memory is in use that nothing leaves for anybody else."""
    for number in range(10):
        bench.put(number)
    call = bench.producer.post(m.Grant(7 * PAGE_BYTES, wait_s=50.0))
    assert bench.jobs
    if why == "pinned":
        held = bench.worker.ask(lease(10, 1.0))
        bench.settle()
        assert bench.stats().blocks == 0
        blocks = np.array([at.block for part in held.content.parts for at in part.blocks], "<i8")
        bench.worker.post(m.Unpin(blocks.tobytes(), np.ones(blocks.size, "<i8").tobytes()))
    else:
        bench.space.fails_writes = "No space left on device"
        bench.settle()
        bench.space.fails_writes = ""
        due = bench.coordinator.next_deadline()
        assert due is not None
        assert due <= bench.now + SPILL_PAUSE_S
        bench.pass_time(SPILL_PAUSE_S)
    bench.settle()
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
    assert bench.stats().paused == "No space left on device"
    assert bench.stats().blocks == 0
    assert not bench.jobs, "it tries again at once"
    bench.space.fails_writes = ""
    bench.pass_time(SPILL_PAUSE_S)
    bench.settle()
    assert isinstance(bench.producer.take(call), m.Granted)
    assert bench.stats().paused == ""
    assert bench.bytes_of(bench.lease(4)) == [0, 1, 2, 3]


def spill_all_that_may(bench, monkeypatch):
    """Rows fill the memory, and the disk as far as they may. Returns the call of a producer that waits for memory."""
    monkeypatch.setattr(bench.spiller.backlog, "disk_bytes", 32 * PAGE_BYTES)
    number = 0
    while True:
        wanted = bench.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows"))
        bench.settle()
        if (granted := bench.producer.take(wanted)) is None:
            assert "--spill-bytes" in bench.stats().paused
            return wanted
        bench.write(granted, number)
        number += 1


def test_a_server_sleeps_while_spilled_blocks_take_all_that_they_may(bench, monkeypatch):
    """A producer waits for memory meanwhile. Time helps nobody then: only a block that leaves the disk does."""
    wanted = spill_all_that_may(bench, monkeypatch)
    for _ in range(3):
        bench.coordinator.tick(bench.now)
        due = bench.coordinator.next_deadline()
        assert due is None or due > bench.now
    for _ in range(4):
        bench.finish(bench.lease(6))
    bench.settle()
    assert isinstance(bench.producer.take(wanted), m.Granted)


def test_blocks_come_back_as_soon_as_others_can_leave_though_the_disk_is_as_full_as_it_may_be(bench, monkeypatch):
    """All blocks in memory are pinned as a read begins to wait. The next moment some are not."""
    spill_all_that_may(bench, monkeypatch)
    blocks = bench.coordinator.ledger.state.core.blocks.blocks
    rows = {kind: [n - 1 for n, block in blocks.items() if bool(block.extents) is kind] for kind in (True, False)}
    reader = bench.client()
    held = reader.ask(m.ReadRequest("t", np.array(rows[True], "<i8").tobytes()))
    call = bench.worker.post(m.ReadRequest("t", np.array(rows[False][:8], "<i8").tobytes()))
    bench.settle()
    bench.pass_time(0.1)
    assert bench.worker.take(call) is None
    numbers = np.array([at.block for part in held.content.parts for at in part.blocks], "<i8")
    reader.post(m.Unpin(numbers.tobytes(), np.ones(numbers.size, "<i8").tobytes()))
    bench.settle()
    assert isinstance(bench.worker.take(call), m.ReadRows), bench.stats()


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
    assert bench.stats().lost_blocks == 0


@pytest.mark.parametrize("fault", ["damaged", "unreadable"])
def test_lost_bytes_end_their_rows_and_are_never_served(bench, fault):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(10))
    bench.space.damages, bench.space.fails_loads = fault == "damaged", 1000 if fault == "unreadable" else 0
    call = bench.worker.post(lease(1, 20.0))
    for _ in range(LOAD_TRIES):
        bench.work()
        if bench.stats().lost_blocks:
            break
    bench.space.damages, bench.space.fails_loads = False, 0
    bench.settle()
    assert bench.stats().lost_blocks == 1
    assert bench.bytes_of(bench.worker.take(call)) == [11], "the next row"
    audit = bench.coordinator.ledger.observe(m.Observe("audit"), bench.now).tables["t"]
    assert audit.dropped == {"lost": 1}


def read(client, rows):
    return client.post(m.ReadRequest("t", np.array(rows, "<i8").tobytes()))


def end(bench, client):
    bench.coordinator.process_exited(client.session, bench.now)
    bench.deliver()


def test_nothing_is_loaded_for_a_request_that_ended_while_others_were_before_it(bench):
    for number in range(40):
        bench.put(number)
    bench.settle()
    first, gone, last = bench.client(), bench.client(), bench.client()
    calls = [read(first, [20, 21, 22]), read(gone, range(23, 29)), read(last, [29, 30])]
    end(bench, gone)
    bench.settle()
    assert isinstance(first.take(calls[0]), m.ReadRows)
    assert isinstance(last.take(calls[2]), m.ReadRows)
    assert bench.stats().loaded_blocks == 5


def test_a_request_that_ends_while_its_blocks_are_loaded_holds_up_no_other(bench):
    for number in range(40):
        bench.put(number)
    bench.settle()
    gone, other = bench.client(), bench.client()
    read(gone, [20, 21, 22])
    call = read(other, range(23, 36))
    end(bench, gone)
    bench.settle()
    assert bench.bytes_of(other.take(call)) == list(range(23, 36))


def test_a_disk_that_hangs_spares_nothing_for_those_who_need_it_until_it_answers(bench):
    for number in range(40):
        bench.put(number)
    bench.settle()
    reader = bench.client()
    call = read(reader, [25, 26])
    assert bench.jobs
    bench.pass_time(SPILL_SILENT_S)
    assert "silent for more than" in bench.spilling.explain_loads()
    assert bench.coordinator.next_deadline() is None or bench.coordinator.next_deadline() > bench.now, "it spins"
    assert reader.take(call) is None
    bench.settle()
    assert bench.bytes_of(reader.take(call)) == [25, 26]


def test_a_line_that_is_full_refuses_the_next_request_until_it_moves(bench, monkeypatch):
    monkeypatch.setattr("transferqueue.ledger.rows.cold_blocks.LOAD_ORDERS_MAX", 3)
    for number in range(40):
        bench.put(number)
    bench.settle()
    for row in (20, 22, 24):
        read(bench.client(), [row])
    refused = bench.client()
    answer = refused.take(read(refused, [26]))
    assert (answer.error, "which is the most; ask again" in answer.text) == ("Full", True)
    bench.settle()
    call = read(refused, [26])
    bench.settle()
    assert bench.bytes_of(refused.take(call)) == [26]


def test_rows_that_end_give_the_disk_its_space(bench):
    for number in range(40):
        bench.put(number)
    assert bench.space.files
    bench.producer.ask(m.DropTable("t"))
    bench.settle()
    assert (bench.space.files, bench.stats().bytes) == ({}, 0)
    assert bench.used == 0


def test_rows_that_end_while_they_are_loaded(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    bench.worker.post(lease(4, 20.0))
    assert bench.jobs
    bench.producer.ask(m.DropTable("t"))
    bench.settle()
    assert (bench.space.files, bench.stats().bytes, bench.used) == ({}, 0, 0)


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


def test_a_rank_that_waits_for_its_blocks_longer_than_a_lease_lasts_keeps_its_share(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    other = bench.client()
    first = bench.worker.post(lease(8, 20.0, world=2, rank=0, lease_s=2.0))
    bench.settle()
    held = bench.worker.take(first)
    seen = bench.bytes_of(held)
    second = other.post(lease(8, 20.0, world=2, rank=1, lease_s=2.0))
    assert bench.jobs
    for _ in range(4):
        bench.pass_time(1.0)
        bench.worker.ask(m.Renew("t", held.lease, held.token))
    bench.settle()
    assert sorted(seen + bench.bytes_of(other.take(second))) == list(range(8, 16))


def test_the_share_of_a_rank_that_died_while_it_waited_becomes_ready_again(bench):
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    other = bench.client()
    first = bench.worker.post(lease(8, 20.0, world=2, rank=0, lease_s=2.0))
    bench.settle()
    seen = bench.bytes_of(bench.worker.take(first))
    other.post(lease(8, 20.0, world=2, rank=1, lease_s=2.0))
    other.ask(m.Goodbye())
    bench.pass_time(2.5)
    bench.settle()
    bench.pass_time(2.5)
    assert bench.bytes_of(bench.lease(8)) == list(range(8, 16)), f"{seen} were not acked either"


def test_a_restore_finds_what_is_under_way(bench):
    """The tables ended while their blocks were being written and loaded; a snapshot of none is restored meanwhile."""
    for number in range(40):
        bench.put(number)
    bench.finish(bench.lease(8))
    bench.worker.post(lease(4, 20.0))
    bench.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows"))
    assert bench.jobs
    bench.producer.ask(m.DropTable("t"))
    bench.coordinator.ledger.restore_snapshot(LedgerSnapshot(), bench.now)
    bench.settle()
    bench.producer.create_table(fields=[BODY], tasks=[Task("train", needs=["body"])])
    for number in range(40):
        bench.put(number)
    bench.settle()
    assert bench.stats().blocks >= 40 - 14
    assert bench.coordinator.counters.internal_errors == 0


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
    bench.settle()
    taken = bench.coordinator.ledger.take_snapshot(bench.now)
    places = bench.spiller.hold()
    spilled = {at.block for at in taken.blocks.values() if at.shard < 0}
    assert spilled
    assert spilled == places.keys()
    for _ in range(10):
        bench.finish(bench.lease(4))
    bench.settle()
    assert spilled <= set(bench.space.files), "what the snapshot names keeps its space"
    assert all(len(set(bench.space.read(place).tobytes())) == 1 for place in places.values())
    bench.spiller.release()
    bench.pass_time(0.0)
    bench.settle()
    assert not bench.space.files


def test_a_turn_looks_at_no_block_that_did_not_change(bench, monkeypatch):
    """However many are pinned while somebody waits for memory."""
    for number in range(12):
        bench.put(number)
    held = bench.lease(12)
    call = bench.producer.post(m.Grant(PAGE_BYTES, wait_s=50.0, use="rows"))
    bench.settle()
    assert bench.producer.take(call) is None
    looked = []
    look = ColdArena._if_cold
    monkeypatch.setattr(ColdArena, "_if_cold", lambda *args: looked.append(args[1]) or look(*args))
    for _ in range(10):
        bench.worker.ask(m.Observe("tables"))
    assert not looked
    blocks = [at.block for part in held.content.parts for at in part.blocks][:4]
    bench.worker.post(m.Unpin(np.array(blocks, "<i8").tobytes(), np.ones(4, "<i8").tobytes()))
    bench.settle()
    assert isinstance(bench.producer.take(call), m.Granted)
    assert 1 <= len(looked) <= 4


def test_a_load_wakes_those_who_wait_for_it_and_nobody_else(bench, monkeypatch):
    for number in range(40):
        bench.put(number)
    bench.settle()
    readers = [bench.client() for _ in range(5)]
    tried = []
    apply = bench.coordinator.ledger.apply
    monkeypatch.setattr(
        bench.coordinator.ledger, "apply", lambda request, **call: tried.append(request) or apply(request, **call)
    )
    calls = [
        reader.post(m.ReadRequest("t", np.array([20 + 2 * at, 21 + 2 * at], "<i8").tobytes()))
        for at, reader in enumerate(readers)
    ]
    bench.settle()
    assert all(isinstance(reader.take(call), m.ReadRows) for reader, call in zip(readers, calls, strict=True))
    assert len(tried) == 2 * len(readers)


def test_small_blocks_count_as_they_are_loaded_side_by_side():
    def cold(rooms):
        at = {number: m.BlockLocation(number, ON_DISK, 0, 0, 64, 1, [], []) for number in range(640)}
        blocks = {number: SimpleNamespace(at=at[number], extents=[], extent=None) for number in at}
        found = ColdBlocks(BlockRegistry(Effects()), list, lambda: rooms * PAGE_BYTES)
        found._blocks.blocks.update(blocks)
        found.on_disk.update(blocks)
        return found

    assert isinstance(cold(10).want(range(640), SharedState()), Blocked)
    with pytest.raises(Impossible, match="40,960 bytes"):
        cold(9).want(range(640), SharedState())
