"""Blocks with copies in several shards: committed and freed together, and read from a copy when a shard is lost."""

from __future__ import annotations

import msgspec
import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import AlreadyExists, Impossible, NotFound, UsageError
from transferqueue.ledger import Ledger
from transferqueue.limits import COPIES_MAX, Limits
from transferqueue.policies import Task
from transferqueue.wire import messages as m

TASKS = [Task("train", ["text"])]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    """It writes into shards 1 and 2."""
    client = world.client()
    client.shard, client.copies = 1, [2]
    client.create(tasks=TASKS, replicas=2)
    return client


def only(world: World) -> m.BlockLocation:
    (block,) = world.ledger.state.core.blocks.blocks.values()
    return block.at


def test_terms_say_how_many(world: World, client: Driver) -> None:
    assert client.apply(m.OpenTable("t")).replicas == 2
    assert world.stats().replicas == 2
    with pytest.raises(AlreadyExists, match="with other terms"):
        client.create(tasks=TASKS, exist_ok=True)
    with pytest.raises(Impossible, match=f'"u" would have replicas={COPIES_MAX + 1}; at most {COPIES_MAX} shards'):
        client.create("u", replicas=COPIES_MAX + 1)


@pytest.mark.parametrize("copies", [[], [1], [2, 3]])
def test_a_block_that_is_not_where_it_has_to_be_is_refused(world: World, client: Driver, copies: list[int]) -> None:
    client.copies = copies
    with pytest.raises(
        UsageError, match=r"block of text was written to shards 1.*; each block goes to 2 different ones"
    ):
        client.put(1, ["text"])
    assert not world.ledger.state.core.blocks.blocks
    assert world.table().rows_put == 0


def test_a_copy_is_checked_as_its_block_is(world: World, client: Driver) -> None:
    columns = client.columns(1, ["text"])
    (block,) = columns.blocks
    (copy,) = block.copies
    spoiled = {
        "not aligned": m.WrittenCopy(copy.extent, copy.offset + 1),
        "lies outside": m.WrittenCopy(copy.extent, copy.offset + 4096),
        "is not granted": m.WrittenCopy(999, copy.offset),
    }
    for why, bad in spoiled.items():
        wrong = msgspec.structs.replace(block, copies=[bad])
        with pytest.raises((UsageError, NotFound), match=why):
            client.apply(m.PutRequest("t", 1, msgspec.structs.replace(columns, blocks=[wrong])))
    assert client.apply(m.PutRequest("t", 1, columns)).rows == 1


def test_replies_name_each_copy_and_all_are_freed_together(world: World, client: Driver) -> None:
    client.put(1, ["text"])
    lease = client.lease("train", 1)
    (part,) = lease.reply.content.parts
    (at,) = part.blocks
    (copy,) = at.copies
    assert (at.shard, copy.shard) == (1, 2)
    assert world.shard_of[copy.extent] == 2
    client.ack(lease)
    assert not world.freed
    client.unpin([at.block])
    assert sorted(world.freed) == [at.extent, copy.extent]


@pytest.mark.parametrize("shard", [1, 2])
def test_a_row_outlives_the_loss_of_either_shard(world: World, client: Driver, shard: int) -> None:
    client.put(2, ["text"])
    assert world.lose_shard(shard) == {}
    at = only(world)
    assert (at.shard, at.copies) == (3 - shard, [])
    assert world.taken == {at.extent: world.taken[at.extent]}
    lease = client.lease("train", 2)
    client.ack(lease)
    client.unpin(lease.blocks())
    assert world.freed == [at.extent]
    assert not world.ledger.state.core.blocks.extents


def test_the_loss_of_both_ends_the_row(world: World, client: Driver) -> None:
    client.put(1, ["text"])
    world.lose_shard(2)
    assert world.lose_shard(1) == {"t": [0]}
    assert world.audit().tables["t"].rows_lost == 1
    assert not world.ledger.state.core.blocks.extents


def test_bytes_are_counted_as_often_as_the_table_keeps_them(world: World) -> None:
    client = world.client()
    client.shard, client.copies = 1, [2]
    client.create(tasks=TASKS, replicas=2, limits=Limits(bytes=256))
    client.put(1, ["text"])
    nbytes = only(world).nbytes
    assert world.stats().bytes == 2 * nbytes == 256
    with pytest.raises(Impossible, match="do not fit"):
        client.put(20, ["text"])
    world.lose_shard(1)
    assert world.stats().bytes == 2 * nbytes, "the copy that is made next has its room"


def test_results_and_updates_are_written_as_often(world: World, client: Driver) -> None:
    client.put(1, ["text"])
    client.update([0], ["more"])
    client.ack(client.lease("train", 1), columns=client.columns(1, ["result"]))
    assert world.audit().tables["t"].rows_done == 1


def test_an_image_knows_the_copies(world: World, client: Driver) -> None:
    client.put(1, ["text"])
    world.ledger = Ledger.from_image(world.ledger.image())
    assert world.lose_shard(1) == {}
    assert only(world).shard == 2
    assert client.lease("train", 1).rows == [0]
