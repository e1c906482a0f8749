"""The actor of a shard, without Ray, and the choice of nodes for shards."""

import pytest

import transferqueue as tq
from tests.cluster.shards import await_shards, shards
from transferqueue.cluster.on_ray.coordinator_actor import CoordinatorActorBase
from transferqueue.cluster.on_ray.messages import (
    REPLY,
    DeploymentName,
    DeployRefused,
    DeploySpec,
    Endpoints,
    ShardSpec,
    read,
    write,
)
from transferqueue.cluster.on_ray.shard_actor import ShardActorBase
from transferqueue.cluster.on_ray.shard_actors import check_shards, places
from transferqueue.errors import UsageError

NAMED = DeploymentName("tests", "lender")


def lender(ways, host="127.0.0.1"):
    return ShardActorBase(ShardSpec(NAMED, 1 << 27, "one"), ways, host)


@pytest.fixture
def ways(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
    actor = CoordinatorActorBase(write(DeploySpec(NAMED, "id", "process", "", 1 << 26, 0, "")), "127.0.0.1", "c", False)

    def of(role="shard"):
        said = read(actor.ways(role), REPLY)
        assert isinstance(said, Endpoints)
        return said

    yield of
    actor.stop()


@pytest.mark.parametrize("near", [True, False])
def test_it_lends_until_it_is_stopped_or_drained(ways, near):
    found = ways() if near else Endpoints("another host", "ipc:///nowhere", ways().token)
    actor = lender(found)
    assert actor.joined().startswith("tcp://127.0.0.1:")
    with tq.connect(ways("admin").token) as queue:
        (shard,) = await_shards(queue, 1)
        assert (shard.label, shard.capacity_bytes) == ("one", 1 << 27)
        queue.drain_shard(shard.shard)
        actor._thread.join()
        assert shards(queue) == []
    actor.stop()


def test_bytes_are_encrypted_on_their_way_from_a_host_that_is_not_loopback(ways):
    actor = lender(ways(), "0.0.0.0")  # noqa: S104
    with tq.connect(ways("admin").token, data="remote") as queue:
        await_shards(queue, 1)
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        table.put(x=[list(range(100_000))])
        assert shards(queue)[0].used_bytes
        with table.lease("train", rows=1) as batch:
            assert batch["x"].list() == [list(range(100_000))]
    actor.stop()


def test_a_key_of_another_role_is_refused(ways):
    actor = lender(Endpoints("another host", "", ways("producer").token))
    said = read(actor.joined(), REPLY)
    assert isinstance(said, DeployRefused)
    assert said.error == "PermissionDenied"
    assert said.text.startswith("a shard may not join with a key of role producer; join with a token of role shard")
    actor.stop()


def test_each_node_but_the_servers_gets_one_or_so_many_are_spread():
    nodes = [{"NodeID": name, "Alive": name != "d"} for name in "abcd"]
    assert places(nodes, "b", "per-node") == ["a", "c"]
    assert places(nodes, "b", 4) == ["a", "c", "b", "a"]
    assert places(nodes, "b", 0) == []


@pytest.mark.parametrize("shards", [-1, "every", 1.5, True, 1 << 20])
def test_what_is_no_number_of_shards_is_refused(shards):
    with pytest.raises(UsageError, match='is not a number of shards; give 0 to 4095, or "per-node"'):
        check_shards(shards, "process")


def test_shards_do_not_survive_a_reboot_and_say_so():
    with pytest.raises(UsageError, match="do not go together: their memory does not survive a reboot"):
        check_shards("per-node", "disk")
    check_shards(0, "disk")
