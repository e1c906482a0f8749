"""Shards that spill, as the coordinator keeps their books: deaths, reports that lie or come twice, drains, disks that hang, and two shards at once."""

import numpy as np
import pytest

from tests.server.lives import Life
from tests.server.nodes import Bench
from tests.server.spilling import ARENA, BODY, DiskShard, ShardSpillBench, report_of
from tests.server.test_shards import Joined
from transferqueue.limits import LOAD_STUCK_S, MIB, PAGE_BYTES, SPILL_SILENT_S
from transferqueue.policies import Task
from transferqueue.server.durability.journal import Level
from transferqueue.wire import messages as m


@pytest.fixture
def bench():
    bench = ShardSpillBench()
    yield bench
    bench.close()


def fill(bench, rows=40):
    for number in range(rows):
        bench.put(number)
    bench.settle()
    assert bench.stats()["blocks"]


def audit(bench):
    return bench.coordinator.ledger.observe(m.Observe("audit"), bench.now)["tables"]["t"]


def kill(bench, shard):
    end(bench, shard.client)


def end(bench, client):
    bench.coordinator.process_exited(client.session, bench.now)
    bench.deliver()


def read(bench, rows):
    return bench.worker.post(m.ReadRequest("t", np.array(rows, "<i8").tobytes()))


# ---------------------------------------------------------------- deaths


def test_what_is_on_the_disk_of_a_shard_that_dies_is_lost_with_its_memory(bench):
    fill(bench)
    kill(bench, bench.shard)
    assert audit(bench)["dropped"] == {"lost": 40}
    assert bench.coordinator.spillers.get(1) is None
    assert not bench.coordinator.ledger.extents_of(1)
    assert bench.coordinator.counters.internal_errors == 0


@pytest.mark.parametrize("moment", ["writing", "loading", "waiting for memory"])
def test_a_shard_that_dies_in_the_middle_of_its_jobs_keeps_nobody_waiting(bench, moment):
    fill(bench)
    if moment == "writing":
        while not bench.jobs:
            bench.producer.post(m.Grant(PAGE_BYTES, wait_s=5.0, use="rows"))
    if moment == "waiting for memory":
        assert isinstance(bench.lease(8), m.Leased)
    call = read(bench, range(20, 32))
    assert bool(bench.jobs) == (moment != "waiting for memory")
    assert bench.worker.take(call) is None
    kill(bench, bench.shard)
    refused = bench.worker.take(call)
    assert refused.error == "NotFound", refused
    assert audit(bench)["dropped"]["lost"] >= 32
    bench.pass_time(1.0)
    assert bench.coordinator.counters.internal_errors == 0
    assert not bench.coordinator.ledger.extents_of(1)


def test_a_late_report_of_a_dead_shard_is_no_defect(bench):
    fill(bench)
    read(bench, [25])
    answer = bench.jobs.pop(0)()
    kill(bench, bench.shard)
    bench.shard.client.post(report_of(answer))
    assert bench.coordinator.counters.internal_errors == 0


# ---------------------------------------------------------------- reports


def first_write(bench):
    """The first command to write, and its true report. It is not sent."""
    while not bench.shard.told_now(m.WriteBlocks):
        call = bench.producer.post(m.Grant(PAGE_BYTES, wait_s=5.0, use="rows"))
        bench.pump()
        bench.write(bench.producer.take(call), 0)
    return bench.shard.told_now(m.WriteBlocks)[0], bench.space.jobs.pop(0)()


def test_a_report_that_does_not_fit_its_job_is_refused_with_all_others_of_its_request(bench):
    command, answer = first_write(bench)
    (place,) = answer.places
    wrong = [
        m.BlocksWritten(command.job, [], ""),
        m.BlocksWritten(command.job, [place, place], ""),
        m.BlocksWritten(command.job, [place._replace(block=99)], ""),
        m.BlocksWritten(command.job, [place._replace(nbytes=1)], ""),
        m.BlocksWritten(command.job, [place], "and it failed, too"),
        m.BlocksLoaded(command.job, [place.block], {}, []),
        m.BlocksWritten(command.job + 100, [place], ""),
    ]
    for report in wrong:
        assert bench.shard.report(report).error == "ProtocolError", report
    assert bench.shard.report(answer, wrong[-1]).error == "ProtocolError"
    assert bench.stats()["blocks"] == 0
    assert bench.shard.report(answer) == m.DoneReply()
    assert bench.stats()["blocks"] == 1
    assert bench.coordinator.counters.internal_errors == 0


def test_a_report_that_comes_twice_counts_once(bench):
    _, answer = first_write(bench)
    for _ in range(3):
        assert bench.shard.report(answer, answer) == m.DoneReply()
    assert bench.stats()["spilled_blocks"] == bench.stats()["blocks"] == 1


def test_loads_that_are_reported_wrong_are_refused(bench):
    fill(bench)
    read(bench, [25, 26])
    *others, load = bench.shard.told_now(m.LoadBlocks)
    numbers = [block.place.block for block in load.blocks]
    wrong = [
        m.BlocksLoaded(load.job, numbers[:-1], {}, []),
        m.BlocksLoaded(load.job, numbers, {}, numbers[:1]),
        m.BlocksLoaded(load.job, [*numbers, 99], {}, []),
        m.BlocksWritten(load.job, [block.place for block in load.blocks], ""),
    ]
    for report in wrong:
        assert bench.shard.report(report).error == "ProtocolError", report
    assert bench.stats()["loaded_blocks"] == 0
    bench.settle()
    assert bench.stats()["loaded_blocks"] == len(numbers) + sum(len(other.blocks) for other in others)


def test_who_has_no_disk_reports_nothing(bench):
    other = Joined(bench, capacity=ARENA)
    assert other.client.ask(m.ReportSpill([m.BlocksWritten(1, [], "")], [])) == m.DoneReply()
    refused = bench.worker.ask(m.ReportSpill())
    assert (refused.error, "is no shard" in refused.text) == ("UsageError", True)


# ---------------------------------------------------------------- joining and leaving


def offer(nbytes):
    return m.ShardOffer("", ARENA, "tcp://127.0.0.1:9", "", b"s" * 32, spill_bytes=nbytes)


def test_a_disk_that_is_too_small_is_refused(bench):
    refused = bench.client(shard=offer(MIB)).welcome
    assert refused.error == "UsageError"
    assert "below 16,777,216, which are written at a time" in refused.text


@pytest.mark.parametrize("level", [Level.PROCESS, Level.DISK])
def test_a_durable_server_refuses_shards_that_spill(tmp_path, level):
    life = Life(tmp_path / "state", level, tmp_path)
    refused = life.client(shard=offer(64 * MIB)).welcome
    assert refused.error == "UsageError"
    assert "add the shard without --spill-dir" in refused.text
    life.crash()


def test_a_shard_that_drains_ends_when_its_disk_is_empty_too(bench):
    fill(bench, 20)
    bench.worker.ask(m.Drain(1))
    for number in range(0, 20, 4):
        assert not bench.shard.told_now(m.ShutDownShard)
        reply = bench.lease(4)
        assert bench.bytes_of(reply) == [number, number + 1, number + 2, number + 3]
        bench.finish(reply)
    bench.settle()
    assert bench.shard.told_now(m.ShutDownShard)


# ---------------------------------------------------------------- two shards


class TwoShards(Bench):
    """Two shards with disks. Rows have a page each."""

    def __init__(self):
        super().__init__(PAGE_BYTES)
        self.shards = {number: DiskShard(self) for number in (1, 2)}
        self.producer, self.worker = self.client(), self.client()
        self.producer.create_table(fields=[BODY], tasks=[Task("train", needs=["body"])])

    def put(self, shard, rows):
        """Put so many rows, one after the other, into this shard."""
        for _ in range(rows):
            call = self.producer.post(m.Grant(PAGE_BYTES, 50.0, [3 - shard], use="rows"))
            self.settle()
            granted = self.producer.take(call)
            assert (granted.shard, granted.nbytes) == (shard, PAGE_BYTES)
            block = m.WrittenBlock(granted.extent, granted.offset, PAGE_BYTES, 1, ["body"], [0])
            self.producer.ask(m.PutRequest("t", 1, m.Columns(fields=[BODY], blocks=[block])))

    def settle(self, *numbers):
        """The disks of these shards do all their jobs; of all, if none is named."""
        shards = [self.shards[number] for number in numbers or self.shards]
        while sum(self.step(shard) for shard in shards):
            pass

    def step(self, shard):
        """Do one job, if there is one. Returns whether there was."""
        shard.pump()
        if not shard.space.jobs:
            return False
        if (answer := shard.space.jobs.pop(0)()) is not None:
            shard.report(answer)
        return True

    def read(self, rows, client=None):
        return (client or self.worker).post(m.ReadRequest("t", np.array(rows, "<i8").tobytes()))

    def on_disk(self, shard):
        """The rows of this shard that are on its disk, ascending."""
        blocks = self.coordinator.ledger.state.core.blocks.blocks
        return sorted(number - 1 for number, block in blocks.items() if block.at.shard == -1 - shard)


@pytest.fixture
def two():
    two = TwoShards()
    two.put(1, 30)
    two.put(2, 30)
    two.settle()
    yield two
    two.close()


def test_of_two_that_are_as_full_the_one_with_less_on_its_disk_is_granted(two):
    """Otherwise all that goes to disks may go to one of them."""
    two.put(1, 2)
    two.settle()
    used = {number: two.coordinator.shards.remote[number].used for number in (1, 2)}
    while used[2] < used[1]:
        two.put(2, 1)
        used[2] += PAGE_BYTES
    while used[1] < used[2]:
        two.put(1, 1)
        used[1] += PAGE_BYTES
    assert len(two.on_disk(1)) > len(two.on_disk(2))
    two.coordinator.memory.allocator.allocate(PAGE_BYTES)  # the coordinator's own arena is full
    assert two.producer.ask(m.Grant(PAGE_BYTES, use="results")).shard == 2


def test_a_request_over_two_shards_waits_for_both(two):
    rows = [*two.on_disk(1)[:5], *two.on_disk(2)[:5]]
    call = two.read(rows)
    two.settle(1)
    assert two.worker.take(call) is None
    two.settle()
    assert isinstance(two.worker.take(call), m.ReadRows)


def test_requests_that_need_blocks_of_two_shards_in_other_orders_all_get_theirs(two):
    """Each needs more than half of both arenas."""
    clients = [two.client() for _ in range(4)]
    first, second = two.on_disk(1), two.on_disk(2)
    sets = [
        [*first[:8], *second[:8]],
        [*second[8:16], *first[8:16]],
        [*first[4:12], *second[4:12]],
        [*second[:12], first[-1]],
    ]
    calls = [two.read(rows, client) for rows, client in zip(sets, clients, strict=True)]
    pending = dict(zip(calls, clients, strict=True))
    waiting = list(zip(clients, calls, strict=True))
    for _ in range(4):
        two.settle()
        for client, call in list(waiting):
            if (reply := client.take(call)) is not None:
                assert isinstance(reply, m.ReadRows), reply
                waiting.remove((client, call))
                (part,) = reply.content.parts
                numbers = np.array([at.block for at in part.blocks], "<i8")
                client.post(m.Unpin(numbers.tobytes(), np.ones(numbers.size, "<i8").tobytes()))
        two.pass_time(LOAD_STUCK_S)
    assert not waiting, (pending, two.coordinator.spillers.explain_loads())


def test_blocks_that_came_back_in_vain_leave_for_whoever_holds_what_the_others_need(two):
    """A request has its blocks in one shard, and lacks memory in the other, which a worker uses. That worker needs memory of the first shard to go on."""
    resident = set(range(30, 60)) - set(two.on_disk(2))
    holder = two.client()
    held = holder.take(two.read(sorted(resident), holder))
    call = two.read([*two.on_disk(1)[:13], *two.on_disk(2)[:8]])
    two.settle()
    assert two.worker.take(call) is None
    wanted = holder.post(m.Grant(6 * PAGE_BYTES, wait_s=50.0, apart=[2]))
    for _ in range(3):
        two.pass_time(LOAD_STUCK_S)
        two.settle()
    assert isinstance(holder.take(wanted), m.Granted), two.coordinator.spillers.explain_loads()
    (part,) = held.content.parts
    numbers = np.array([at.block for at in part.blocks], "<i8")
    holder.post(m.Unpin(numbers.tobytes(), np.ones(numbers.size, "<i8").tobytes()))
    holder.ask(m.Goodbye())
    for _ in range(3):
        two.settle()
        two.pass_time(LOAD_STUCK_S)
    assert isinstance(two.worker.take(call), m.ReadRows), two.coordinator.spillers.explain_loads()


def test_requests_for_other_shards_do_not_wait_for_a_slow_one(two):
    slow, fast = two.client(), two.client()
    call = two.read(two.on_disk(1)[:5], slow)
    other = two.read(two.on_disk(2)[:5], fast)
    two.settle(2)
    assert isinstance(fast.take(other), m.ReadRows)
    assert slow.take(call) is None


def test_a_disk_that_hangs_holds_up_only_what_lies_on_it(two):
    both, one = two.client(), two.client()
    first = two.read([*two.on_disk(1)[:5], *two.on_disk(2)[:5]], both)
    second = two.read(two.on_disk(2)[5:17], one)
    two.settle(2)
    assert one.take(second) is None, "those of the first request are spared"
    two.pass_time(SPILL_SILENT_S)
    two.settle(2)
    assert isinstance(one.take(second), m.ReadRows)
    assert "silent for more than" in two.coordinator.spillers.explain_loads()
    assert both.take(first) is None
    two.pass_time(0.0)
    assert two.coordinator.next_deadline() is None or two.coordinator.next_deadline() > two.now, "it spins"
    (part,) = two.coordinator.ledger.state.core.blocks.pins.values()
    one.post(m.Unpin(np.array(list(part), "<i8").tobytes(), np.ones(len(part), "<i8").tobytes()))
    two.settle()
    assert isinstance(both.take(first), m.ReadRows), "the disk answers again"


def test_a_line_that_is_full_for_one_disk_is_not_for_another(two, monkeypatch):
    monkeypatch.setattr("transferqueue.ledger.rows.cold_blocks.LOAD_ORDERS_MAX", 3)
    first, second = two.on_disk(1), two.on_disk(2)
    for row in first[:3]:
        two.read([row], two.client())
    refused = two.client()
    answer = refused.take(two.read(first[3:4], refused))
    assert (answer.error, "on the disk of shard 1" in answer.text) == ("Full", True)
    other = two.client()
    call = two.read(second[:2], other)
    two.settle(2)
    assert isinstance(other.take(call), m.ReadRows)
    two.settle()
    again = two.client()
    call = two.read(first[3:4], again)
    two.settle()
    assert isinstance(again.take(call), m.ReadRows)


def test_one_shard_dies_and_the_requests_of_the_other_go_on(two):
    other = two.client()
    first = two.read([*two.on_disk(1)[:5], *two.on_disk(2)[:5]])
    second = two.read(two.on_disk(2)[5:17], other)
    kill(two, two.shards.pop(1))
    two.settle()
    assert two.worker.take(first).error == "NotFound"
    assert isinstance(other.take(second), m.ReadRows)
    assert two.coordinator.counters.internal_errors == 0


def test_a_shard_dies_that_several_requests_need_together_with_another(two):
    """The first of them is ended while the second still names the shard that is gone."""
    clients = [two.client() for _ in range(3)]
    both = [*two.on_disk(1)[:3], *two.on_disk(2)[:3]]
    calls = [two.read([*both, two.on_disk(2)[4 + at]], client) for at, client in enumerate(clients)]
    other = two.client()
    last = two.read(two.on_disk(2)[5:9], other)
    kill(two, two.shards.pop(1))
    two.settle()
    assert [client.take(call).error for client, call in zip(clients, calls, strict=True)] == ["NotFound"] * 3
    assert isinstance(other.take(last), m.ReadRows)
    assert audit(two)["dropped"] == {"lost": 30}
    assert two.coordinator.counters.internal_errors == 0


# ---------------------------------------------------------------- requests that end


def loaded(two, shard):
    return two.coordinator.spillers.get(shard).plain()["loaded_blocks"]


def test_nothing_is_loaded_for_a_request_that_ended_while_others_were_before_it(two):
    first, gone, last = two.client(), two.client(), two.client()
    rows = two.on_disk(1)
    calls = [two.read(rows[:3], first), two.read(rows[3:9], gone), two.read(rows[9:11], last)]
    end(two, gone)
    two.settle()
    assert isinstance(first.take(calls[0]), m.ReadRows)
    assert isinstance(last.take(calls[2]), m.ReadRows)
    assert loaded(two, 1) == 5


def test_a_request_that_ends_while_its_blocks_are_loaded_holds_up_nobody(two):
    """Its turn ends with it: what the disk of one shard has not loaded yet is not waited for in the other."""
    gone, other = two.client(), two.client()
    two.read([*two.on_disk(1)[:3], *two.on_disk(2)[:3]], gone)
    call = two.read(two.on_disk(2)[3:16], other)
    two.settle(2)
    assert other.take(call) is None, "the blocks of the first request are spared"
    end(two, gone)
    two.settle(2)
    assert isinstance(other.take(call), m.ReadRows)
