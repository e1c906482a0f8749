"""Bytes that are gone: rows that read them end, counted; nothing else changes."""

from __future__ import annotations

import pytest

from tests.ledger.driver import World
from transferqueue.errors import LeaseExpired, NotFound
from transferqueue.policies import Complete, DropGroup, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m


def blocks_of(world: World) -> list[int]:
    return list(world.ledger.state.core.blocks.blocks)


def lose(world: World, *blocks: int) -> dict[str, list[int]]:
    lost = world.ledger.lose(blocks, world.now)
    world.collect()
    return lost


def test_rows_that_read_a_lost_block_end_and_no_others() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", ["a", "b"])])
    client.put(2, ["a", "b"])
    client.put(3, ["a"])
    client.update([2, 3], ["b"])
    held = client.lease("train", 2)
    (_, _, late) = blocks_of(world)
    assert lose(world, late, 999) == {"t": [2, 3]}
    assert world.table().rows_dropped == {"lost": 2}
    assert world.audit()["balanced"]
    client.ack(held)
    client.update([4], ["b"])
    assert client.lease("train", 5, at_least=1).rows == [4]
    with pytest.raises(NotFound, match="row 2, 3"):
        client.update([2, 3], ["b"])


def test_a_lease_loses_the_rows_that_it_holds_and_the_rest_is_acked() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", ["a"])])
    client.put(1, ["a"])
    client.put(1, ["a"])
    held = client.lease("train", 2)
    lose(world, blocks_of(world)[0])
    client.ack(held)
    table = world.table()
    assert (table.rows_done, table.rows_dropped, table.rows_live) == (1, {"lost": 1}, 0)
    client.unpin(held.blocks())
    assert not blocks_of(world)
    assert not world.taken


def test_the_group_of_a_lost_row_goes_the_way_it_declared() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("train", ["a"], groups=Complete(incomplete=DropGroup(), deadline_s=5.0))])
    client.put(1, ["a"], group_id=1, group_size=2)
    client.put(1, ["a"], group_id=1, group_size=2)
    lose(world, blocks_of(world)[0])
    assert world.table().rows_live == 0
    assert world.table().rows_dropped["lost"] == 1


def test_results_that_wait_for_a_last_ack_are_given_up_with_their_lease() -> None:
    world = World()
    one, two = world.client(), world.client()
    one.create(tasks=[Task("train", ["a"], ["b"])])
    one.put(2, ["a"])
    first = one.lease("train", 2, replica=0, replicas=2)
    second = two.lease("train", 2, replica=1, replicas=2)
    one.ack(first, columns=one.columns(2, ["b"]))
    staged = blocks_of(world)[-1]
    assert lose(world, staged) == {}
    assert staged not in blocks_of(world)
    with pytest.raises(LeaseExpired, match="the bytes of its results were lost"):
        two.ack(second)
    again = one.lease("train", 2)
    assert again.rows == [0, 1]
    one.ack(again, columns=one.columns(2, ["b"]))
    assert world.table().rows_done == 2


def test_a_version_of_weights_is_kept_no_more() -> None:
    world = World()
    client = world.client()
    weight = Field("w", "float32", (4,))
    for version in (1, 2):
        client.apply(m.Publish("policy", version, [weight], [client.block([weight], 1)]))
    lose(world, blocks_of(world)[1])
    with pytest.raises(NotFound, match="version 2 of channel"):
        client.apply(m.Pull("policy", version=2))
    assert client.apply(m.Pull("policy", version=1)).version == 1
