"""Blocks of a snapshot that lie in remote shards: who gets which order, what an order that fails leads to, and what
memory returns when."""

import struct

import pytest

from tests.server.lives import Life, again
from tests.server.nodes import Bench
from tests.server.test_replicas import REPLICATED, copied
from tests.server.test_shards import BIG, Joined, local, put_into
from transferqueue.errors import Corruption, Impossible, OutOfMemory, ShardLost, Unreachable
from transferqueue.limits import FETCH_TRIES, MIB, PAGE_BYTES, SNAPSHOT_FETCH_S
from transferqueue.policies import Task
from transferqueue.server.durability_level import Level
from transferqueue.server.shards import block_fetches
from transferqueue.server.shards.block_fetches import ArrivedBlocks
from transferqueue.server.shards.tickets import LiveExtents, TicketIssuer
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import messages as m

PLAIN = m.CreateTable("t", fields=[BIG], tasks=[Task("train", ["x"])])


@pytest.fixture
def bench():
    made = Bench(arena_bytes=MIB)
    yield made
    made.close()


class Fetching:
    """A table, shards, and a snapshot that fetches what lies in them; `arrived` is what its thread would get."""

    def __init__(self, bench, shards=1, puts=1, table=PLAIN):
        self.bench, self.client, self.arrived = bench, local(bench), []
        self.shards = {}
        for _ in range(shards):
            joined = Joined(bench)
            joined.work()
            self.shards[max(bench.remote.shards.remote)] = joined
        assert isinstance(self.client.ask(table), m.TableTerms)
        for _ in range(puts):
            put = copied if table is REPLICATED else put_away
            put(self.client)

    @property
    def fetches(self):
        return self.bench.remote.fetches

    @property
    def used(self):
        return self.bench.coordinator.memory.used

    def begin(self):
        blocks = self.bench.coordinator.ledger.take_snapshot(self.bench.now).blocks
        self.held = [number for at in blocks.values() for number in (at.extent, *(copy.extent for copy in at.copies))]
        self.fetches.begin(blocks.values(), self.arrived.append, self.bench.now)
        self.bench.coordinator.lending.hold(self.held)
        self.settle()

    def settle(self):
        self.bench.coordinator.tick(self.bench.now)
        self.bench.deliver()

    def end(self):
        self.fetches.end(self.bench.now)
        self.bench.coordinator.lending.release(self.held, self.bench.now)
        self.settle()

    def kill(self, number):
        shard = self.shards.pop(number)
        self.bench.coordinator.process_exited(shard.client.session, self.bench.now)
        self.bench.deliver()

    def silence(self):
        """As much time as a shard has, as the thread would notice it."""
        self.bench.pass_time(SNAPSHOT_FETCH_S)
        self.fetches.expire(self.bench.now)
        self.settle()


def put_away(client):
    """A put of two rows into a shard that is not the coordinator's."""
    granted = client.ask(m.Grant(PAGE_BYTES, apart=[0]))
    assert isinstance(client.ask(put_into(granted)), m.PutRows)
    return granted.shard


def finish(client):
    """Both rows of the only block are done, and nobody views it."""
    leased = client.ask(m.LeaseRequest("t", "train", rows=2))
    assert isinstance(client.ask(m.Ack("t", leased.lease, leased.token)), m.DoneReply)
    client.post(m.Unpin(struct.pack("<q", 1), struct.pack("<q", 1)))


def wait(shard, request=m.TakeCopies()):  # noqa: B008
    """A shard asks for an order and waits. Returns its call."""
    return shard.client.post(m.TakeCopies(request.extent, request.written, 60.0))


def reported(order, blocks=None):
    written = [at.block for at in order.blocks] if blocks is None else blocks
    return m.TakeCopies(order.target.extent, written, 60.0)


# ---------------------------------------------------------------- bad input


def test_a_block_that_can_never_be_received_is_refused_before_anything_begins(bench):
    made = Fetching(bench, puts=0)
    granted = made.client.ask(m.Grant(2 * MIB, apart=[0]))
    block = m.WrittenBlock(granted.extent, granted.offset, 2 * MIB, 2, ["x"], [(2 * MIB - 64) // 8])
    assert isinstance(made.client.ask(m.PutRequest("t", 2, m.Columns(blocks=[block]))), m.PutRows)
    with pytest.raises(Impossible, match=r"2,097,152 bytes in one extent can never be granted.*--arena-bytes"):
        made.begin()
    call = wait(made.shards[1])
    assert made.shards[1].client.take(call) is None
    assert made.arrived == []


def test_a_report_of_what_was_never_ordered_changes_nothing(bench):
    made = Fetching(bench)
    made.begin()
    (shard,) = made.shards.values()
    order = shard.client.ask(m.TakeCopies())
    assert shard.client.ask(m.TakeCopies(order.target.extent + 1, [order.blocks[0].block])) == order
    assert made.arrived == []
    shard.client.post(reported(order, [999]))
    assert made.arrived == [], "it does not have block 999"


# ---------------------------------------------------------------- orders


def test_a_waiting_shard_gets_an_order_into_the_coordinators_memory(bench):
    made = Fetching(bench)
    (shard,) = made.shards.values()
    call = wait(shard)
    used = made.used
    made.begin()
    order = shard.client.take(call)
    assert (order.shard, order.target.shard, [at.shard for at in order.blocks]) == (1, 0, [1])
    source = order.blocks[0]
    issuer = TicketIssuer(b"s" * 32, LiveExtents(), LiveExtents())
    located = b.BulkBlock(source.block, source.extent, source.offset, source.nbytes, 1, 0, [0], source.ticket)
    issuer.check_read(shard.client.session, 1, [located])
    target = order.target
    write = b.WriteExtent(
        1, shard.client.session, 0, target.extent, target.offset, target.nbytes, target.ticket, order.offsets[0],
        source.nbytes,
    )  # fmt: skip
    bench.remote.tickets.check_write(write)
    call = wait(shard, reported(order))
    (arrived,) = made.arrived
    assert [(at.block, offset) for at, offset in arrived.blocks] == [(source.block, order.offsets[0])]
    assert made.used == used + PAGE_BYTES, "until it is read"
    made.fetches.read(arrived, (), bench.now)
    made.settle()
    assert made.used == used
    made.end()
    assert shard.client.take(call) is None


def test_an_order_comes_again_until_it_is_reported(bench):
    made = Fetching(bench)
    made.begin()
    (shard,) = made.shards.values()
    order = shard.client.ask(m.TakeCopies())
    assert shard.client.ask(m.TakeCopies()) == order
    wait(shard, reported(order))
    wait(shard, reported(order))
    assert len(made.arrived) == 1


def test_orders_are_of_bounded_size_and_all_together_too(bench, monkeypatch):
    monkeypatch.setattr(block_fetches, "COPY_ORDER_BYTES", PAGE_BYTES)
    monkeypatch.setattr(block_fetches, "SNAPSHOT_FETCH_BYTES", PAGE_BYTES)
    made = Fetching(bench, shards=2, puts=6)
    made.begin()
    first, second = made.shards.values()
    order = first.client.ask(m.TakeCopies())
    assert order.target.nbytes == PAGE_BYTES
    call = wait(second)
    assert second.client.take(call) is None
    wait(first, reported(order))
    assert second.client.take(call) is None, "the thread has not read it"
    made.fetches.read(made.arrived[0], (), bench.now)
    made.settle()
    assert second.client.take(call) is not None


def test_blocks_arrive_with_what_a_shard_had_to_copy_before(bench):
    made = Fetching(bench, shards=3, puts=2, table=REPLICATED)
    lost = bench.coordinator.ledger.take_snapshot(bench.now).blocks[1].shard
    made.kill(lost)
    (number, copying), *_ = (
        (number, order)
        for number, shard in made.shards.items()
        if isinstance(order := shard.client.take(wait(shard)), m.CopyOrder)
    )
    assert copying.target.shard == number
    made.begin()
    shard = made.shards[number]
    assert shard.client.ask(m.TakeCopies()) == copying, "one order at a time"
    order = shard.client.take(wait(shard, reported(copying)))
    assert order is None or order.target.shard == 0


# ---------------------------------------------------------------- what fails


def test_a_block_is_ordered_again_and_at_last_given_up_by_name(bench):
    made = Fetching(bench)
    used = made.used
    made.begin()
    (shard,) = made.shards.values()
    for _ in range(FETCH_TRIES):
        assert made.arrived == []
        order = shard.client.ask(m.TakeCopies())
        wait(shard, reported(order, []))
    (error,) = made.arrived
    assert isinstance(error, Unreachable)
    assert f"shard 1 could not copy block 1 in {FETCH_TRIES} orders; see its log" in str(error)
    made.end()
    assert made.used == used


def test_a_block_that_arrives_damaged_is_fetched_again(bench):
    made = Fetching(bench)
    made.begin()
    (shard,) = made.shards.values()
    for turn in range(FETCH_TRIES):
        order = shard.client.ask(m.TakeCopies())
        wait(shard, reported(order))
        made.fetches.read(made.arrived[turn], [1], bench.now)
        made.settle()
    assert isinstance(made.arrived[-1], Corruption)
    assert made.arrived[-1].block == 1
    assert "block 1, copied from shard 1, does not match its checksum" in str(made.arrived[-1])


def test_the_only_copy_dies_with_its_shard(bench):
    made = Fetching(bench)
    used = made.used
    made.begin()
    made.shards[1].client.ask(m.TakeCopies())
    made.kill(1)
    (error,) = made.arrived
    assert isinstance(error, ShardLost)
    assert "shard 1 is gone, and had the only copy of block 1" in str(error)
    made.end()
    assert made.used == used


def test_a_block_with_two_copies_comes_from_the_other_shard(bench):
    made = Fetching(bench, shards=3, table=REPLICATED)
    made.begin()
    at = bench.coordinator.ledger.take_snapshot(bench.now).blocks[1]
    other = at.copies[0].shard
    made.shards[at.shard].client.ask(m.TakeCopies())
    made.kill(at.shard)
    order = made.shards[other].client.ask(m.TakeCopies())
    assert [(place.block, place.shard) for place in order.blocks] == [(1, other)]
    wait(made.shards[other], reported(order))
    assert isinstance(made.arrived[0], ArrivedBlocks)


def test_a_shard_that_dies_after_its_report_takes_nothing_away(bench):
    made = Fetching(bench)
    used = made.used
    made.begin()
    (shard,) = made.shards.values()
    wait(shard, reported(shard.client.ask(m.TakeCopies())))
    made.kill(1)
    (arrived,) = made.arrived
    assert isinstance(arrived, ArrivedBlocks)
    assert made.used == used + PAGE_BYTES, "nobody else gets the memory that the thread reads"
    made.fetches.read(arrived, (), bench.now)
    made.settle()
    assert made.used == used


def test_a_shard_that_does_nothing_is_given_up_and_its_memory_returns_with_its_late_report(bench):
    made = Fetching(bench)
    used = made.used
    made.begin()
    (shard,) = made.shards.values()
    order = shard.client.ask(m.TakeCopies())
    bench.pass_time(SNAPSHOT_FETCH_S / 2)
    made.fetches.expire(bench.now)
    assert made.arrived == []
    made.silence()
    (error,) = made.arrived
    assert isinstance(error, Unreachable)
    assert f"shard 1, which has the only copy of block 1, copied nothing for {SNAPSHOT_FETCH_S:g} s" in str(error)
    made.end()
    assert made.used == used + PAGE_BYTES, "it may still write there"
    assert shard.client.ask(m.TakeCopies()) == m.CopyOrder(1, order.target, [], [])
    wait(shard, reported(order))
    made.settle()
    assert made.used == used
    assert len(made.arrived) == 1


def test_a_shard_without_an_order_because_there_is_no_room_is_told_apart(bench):
    made = Fetching(bench)
    grants = [made.client.ask(m.Grant(PAGE_BYTES)) for _ in range(MIB // PAGE_BYTES)]
    assert {granted.shard for granted in grants} == {0, 1}
    while isinstance(granted := made.client.ask(m.Grant(PAGE_BYTES, apart=[1])), m.Granted):
        grants.append(granted)
    (shard,) = made.shards.values()
    made.begin()
    call = wait(shard)
    assert shard.client.take(call) is None
    made.silence()
    (error,) = made.arrived
    assert isinstance(error, OutOfMemory)
    assert "the coordinator's own memory had no room for block 1 of shard 1" in str(error)
    made.end()


def test_room_that_returns_lets_a_shard_go_on(bench):
    made = Fetching(bench)
    grants = []
    while isinstance(granted := made.client.ask(m.Grant(PAGE_BYTES, apart=[1])), m.Granted):
        grants.append(granted)
    (shard,) = made.shards.values()
    made.begin()
    call = wait(shard)
    assert shard.client.take(call) is None
    made.client.ask(m.ReturnGrant(grants[0].extent))
    assert shard.client.take(call).target.shard == 0


# ---------------------------------------------------------------- what is held


def test_rows_that_end_meanwhile_keep_their_bytes_until_the_snapshot_ends(bench):
    made = Fetching(bench)
    (shard,) = made.shards.values()
    made.begin()
    order = shard.client.ask(m.TakeCopies())
    finish(made.client)
    assert bench.coordinator.ledger.blocks_of(1) == []
    assert shard.work() == [], "nothing is revoked"
    live = bench.remote._live_set(1)
    assert order.blocks[0].extent in struct.unpack(f"<{len(live.extents) // 8}q", live.extents)
    made.end()
    assert any(isinstance(command, m.Revoke) for command in shard.work())


def test_a_shard_that_drains_stays_until_the_snapshot_has_its_bytes(bench):
    made = Fetching(bench)
    (shard,) = made.shards.values()
    made.begin()
    made.client.ask(m.Drain(1))
    finish(made.client)
    assert not any(isinstance(command, m.ShutDownShard) for command in shard.work())
    made.end()
    assert any(isinstance(command, m.ShutDownShard) for command in shard.work())


def test_a_restart_takes_back_what_a_shard_may_still_write_to(tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    life = Life(tmp_path / "state", Level.PROCESS, shared)
    made = Fetching(life)
    used = made.used
    made.begin()
    shard = made.shards[1]
    order = shard.client.ask(m.TakeCopies())
    life.crash()
    life = Life(tmp_path / "state", Level.PROCESS, shared)
    life.clients = 100
    shard.client = again(life, shard.client)
    again(life, made.client)
    assert life.coordinator.memory.used == used + PAGE_BYTES
    came = shard.client.ask(m.TakeCopies())
    assert (came.target.extent, came.blocks) == (order.target.extent, [])
    assert shard.client.take(shard.client.post(reported(order))) is None
    life.deliver()
    assert life.coordinator.memory.used == used
    life.crash()
    life = Life(tmp_path / "state", Level.PROCESS, shared)
    assert life.coordinator.memory.used == used
    life.crash()
