"""Remote shards, as the coordinator keeps their books: a process joins with memory, is lent, drains, dies."""

import os
import struct

import pytest

from tests.server.nodes import Bench
from transferqueue.errors import UsageError
from transferqueue.limits import ARENA_STEP_BYTES, MIB, PAGE_BYTES, RESULTS_SHARE
from transferqueue.policies import Task
from transferqueue.schema import Field, align
from transferqueue.server.sessions.authorization import Authorizer
from transferqueue.server.shards.tickets import LiveExtents, TicketIssuer
from transferqueue.transport import this_host
from transferqueue.transport.bulk import protocol as b
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.transport.security.keyring import Keyring, add, load
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer, Stats

CAPACITY = 4 * ARENA_STEP_BYTES
BIG = Field("x", "int64", (None,))


@pytest.fixture
def bench():
    made = Bench(arena_bytes=MIB)
    yield made
    made.close()


def memory(bench, size):
    """Path of a sparse arena of this process."""
    descriptor = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    bench.descriptors.append(descriptor)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Joined:
    """A shard that carries out whatever it is told, when it is told to (`work`)."""

    def __init__(self, bench, host=None, **offer):
        facts = {
            "path": memory(bench, offer.get("capacity", CAPACITY)) if host is None else "/arena",
            "capacity": CAPACITY,
            "endpoint": "tcp://127.0.0.1:9",
            "certificate": "",
            "secret": b"s" * 32,
        }
        hello = {"host": this_host(), "pid": os.getpid()} if host is None else {"host": host}
        self.offer = m.ShardOffer(**(facts | offer))
        self.client = bench.client(**hello, shard=self.offer)
        self.epoch = bench.coordinator.identity.epoch
        self.done, self.failed, self.waiting = 0, [], None
        self.told = []

    def work(self, fail=()):
        """Carry out all there is; the orders."""
        found = []
        while True:
            if self.waiting is None:
                self.waiting = self.client.post(m.PollCommands(self.epoch, self.done, self.failed, wait_s=60.0))
            reply = self.client.take(self.waiting)
            if reply is None:
                return found
            assert isinstance(reply, m.ShardCommands), reply
            self.waiting, self.failed = None, []
            for number, order in enumerate(reply.orders, reply.first):
                assert number == self.done + 1
                self.done = number
                found.append(order)
                if isinstance(order, fail):
                    self.failed.append(number)


def local(bench):
    return bench.client(host=this_host(), pid=os.getpid())


def shards(bench):
    return codec.decode_observed(local(bench).ask(m.Observe("stats")), Stats).server.shards


def write(client, rows=2, nbytes=PAGE_BYTES):
    """A put into wherever the grant is. Returns the grant."""
    granted = client.ask(m.Grant(nbytes))
    assert isinstance(client.ask(put_into(granted, rows)), m.PutRows)
    return granted


def put_into(granted, rows=2, at=0):
    """Rows of one value each: their offsets, and the values."""
    nbytes = align(8 * (rows + 1)) + align(8 * rows)
    return m.PutRequest(
        "t", rows, m.Columns(blocks=[m.WrittenBlock(granted.extent, granted.offset + at, nbytes, rows, ["x"], [rows])])
    )


def create(client):
    client.ask(m.CreateTable("t", fields=[BIG], tasks=[Task("train", ["x"])]))


def test_one_that_joins_is_told_to_take_pages_and_is_lent_from_then_on(bench):
    shard, client = Joined(bench), local(bench)
    assert client.ask(m.Grant(PAGE_BYTES)).shard == 0, "no pages yet"
    assert shard.work() == [m.AllocatePages(0, ARENA_STEP_BYTES)]
    assert client.ask(m.Grant(PAGE_BYTES)).shard == 1, "the least full one"
    assert [(one.shard, one.used_bytes) for one in shards(bench)] == [(1, PAGE_BYTES)]


def test_pages_are_asked_for_ahead_and_when_an_extent_needs_more(bench):
    shard, client = Joined(bench), local(bench)
    shard.work()
    large = client.post(m.Grant(2 * ARENA_STEP_BYTES, wait_s=5.0))
    assert client.take(large) is None
    assert shard.work() == [m.AllocatePages(ARENA_STEP_BYTES, 2 * ARENA_STEP_BYTES)]
    assert client.take(large).shard == 1
    client.ask(m.Grant(ARENA_STEP_BYTES - PAGE_BYTES))
    assert shard.work() == [m.AllocatePages(3 * ARENA_STEP_BYTES, ARENA_STEP_BYTES)]


def test_a_shard_that_gets_no_pages_is_not_asked_again_and_again(bench):
    shard, client = Joined(bench), local(bench)
    assert shard.work(fail=m.AllocatePages) == [m.AllocatePages(0, ARENA_STEP_BYTES)]
    assert client.ask(m.Grant(PAGE_BYTES)).shard == 0
    assert shard.work() == []
    assert shards(bench)[0].backed_bytes == 0


def test_near_comes_before_far_and_far_before_nothing(bench):
    near, far = Joined(bench, host="there"), Joined(bench, host="elsewhere else")
    near.work(), far.work()
    client = bench.client(host="there")
    assert client.ask(m.Grant(PAGE_BYTES)).shard == 1
    assert client.ask(m.Grant(ARENA_STEP_BYTES)).shard == 2, "the near one has no pages for so much"


def test_who_maps_a_shard_is_told_its_arena_and_needs_no_ticket(bench):
    shard = Joined(bench)
    shard.work()
    client, stranger = local(bench), bench.client(host="elsewhere")
    assert [one.path for one in client.ask(m.ListShards()).shards] == [shard.offer.path]
    (at,) = stranger.ask(m.ListShards()).shards
    assert (at.path, at.endpoint) == ("", "tcp://127.0.0.1:9")
    granted = client.ask(m.Grant(PAGE_BYTES))
    assert (granted.shard, granted.ticket) == (1, b"")
    assert stranger.ask(m.Grant(PAGE_BYTES)).ticket


def test_a_ticket_holds_in_the_shard_and_what_it_was_for_is_lent_again_only_when_it_is_over_there(bench):
    shard = Joined(bench, host="there")
    shard.work()
    client = bench.client(host="there")
    granted = client.ask(m.Grant(PAGE_BYTES))
    there = TicketIssuer(b"s" * 32, LiveExtents(), LiveExtents())
    write_it = b.WriteExtent(
        1, client.session, granted.shard, granted.extent, granted.offset, granted.nbytes, granted.ticket,
        granted.offset, 64,
    )  # fmt: skip
    there.check_write(write_it)
    there.check_live(client.session, frozenset([granted.extent]))
    client.ask(m.ReturnGrant(granted.extent))
    assert shards(bench)[0].used_bytes == PAGE_BYTES
    assert shard.work() == [m.Revoke(granted.extent)]
    assert shards(bench)[0].used_bytes == 0
    client.ask(m.Goodbye())
    assert shard.work() == [m.CloseTransfers(client.session)]


def test_what_stands_is_told_once_many_have_ended(bench, monkeypatch):
    monkeypatch.setattr("transferqueue.server.shards.remote_shard._ENDED_MAX", 3)
    shard = Joined(bench, host="there")
    shard.work()
    client = bench.client(host="there")
    kept, *gone = [client.ask(m.Grant(PAGE_BYTES)).extent for _ in range(4)]
    for extent in gone:
        client.ask(m.ReturnGrant(extent))
    *revoked, stand = shard.work()
    assert revoked == [m.Revoke(extent) for extent in gone]
    assert stand.extents_to == max(gone) + 1
    assert struct.unpack("<q", stand.extents) == (kept,)
    assert client.session in struct.unpack(f"<{len(stand.sessions) // 8}q", stand.sessions)


def test_one_that_drains_is_lent_no_more_and_leaves_when_it_is_empty(bench):
    shard, client = Joined(bench), local(bench)
    shard.work()
    create(client)
    assert write(client).shard == 1
    client.ask(m.Drain(1))
    assert client.ask(m.Grant(PAGE_BYTES)).shard == 0
    assert m.ShutDownShard() not in shard.work()
    leased = client.ask(m.LeaseRequest("t", "train", rows=2))
    client.ask(m.Ack("t", leased.lease, leased.token))
    (block,) = {at.block for part in leased.content.parts for at in part.blocks}
    client.post(m.Unpin(struct.pack("<q", block), struct.pack("<q", 1)))
    assert shard.work()[-1:] == [m.ShutDownShard()]
    shard.client.ask(m.Goodbye())
    assert shards(bench) == []
    assert codec.decode_observed(client.ask(m.Observe("audit")), AuditAnswer).tables["t"].rows_done == 2


def test_with_a_shard_its_rows_are_lost_and_work_goes_on(bench):
    shard, client = Joined(bench), local(bench)
    shard.work()
    create(client)
    granted = write(client, nbytes=2 * PAGE_BYTES)
    assert granted.shard == 1
    bench.coordinator.process_exited(shard.client.session, bench.now)
    assert client.ask(put_into(granted, at=1024)).error == "ShardLost"
    audit = codec.decode_observed(client.ask(m.Observe("audit")), AuditAnswer).tables["t"]
    assert audit.rows_put == 2
    assert (audit.rows_dropped, audit.rows_lost) == (2, 2)
    assert write(client).shard == 0
    assert len(client.ask(m.LeaseRequest("t", "train", rows=2)).content.rows) == 16


def test_an_extent_larger_than_every_shard_is_refused_at_once(bench):
    Joined(bench).work()
    client = local(bench)
    assert client.ask(m.Grant(CAPACITY + PAGE_BYTES, wait_s=5.0)).error == "Impossible"


def test_numbers_are_not_given_twice(bench):
    first = Joined(bench)
    first.client.ask(m.Goodbye())
    Joined(bench)
    assert [one.shard for one in shards(bench)] == [2]


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        ({"capacity": 100}, "its arena of 100 bytes is invalid; offer whole pages of 4096"),
        ({"endpoint": "ipc:///x"}, "endpoint 'ipc:///x' is not tcp; offer tcp://host:port"),
        (
            {"endpoint": "tcp://127.0.0.1:0"},
            "no other process can connect to endpoint 'tcp://127.0.0.1:0'; offer a host and port that others reach",
        ),
        (
            {"certificate": "short"},
            "the fingerprint of its certificate is no SHA-256; offer 64 hexadecimal digits, or none",
        ),
        (
            {"capacity": (1 << 62) - PAGE_BYTES},
            (
                f"an arena of {(1 << 62) - PAGE_BYTES:,} bytes is more than a process can map, {1 << 47:,}; offer a "
                "smaller one"
            ),
        ),
    ],
)
def test_an_offer_that_is_none_is_refused_and_nothing_is_open(bench, offer, said):
    refused = Joined(bench, **offer).client.welcome
    assert (refused.error, refused.text) == ("UsageError", f"shard refused: {said}")
    assert len(bench.coordinator.sessions) == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/nowhere", "cannot be opened"),
        ("a\0b", "cannot be opened"),
        ("/dev/null", "is not a regular file of user"),
        ("/", "is not a regular file of user"),
    ],
)
def test_an_arena_of_this_host_is_looked_at(bench, path, said):
    refused = Joined(bench, path=path).client.welcome
    assert refused.error == "UsageError"
    assert said in refused.text


def test_an_arena_of_this_host_is_as_large_as_is_offered_and_fits_where_it_lies(bench):
    path = memory(bench, CAPACITY)
    assert "bytes are" not in str(Joined(bench, path=path).client.welcome)
    more = Joined(bench, path=path, capacity=2 * CAPACITY).client.welcome
    assert f"has {CAPACITY:,} bytes, but the offer says {2 * CAPACITY:,}; offer its real size" in more.text
    sparse = Joined(bench, capacity=1 << 46).client.welcome
    assert "is larger than what holds it" in sparse.text


def test_what_a_shard_says_of_its_size_gives_rows_no_room_in_the_memory_of_others(bench):
    """An offer of 2**62 bytes counted for every put, and rows filled what is kept for results."""
    client = local(bench)
    Joined(bench, host="far", capacity=1 << 46)
    kept = MIB // RESULTS_SHARE
    rows = [client.ask(m.Grant(PAGE_BYTES, use="rows")) for _ in range((MIB - kept) // PAGE_BYTES)]
    assert {one.shard for one in rows} == {0}
    assert client.ask(m.Grant(PAGE_BYTES, use="rows")).error == "Full"
    assert client.ask(m.Grant(kept)).shard == 0, "room for results is left"


def test_a_shard_without_pages_counts_for_no_more_than_it_has(bench):
    shard, client = Joined(bench, capacity=2 * ARENA_STEP_BYTES), bench.client(host=this_host(), pid=os.getpid())
    shard.work()
    first = client.ask(m.Grant(ARENA_STEP_BYTES - PAGE_BYTES))
    assert first.shard == 1
    shard.work(fail=m.AllocatePages)
    (there,) = bench.remote.shards.remote.values()
    assert there.grantable == ARENA_STEP_BYTES
    refused = client.ask(m.Grant(ARENA_STEP_BYTES, use="rows"))
    assert refused.error == "Impossible"


def test_a_shard_that_confirms_what_it_was_not_told_is_refused(bench):
    shard = Joined(bench)
    refused = shard.client.ask(m.PollCommands(shard.epoch, (1 << 62) - 1))
    assert (refused.error, refused.text) == (
        "ProtocolError", f"shard 1 confirms order {(1 << 62) - 1}, but the last one sent to it was 0",
    )  # fmt: skip
    assert shards(bench)[0].backed_bytes == 0
    assert shard.work() == [m.AllocatePages(0, ARENA_STEP_BYTES)]


def test_nobody_opens_a_file_that_a_holder_of_a_key_names(tmp_path):
    add(tmp_path / "keys", "memory", "shard")
    ring = Keyring(tmp_path / "keys")
    bench = Bench(door=Authorizer(ring))
    key = load(tmp_path / "keys").clients[0].pair.public
    hello = m.Hello(
        b"k" * 16, os.getpid(), this_host(), shard=m.ShardOffer("/etc/x", 4096, "tcp://1.2.3.4:5", "", b"s" * 32)
    )
    bench.receive(KeyedPeer(b"one", key), codec.encode_call(m.CallFrame(0, 1, 0, hello)))
    (at,) = local(bench).ask(m.ListShards()).shards
    assert (at.path, at.endpoint) == ("", "tcp://1.2.3.4:5")
    bench.close()


def test_orders_are_for_shards_only_and_only_those_that_joined_drain(bench):
    client = local(bench)
    refused = client.ask(m.PollCommands(1, 0))
    assert (refused.error, refused.text) == (
        "UsageError",
        f"session {client.session} is no shard, and gets no orders",
    )
    refused = client.ask(m.Drain(3))
    assert refused.text.startswith("shard 3 has not joined")
    assert "the coordinator's own" in client.ask(m.Drain(0)).text


def test_stats_tell_what_a_shard_says_that_it_has_sent_and_received(bench):
    shard = Joined(bench)
    assert shards(bench)[0].bulk_sent_bytes == {"stream": 0, "one_sided": 0}
    shard.client.ask(m.PollCommands(shard.epoch, 0, sent=(7, 1 << 40), received=(8, 9)))
    assert shards(bench)[0].bulk_sent_bytes == {"stream": 7, "one_sided": 1 << 40}
    assert shards(bench)[0].bulk_received_bytes == {"stream": 8, "one_sided": 9}


def test_orders_that_were_not_confirmed_come_again(bench):
    shard = Joined(bench)
    first = shard.client.ask(m.PollCommands(shard.epoch, 0))
    assert shard.client.ask(m.PollCommands(shard.epoch, 0)) == first
    assert shard.client.ask(m.PollCommands(shard.epoch - 1, first.first)) == first, "that was of another life"


def test_standing():
    numbers = LiveExtents()
    assert numbers.issuperset([1, 5, 9])
    numbers.discard(5)
    numbers.keep_only(5, [1])
    assert [n for n in range(8) if n in numbers] == [1, 6, 7]
    numbers.discard(1)
    assert 1 not in numbers
    with pytest.raises(UsageError):
        TicketIssuer(b"k" * 32, numbers).check_read(1, 1, [b.BulkBlock(1, 1, 0, 64, 1, 0, [0], b"t" * 16)])
