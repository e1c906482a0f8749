"""A table with replicas at the coordinator: where its copies may be, which one a session is told, what a death
leaves."""

import os

import pytest

from tests.server.nodes import Bench
from tests.server.test_shards import BIG, Joined, local, put_into
from transferqueue.limits import MIB, PAGE_BYTES
from transferqueue.policies import Task
from transferqueue.transport import this_host
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer

REPLICATED = m.CreateTable("t", fields=[BIG], tasks=[Task("train", ["x"])], replicas=2)


@pytest.fixture
def bench():
    made = Bench(arena_bytes=MIB)
    yield made
    made.close()


def copied(client):
    """A put of two rows into two shards. Returns these, the first first."""
    first = client.ask(m.Grant(PAGE_BYTES))
    second = client.ask(m.Grant(PAGE_BYTES, apart=[first.shard]))
    put = put_into(first)
    (block,) = put.columns.blocks
    copies = [m.WrittenCopy(second.extent, second.offset)]
    placed = m.WrittenBlock(
        block.extent, block.offset, block.nbytes, block.rows, block.fields, block.counts, copies=copies
    )
    assert isinstance(client.ask(m.PutRequest("t", 2, m.Columns(blocks=[placed]))), m.PutRows)
    return [first.shard, second.shard]


def told(client, **lease):
    """The one block that a lease names."""
    (part,) = client.ask(m.LeaseRequest("t", "train", rows=2, **lease)).content.parts
    (block,) = part.blocks
    return block


def test_a_table_needs_as_many_shards_as_it_has_replicas(bench):
    client = local(bench)
    refused = client.ask(REPLICATED)
    assert refused.error == "Impossible"
    assert refused.text == (
        'table "t" would keep each block in replicas=2 shards, and 1 lend memory: 2 > 1; start remote shards '
        "(transferqueue shard), or make it with fewer replicas"
    )
    assert client.ask(m.ListTables()).names == []
    shard = Joined(bench)
    assert isinstance(client.ask(REPLICATED), m.TableTerms)
    bench.coordinator.process_exited(shard.client.session, bench.now)
    again = m.CreateTable("t", fields=[BIG], tasks=[Task("train", ["x"])], replicas=2, exist_ok=True)
    assert isinstance(client.ask(again), m.TableTerms), "who only opens it needs no shard"


def test_a_copy_is_never_where_the_others_are(bench):
    client = local(bench)
    refused = client.ask(m.Grant(PAGE_BYTES, apart=[0]))
    assert refused.error == "Impossible"
    assert "there are no others" in refused.text
    Joined(bench).work()
    assert client.ask(m.Grant(PAGE_BYTES, apart=[0])).shard == 1
    assert client.ask(m.Grant(PAGE_BYTES, apart=[1])).shard == 0


def test_a_session_is_told_the_copy_that_it_maps(bench):
    Joined(bench, host="there").work()
    writer = bench.client(host="there")
    assert isinstance(writer.ask(REPLICATED), m.TableTerms)
    assert sorted(copied(writer)) == [0, 1]
    here = told(local(bench))
    assert (here.shard, here.ticket, here.copies) == (0, b"", [])


def test_a_session_that_maps_none_is_told_one_with_its_ticket(bench):
    Joined(bench).work()
    client, stranger = local(bench), bench.client(host="elsewhere")
    client.ask(REPLICATED)
    copied(client)
    block = told(stranger)
    assert block.ticket
    assert block.copies == []


@pytest.mark.parametrize("far", [False, True])
def test_rows_outlive_a_shard_and_are_read_from_the_other(bench, far):
    shard = Joined(bench)
    shard.work()
    client = local(bench)
    reader = bench.client(host="elsewhere") if far else bench.client(host=this_host(), pid=os.getpid())
    client.ask(REPLICATED)
    copied(client)
    bench.coordinator.process_exited(shard.client.session, bench.now)
    block = told(reader)
    assert (block.shard, block.copies, bool(block.ticket)) == (0, [], far)
    audit = codec.decode_observed(client.ask(m.Observe("audit")), AuditAnswer).tables["t"]
    assert (audit.rows_live, audit.rows_lost) == (2, 0)
