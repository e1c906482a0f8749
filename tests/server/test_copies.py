"""Copy orders at the coordinator: which shard gets one, what it names, what comes again, and what is left free."""

import pytest

from tests.server.lives import Life, again
from tests.server.nodes import Bench
from tests.server.test_replicas import REPLICATED, copied
from tests.server.test_shards import Joined, local
from transferqueue.ledger.rows import missing_copies
from transferqueue.limits import MIB, PAGE_BYTES, RESULTS_SHARE
from transferqueue.server.durability_level import Level
from transferqueue.server.shards import copies
from transferqueue.server.shards.tickets import LiveExtents, TicketIssuer
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.stats import Stats

SECRET = b"s" * 32


@pytest.fixture
def bench():
    made = Bench(arena_bytes=MIB)
    yield made
    made.close()


class Deployment:
    """A table and shards that carry out what they are told. `copied` puts its rows into shards 1 and 2, or 1 and 0 if
    there is one."""

    def __init__(self, bench, count):
        self.bench, self.client = bench, local(bench)
        self.shards = {}
        """By number."""
        for _ in range(count):
            self.join()
        assert isinstance(self.client.ask(REPLICATED), m.TableTerms)

    def join(self, **offer):
        shard = Joined(self.bench, **offer)
        shard.work()
        self.shards[max(self.bench.remote.shards.remote)] = shard
        return shard

    def kill(self, number):
        shard = self.shards.pop(number)
        self.bench.coordinator.process_exited(shard.client.session, self.bench.now)
        self.bench.deliver()

    def rows_with_one_copy(self):
        stats = codec.decode_observed(self.client.ask(m.Observe("stats")), Stats)
        return stats.tables["t"].rows_one_copy


def reported(order):
    return m.TakeCopies(order.target.extent, [at.block for at in order.blocks], 60.0)


def test_a_shard_waits_for_orders_and_gets_one_when_a_copy_is_lost(bench):
    made = Deployment(bench, 3)
    lost, *_ = sorted(copied(made.client), reverse=True)
    waiting = {number: shard.client.post(m.TakeCopies(wait_s=60.0)) for number, shard in made.shards.items()}
    assert all(made.shards[number].client.take(call) is None for number, call in waiting.items())
    made.kill(lost)
    assert made.rows_with_one_copy() == 2
    orders = {
        number: order
        for number, shard in made.shards.items()
        if (order := shard.client.take(waiting[number])) is not None
    }
    ((number, order),) = orders.items()
    assert (order.shard, order.target.shard) == (number, number)
    assert made.rows_with_one_copy() == 2
    made.shards[number].client.post(reported(order))
    assert made.rows_with_one_copy() == 0


def test_an_order_names_places_with_tickets_even_where_memory_is_mapped(bench):
    made = Deployment(bench, 2)
    places = sorted(copied(made.client))
    made.kill(places[-1])
    (number,) = made.shards
    order = made.shards[number].client.ask(m.TakeCopies())
    source = order.blocks[0]
    issuers = {0: bench.remote.tickets, number: TicketIssuer(SECRET, LiveExtents(), LiveExtents())}
    session = made.shards[number].client.session
    located = b.BulkBlock(source.block, source.extent, source.offset, source.nbytes, 1, 0, [0], source.ticket)
    issuers[source.shard].check_read(session, source.shard, [located])
    target = order.target
    write = b.WriteExtent(
        1, session, target.shard, target.extent, target.offset, target.nbytes, target.ticket, order.offsets[0],
        source.nbytes,
    )  # fmt: skip
    issuers[target.shard].check_write(write)
    assert (source.fields, source.counts, source.copies) == ([], [], [])


def test_an_order_comes_again_until_it_is_reported(bench):
    made = Deployment(bench, 2)
    made.kill(max(copied(made.client)))
    (shard,) = made.shards.values()
    order = shard.client.ask(m.TakeCopies())
    assert shard.client.ask(m.TakeCopies()) == order
    assert shard.client.ask(m.TakeCopies(order.target.extent + 100, [1])) == order, "that was another order"
    assert shard.client.take(shard.client.post(reported(order))) is None
    assert shard.client.take(shard.client.post(reported(order))) is None
    assert made.rows_with_one_copy() == 0


def test_memory_of_an_order_returns_with_its_shard_and_another_shard_copies(bench):
    made = Deployment(bench, 1)
    assert sorted(copied(made.client)) == [0, 1]
    made.kill(1)
    second, third = made.join(), made.join()
    second.client.ask(m.TakeCopies())
    assert third.client.take(third.client.post(m.TakeCopies(wait_s=60.0))) is None
    made.kill(2)
    order = third.client.take(third.client.ids)
    assert order.target.shard == 3
    third.client.post(reported(order))
    assert made.rows_with_one_copy() == 0


def test_the_last_copy_is_written_to_the_coordinator_if_no_other_shard_is_there(bench):
    made = Deployment(bench, 2)
    assert copied(made.client) == [1, 2]
    made.kill(2)
    order = made.shards[1].client.ask(m.TakeCopies())
    assert (order.shard, order.target.shard, [at.shard for at in order.blocks]) == (1, 0, [1])
    made.shards[1].client.post(reported(order))
    assert made.rows_with_one_copy() == 0


def test_a_shard_that_drains_copies_nothing_to_itself(bench):
    made = Deployment(bench, 1)
    copied(made.client)
    made.kill(1)
    shard = made.join()
    made.client.ask(m.Grant(PAGE_BYTES, apart=[0]))
    made.client.ask(m.Drain(2))
    assert shard.client.take(shard.client.post(m.TakeCopies(wait_s=60.0))) is None
    assert made.rows_with_one_copy() == 2


def test_copies_leave_the_room_for_results_and_go_on_when_memory_returns(bench):
    made = Deployment(bench, 1)
    copied(made.client)
    made.kill(1)
    shard = made.join(capacity=RESULTS_SHARE * PAGE_BYTES)
    grants = []
    for _ in range(RESULTS_SHARE - 1):
        call = made.client.post(m.Grant(PAGE_BYTES, wait_s=60.0, apart=[0]))
        shard.work()
        grants.append(made.client.take(call))
    call = shard.client.post(m.TakeCopies(wait_s=60.0))
    assert shard.client.take(call) is None
    made.client.ask(m.ReturnGrant(grants[0].extent))
    assert shard.client.take(call).target.shard == 2


def test_an_order_is_halved_until_it_fits_the_pieces_of_a_fragmented_shard(bench):
    made = Deployment(bench, 1)
    for _ in range(40):
        copied(made.client)
    made.kill(1)
    shard = made.join(capacity=16 * PAGE_BYTES)
    calls = [made.client.post(m.Grant(PAGE_BYTES, wait_s=60.0, apart=[0])) for _ in range(16)]
    shard.work()
    grants = [made.client.take(call) for call in calls]
    for granted in grants[::2]:
        made.client.ask(m.ReturnGrant(granted.extent))
    shard.work()
    reported_blocks = 0
    order = shard.client.ask(m.TakeCopies())
    while order is not None:
        assert order.target.nbytes == PAGE_BYTES
        reported_blocks += len(order.blocks)
        order = shard.client.take(shard.client.post(reported(order)))
    assert (reported_blocks, made.rows_with_one_copy()) == (40, 0)


def test_all_orders_together_are_bounded(bench, monkeypatch):
    monkeypatch.setattr(missing_copies, "COPY_ORDER_BLOCKS", 1)
    monkeypatch.setattr(copies, "COPIES_IN_FLIGHT_BYTES", PAGE_BYTES)
    made = Deployment(bench, 1)
    for _ in range(2):
        copied(made.client)
    made.kill(1)
    second, third = made.join(), made.join()
    order = second.client.ask(m.TakeCopies())
    call = third.client.post(m.TakeCopies(wait_s=60.0))
    assert third.client.take(call) is None
    order = second.client.ask(reported(order))
    assert made.rows_with_one_copy() == 2
    second.client.post(reported(order))
    assert made.rows_with_one_copy() == 0


def test_only_a_shard_takes_copies(bench):
    client = local(bench)
    refused = client.ask(m.TakeCopies())
    assert (refused.error, refused.text) == (
        "UsageError",
        f"session {client.session} is no shard, and gets no orders",
    )


def test_what_shards_wait_for_is_no_request_that_waits(bench):
    shard = Joined(bench)
    shard.work()
    shard.client.post(m.TakeCopies(wait_s=60.0))
    for what, kind in (("stats", Stats), ("doctor", DoctorAnswer)):
        assert codec.decode_observed(local(bench).ask(m.Observe(what)), kind).waiting == []


def test_an_order_outlives_the_coordinator(tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    life = Life(tmp_path / "state", Level.PROCESS, shared)
    made = Deployment(life, 1)
    copied(made.client)
    made.kill(1)
    shard = made.join()
    order = shard.client.ask(m.TakeCopies())
    life.crash()
    life = Life(tmp_path / "state", Level.PROCESS, shared)
    life.clients = 100
    shard.client, client = again(life, shard.client), again(life, made.client)
    came = shard.client.ask(m.TakeCopies())
    assert (came.target, came.offsets) == (order.target, order.offsets), "with the same tickets too"
    shard.client.post(reported(order))
    life.crash()
    life = Life(tmp_path / "state", Level.PROCESS, shared)
    client = again(life, client)
    again(life, shard.client)
    stats = codec.decode_observed(client.ask(m.Observe("stats")), Stats)
    assert stats.tables["t"].rows_one_copy == 0
    life.crash()
