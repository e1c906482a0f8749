"""A node under every request with every value at its extremes: each is answered, with a typed error or in order, and
the books balance. Nothing is `InternalError`, and nothing leaves `receive`."""

import os
import struct
import threading
import time
import typing

import msgspec
import numpy as np
import pytest

from tests.server.extremes import REQUESTS, plain, variants
from tests.server.nodes import Bench, local, numbers
from transferqueue.limits import ITEMS_MAX, PAGE_BYTES
from transferqueue.policies import Compare, Complete, Pacing, TagIs, Task
from transferqueue.schema import Field, layout
from transferqueue.server.durability.snapshots import SnapshotJobs
from transferqueue.transport import FileLock, this_host
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer
from transferqueue.wire.versions import PROTOCOL

BIG = Field("big", "uint8", (None,))
FIELDS = [Field("x", "int64"), BIG]
SIZE = layout([BIG], 2, [8])[1]
ids = np.arange(2, dtype="<i8").tobytes
READ = m.RowsRead(numbers(2).inline, [], [{"tag": 1}] * 2)


class World:
    """A node with a table, a channel, a shard, work under way, and a client whose requests in order all succeed."""

    def __init__(self, root):
        self.bench = bench = Bench()
        self.lock = FileLock(root / f"lock-{id(self)}")
        self.lock.take()
        self.stirred = threading.Semaphore(0)
        self.snapshots = SnapshotJobs(
            root,
            bench.coordinator.ledger,
            bench.coordinator.lending,
            bench.remote.fetches,
            wake=bench.coordinator.waiting.wake,
            stir=self.stirred.release,
        )
        bench.coordinator.attach(self.snapshots)
        self.client = client = bench.client(**local())
        tasks = [Task("train", ["x"], gives=["big"]), Task("whole", ["x"], groups=Complete())]
        client.ask(m.CreateTable("t", FIELDS, tasks, pacing=Pacing("train", 2, depth=50)))
        facts = m.RowFacts(group_id=ids(), group_size=struct.pack("<2i", 1, 1), keys=["a", "b"], tags=[{"tag": 1}] * 2)
        columns = m.Columns(FIELDS[:1], inline=numbers(2).inline, facts=facts)
        for _ in range(3):
            client.ask(m.PutRequest("t", 2, columns))
            columns = m.Columns(FIELDS[:1], inline=numbers(2).inline, facts=m.RowFacts(tags=[{"tag": 1}] * 2))
        self.lease = client.ask(m.LeaseRequest("t", "train", rows=2))
        self.reserved = client.ask(m.Reserve("t", 4))
        self.granted = client.ask(m.Grant(PAGE_BYTES))
        weight = Field("w", "float32", (4,))
        placed = m.WrittenBlock(self.granted.extent, self.granted.offset, 64, 1, ["w"], [0])
        client.ask(m.Publish("c", 0, [weight], [placed]))
        pulled = client.ask(m.Pull("c"))
        self.block = pulled.blocks[0].block

    def close(self):
        self.snapshots.stop()
        self.bench.close()
        self.lock.release()

    def outcome(self, work):
        """How a snapshot or restore ended."""
        while True:
            self.bench.coordinator.tick(self.bench.now)
            reply = self.client.ask(m.WatchJob(work))
            if isinstance(reply, m.Failed) or reply.ended:
                return reply
            assert self.stirred.acquire(timeout=60)

    def columns(self):
        granted = self.granted
        placed = m.WrittenBlock(
            granted.extent, granted.offset + 64, SIZE, 2, ["big"], [8], slots=struct.pack("<2i", 0, 1)
        )
        facts = m.RowFacts(tokens=ids(), priority=struct.pack("<2d", 0, 1), policy_version=ids(), keys=["c", "d"])
        return m.Columns(FIELDS, [placed], numbers(2).inline, facts)

    def offer(self):
        return m.ShardOffer(self.bench.arena.path, self.bench.arena.capacity,
                       "tcp://127.0.0.1:9", "", b"s" * 32)  # fmt: skip

    def in_order(self, kind):
        """Requests of this type, each of which would be carried out."""
        lease, token, columns = self.lease.lease, self.lease.token, self.columns()
        results = m.Columns(FIELDS[1:], columns.blocks)
        return {
            m.Hello: [m.Hello(b"h" * 16, os.getpid(), this_host()), m.Hello(b"i" * 16, 1, "far", shard=self.offer()),
                      m.Hello(b"j" * 16, os.getpid(), this_host(), lock=str(self.lock.path))],
            m.Unpin: [m.Unpin(struct.pack("<q", self.block), struct.pack("<q", 1))],
            m.CreateTable: [m.CreateTable("u", FIELDS, [Task("train", ["x"])], pacing=Pacing("train", 2))],
            m.AddTask: [m.AddTask("t", Task("more", ["x"], gives=["big"], groups=Complete()))],
            m.AddFields: [m.AddFields("t", [Field("y", "int64", (2,))])],
            m.AdvanceClock: [m.AdvanceClock("t", 1)],
            m.PutRequest: [m.PutRequest("t", 2, columns), m.PutRequest("t", 2, columns, self.reserved.reservation)],
            m.Update: [m.Update("t", ids(), columns, overwrite=True), m.Update("t", ids(), columns, True, READ)],
            m.LeaseRequest: [m.LeaseRequest("t", "train", 2, fields=["x"], where=[Compare("x", "<", 9)]),
            m.LeaseRequest("t", "whole", groups=1),
                      m.LeaseRequest("t", "train", tokens=1, world=1),
                      m.LeaseRequest("t", "train", 2, where=[TagIs("tag", 1)]),
                      m.LeaseRequest("t", "train", rows=2, rank=0, world=2, replica=0, replicas=2)],
            m.Ack: [m.Ack("t", lease, token, ids(), results), m.Ack("t", lease, token, drop="bad")],
            m.AckLeases: [m.AckLeases("t", struct.pack("<q", lease), struct.pack("<q", token), 3)],
            m.CommitCheckpoint: [m.CommitCheckpoint("t", 0, "train")],
            m.Rollback: [m.Rollback("t", 0, "train", 0)],
            m.ReleaseRequest: [m.ReleaseRequest("t", lease, token, ids(), columns=results)],
            m.Renew: [m.Renew("t", lease, token, 5.0)],
            m.Reserve: [m.Reserve("t", 2)],
            m.Unreserve: [m.Unreserve("t", self.reserved.reservation, 1)],
            m.Drop: [m.Drop("t", ids(), "bad")],
            m.Delete: [m.Delete("t", np.arange(4, 6, dtype="<i8").tobytes())],
            m.Find: [m.Find("t", ["a"])],
            m.ReadRequest: [m.ReadRequest("t", ids(), ["x"]),
            m.ReadRequest("t", None, ["x"], [Compare("x", "<", 9)], 2)],
            m.Publish: [m.Publish("c", 1, [Field("v", "float32", (4,))],
                                  [m.WrittenBlock(self.granted.extent, self.granted.offset + 64, 64, 1, ["v"], [0])],
                                  base=0, kept=[self.block])],
            m.BeginVersion: [m.BeginVersion("c", 1, 2, 60.0)],
            m.GiveUpVersion: [m.GiveUpVersion("c", 1)],
            m.GetLatestVersion: [m.GetLatestVersion("c")],
            m.DropDeltas: [m.DropDeltas("c")],
            m.Pull: [m.Pull("c"), m.Pull("c", version=0)],
            m.ReportApplied: [m.ReportApplied("c", 0)],
            m.AcquireUpdateSlot: [m.AcquireUpdateSlot("c")],
            m.ReleaseUpdateSlot: [m.ReleaseUpdateSlot("c")],
            m.ReturnGrant: [m.ReturnGrant(self.granted.extent)],
            m.Observe: [m.Observe(what, "t", 0) for what in ("stats", "audit", "row", "doctor", "sessions")],
            m.ListEvents: [m.ListEvents("t"), m.ListEvents("t", 0, 1)],
            m.SnapshotRequest: [m.SnapshotRequest("s")],
        }.get(kind, [])  # fmt: skip


def sessions(bench):
    return {one.number for one in bench.coordinator.sessions}


def judge(world):
    """Nothing was a defect, whatever waits ends, and the audit balances."""
    bench = world.bench
    bench.pass_time(3)
    witness = bench.client(**local())
    assert bench.coordinator.counters.internal_errors == 0
    audit = codec.decode_observed(witness.ask(m.Observe("audit")), AuditAnswer)
    assert audit.balanced, audit
    world.close()


MANY = ITEMS_MAX
"""Items of a list, the most that a message may have of any kind."""


@pytest.mark.slow
def test_many_fields_columns_and_names_are_refused_before_any_work_is_done_for_them(tmp_path):
    """A request of 65,536 fields took 80 s, with everybody waiting: each field made a copy of all those before it."""
    world = World(tmp_path)
    fields = [Field(f"f{number}", "int64") for number in range(MANY)]
    names = [field.name for field in fields]
    granted, columns = world.granted, world.columns()
    twice = m.WrittenBlock(
        granted.extent, granted.offset + 64, SIZE, 2, [*names[:999], *["big"] * 60_000], [0] * 60_999
    )
    inline = [m.Inline(name, bytes(16)) for name in names]
    began = time.thread_time()
    for request in (
        m.AddFields("t", fields), m.CreateTable("u", fields), m.PutRequest("t", 2, m.Columns(fields)),
        m.LeaseRequest("t", "train", 1, fields=names),
        m.PutRequest("t", 2, m.Columns(fields[:2000])), m.AddFields("t", fields[:2000]),
        m.PutRequest("t", 2, m.Columns([], [twice])),
        m.PutRequest("t", 2, m.Columns([], [], inline)), m.PutRequest("t", 2, m.Columns([], columns.blocks * MANY)),
        m.ReadRequest("t", ids(), names),
        m.Update("t", ids(), m.Columns([], columns.blocks * MANY)), m.Publish("c", 1, [], columns.blocks * MANY),
        m.Update("t", ids(), world.columns(), True, m.RowsRead(inline)),
        m.Update("t", ids(), world.columns(), True, m.RowsRead([], MANY * [m.BlocksRead([], bytes(8))])),
        m.Publish("c", 1, [], [], base=0, kept=[world.block] * MANY), m.AddTask("t", Task("many", names)),
    ):  # fmt: skip
        refused = world.client.ask(request)
        assert refused.error in ("UsageError", "Impossible", "ProtocolError", "SchemaError"), refused
    assert time.thread_time() - began < 20
    judge(world)


FRESH_AFTER = 40
"""Requests that changed something, after which a test goes on with a new node: most of what is in order is then so
again."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_request_at_its_extremes_is_answered(kind, tmp_path):
    world, changed, call = World(tmp_path), 0, 1000
    order = world.in_order(kind)
    for number in range(len(order) or 1):
        for tree in variants(kind, plain(order[number]) if order else None):
            if changed >= FRESH_AFTER or world.client.session not in sessions(world.bench):
                judge(world)
                world, changed = World(tmp_path), 0
            call += 1
            client = world.client
            if kind is m.Hello and len(tree) > 1 and isinstance(tree[1], bytes) and len(tree[1]) == 16:
                tree[1] = struct.pack("<qq", call, -1)  # a client that is not known yet
            try:
                frame = msgspec.msgpack.encode([PROTOCOL, client.session, call, 0, tree])
            except OverflowError:
                continue
            world.bench.receive(client.peer, frame)
            for reply in [reply for _, reply in world.bench.answered.pop(client.peer, ())]:
                assert getattr(reply, "error", "") != "InternalError", (tree, reply)
                changed += not isinstance(reply, m.Failed)
                if isinstance(reply, m.JobProgress):
                    outcome = world.outcome(reply.work)
                    assert getattr(outcome, "error", "") != "InternalError", (tree, outcome)
    judge(world)


def test_there_is_a_request_in_order_of_each_type_that_has_parts(tmp_path):
    world = World(tmp_path)
    for kind in REQUESTS:
        for request in world.in_order(kind):
            fresh = World(tmp_path)
            reply = fresh.client.ask(request) if kind is not m.Unpin else fresh.client.take(fresh.client.post(request))
            assert not isinstance(reply, m.Failed), (request, reply)
            fresh.close()
    world.close()
    assert set(typing.get_args(m.Request)) == set(REQUESTS)
