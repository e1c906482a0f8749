"""A lost shard: nobody reuses its memory, its rows are dropped or regenerated, and grants and pins in it are void."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import DeadlineExceeded, ShardLost, UsageError
from transferqueue.ledger import Blocked, FreeExtent, Ledger
from transferqueue.policies import Complete, Manual, Pacing, Refill, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_fields


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def near(world: World) -> Driver:
    """A client that writes into shard 1."""
    client = world.client("near")
    client.shard = 1
    return client


@pytest.fixture
def far(world: World) -> Driver:
    """A client that writes into shard 2."""
    client = world.client("far")
    client.shard = 2
    return client


def test_rows_of_the_shard_end_and_the_others_go_on(world: World, near: Driver, far: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])])
    near.put(2, ["text"])
    far.put(3, ["text"])
    assert world.lose_shard(1) == {"t": [0, 1]}
    audit = world.audit().tables["t"]
    assert (audit.rows_live, audit.rows_lost, audit.balanced) == (3, 2, True)
    assert far.lease("train", 3).rows == [2, 3, 4]
    assert world.stats().bytes == sum(one.at.nbytes for one in world.ledger.state.core.blocks.blocks.values())


def test_people_are_told(world: World, near: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])])
    near.put(2, ["text"])
    world.lose_shard(1)
    told = [one.text for one in near.observe("doctor").tables["t"]]
    assert "2 rows ended: lost with shard 1" in told
    with pytest.raises(DeadlineExceeded, match="nothing to do: no unfinished rows; 2 rows ended: lost with shard 1"):
        near.lease("train", 1)
    life = near.observe("row", "t", 0)
    assert (life.state, life.reason) == ("dropped", "lost")
    assert [(one.what, one.detail) for one in life.events][-2:] == [
        ("lost with shard 1", "text"), ("dropped", "lost")
    ]  # fmt: skip


def test_no_extent_of_it_is_freed_and_none_is_left(world: World, near: Driver, far: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])])
    near.put(2, ["text"])
    far.put(1, ["text"])
    grant = near.grant(100)
    held = near.lease("train", 2)
    world.lose_shard(1)
    near.ack(held)
    near.unpin(held.blocks())
    near.apply(m.ReturnGrant(grant.extent))
    assert {one.shard for one in world.ledger.state.core.blocks.extents.values()} == {2}
    assert not world.freed


def test_what_is_returned_later_is_no_error_and_a_session_may_end(world: World, near: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])])
    near.put(1, ["text"])
    held = near.lease("train", 1)
    near.grant(100)
    world.lose_shard(1)
    near.close()
    assert not world.ledger.state.core.blocks.extents
    assert not world.freed
    assert world.audit().tables["t"].dropped == {"lost": 1}
    assert held.rows == [0]


def test_a_commit_into_it_is_refused_and_the_same_rows_go_elsewhere(world: World, near: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])])
    columns = near.columns(1, ["text"])
    world.lose_shard(1)
    with pytest.raises(
        ShardLost, match=r"extent 1 was in shard 1, which is gone .*; return it and write .* a new grant"
    ):
        near.apply(m.PutRequest("t", 1, columns))
    near.apply(m.ReturnGrant(columns.blocks[0].extent))
    near.shard = 2
    assert near.put(1, ["text"]) == [0]


def test_what_is_held_of_it_does_not_matter_to_one_of_the_same_number(world: World, near: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])])
    near.put(1, ["text"])
    held = near.lease("train", 1)
    world.lose_shard(1)
    near.put(1, ["text"])
    assert near.ack(held).rows == 1
    near.unpin(held.blocks())
    assert near.lease("train", 1).rows == [1]
    assert not world.freed


def test_room_is_free_for_what_producers_make_anew(world: World, near: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])], pacing=Pacing("train", 2, 1))
    near.put(4, ["text"], reservation=near.reserve(4).reservation)
    world.woken.clear()
    world.lose_shard(1)
    assert ("room", "t") in world.woken
    assert near.reserve(4).rows == 4


def test_members_of_a_group_are_asked_for_again(world: World, near: Driver, far: Driver) -> None:
    near.create(tasks=[Task("train", ["text"], groups=Complete(incomplete=Refill()))], pacing=Pacing("train", 4, 0))
    near.put(1, ["text"], group_id=7, group_size=4)
    far.put(2, ["text"], group_id=7, group_size=4)
    world.lose_shard(1)
    given = far.reserve(1)
    assert given.refills == [(7, 1)]


def test_a_finished_row_lacks_what_was_there(world: World, near: Driver, far: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])], retention=Manual())
    near.put(1, ["text"])
    far.update([0], ["more"])
    near.ack(near.lease("train", 1))
    assert world.lose_shard(1) == {}
    assert [one.name for one in decode_fields(far.read([0]).definitions)] == ["more"]
    assert near.delete([0]).rows == 1


def test_an_image_goes_on_alike(world: World, near: Driver, far: Driver) -> None:
    near.create(tasks=[Task("train", ["text"])])
    near.put(1, ["text"])
    held = near.lease("train", 1)
    columns = near.columns(1, ["text"])
    world.lose_shard(1)
    world.ledger = Ledger.from_image(world.ledger.image())
    with pytest.raises(ShardLost):
        near.apply(m.PutRequest("t", 1, columns))
    near.release(held)
    near.close()
    assert not world.ledger.state.core.blocks.extents
    assert world.audit().tables["t"].dropped == {"lost": 1}
    assert not [one for one in world.ledger.take_effects() if isinstance(one, FreeExtent)]


# ---------------------------------------------------------------- weights

FIELDS = [Field("w", "float32", (4,))]


def publish(client: Driver, version: int, **terms: Any) -> Any:
    return client.apply(m.Publish("policy", version, FIELDS, [client.block(FIELDS, 1)], **terms))


def pull(client: Driver, **terms: Any) -> Any:
    return client.apply(m.Pull("policy", **terms))


def test_the_newest_whole_version_is_pulled(world: World, near: Driver, far: Driver) -> None:
    publish(far, 1)
    publish(near, 2)
    world.lose_shard(1)
    assert pull(far).version == 1
    with pytest.raises(
        ShardLost,
        match=r'version 2 of channel "policy" is gone \(lost with shard 1\), and the complete versions are 1; pull',
    ):
        pull(far, version=2)
    assert isinstance(pull(far, above=1, wait_s=5.0), Blocked)
    with pytest.raises(DeadlineExceeded, match=r"version 2 .* is gone \(lost with shard 1\)"):
        pull(far, above=1)
    publish(far, 3)
    assert pull(far, above=1).version == 3
    stats = far.observe("stats").channels["policy"]
    assert (stats.kept, stats.lost, stats.newest) == ([1, 3], {"2": "lost with shard 1"}, 3)


def test_a_version_goes_with_any_of_its_blocks_and_frees_the_others(world: World, near: Driver, far: Driver) -> None:
    publish(far, 1)
    (kept,) = world.ledger.state.channels["policy"].versions[1].blocks
    more = [Field("v", "float32", (4,))]
    near.apply(m.Publish("policy", 2, more, [near.block(more, 1)], 1, base=1, kept=[kept]))
    world.lose_shard(1)
    with pytest.raises(DeadlineExceeded, match="no version is complete"):
        pull(far)
    assert not world.taken
    assert not world.ledger.state.core.blocks.blocks


def test_the_publisher_is_told_and_publishes_all_again(world: World, near: Driver) -> None:
    publish(near, 1)
    (kept,) = world.ledger.state.channels["policy"].versions[1].blocks
    world.lose_shard(1)
    basis = near.apply(m.GetLatestVersion("policy"))
    assert (basis.version, basis.blocks, basis.lost) == (1, [], "lost with shard 1")
    with pytest.raises(
        ShardLost, match=r"version 1 .* is gone .*: version 2 cannot keep blocks of it; publish again, all"
    ):
        near.apply(m.Publish("policy", 2, base=1, kept=[kept], fields=[], blocks=[]))
    near.shard = 2
    publish(near, 2)
    assert near.apply(m.GetLatestVersion("policy")).lost == ""
    with pytest.raises(UsageError, match="never goes back to 1"):
        publish(near, 1)


def test_what_was_lost_is_remembered_for_as_long_as_it_would_have_been_kept(world: World, near: Driver) -> None:
    for version in range(5):
        publish(near, version)
        world.lose_shard(1)
    assert list(world.ledger.state.channels["policy"].lost) == [3, 4]
