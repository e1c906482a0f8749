"""Names of deployments, what their actors say, and which node they get. No Ray is needed here."""

import os
import subprocess
import sys

import pytest

import transferqueue as tq
from transferqueue.cluster.on_ray.directories import DirectoryOwner, claim_directory, remove_stale
from transferqueue.cluster.on_ray.messages import (
    DEPLOY_SPEC,
    REPLY,
    DeploymentName,
    DeployRefused,
    DeploySpec,
    Endpoints,
    checked,
    parse_named,
    read,
    write,
)
from transferqueue.cluster.on_ray.nodes import choose
from transferqueue.errors import Impossible, NotFound, ProtocolError, UsageError
from transferqueue.transport import FileLock
from transferqueue.transport.address import is_ray_address


def test_a_name_is_read_as_it_is_written():
    assert parse_named("ray") == DeploymentName()
    assert parse_named(str(DeploymentName("jobs", "grpo"))) == DeploymentName("jobs", "grpo")
    assert [is_ray_address(text) for text in ("ray", "ray://a/b", "rayon", "tcp://ray:1", None)] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("address", ["ray://", "ray://a", "ray://a/", "ray:///b", "ray://a/b/c"])
def test_what_names_no_deployment_is_refused(address):
    with pytest.raises(UsageError, match="names no deployment on Ray; write"):
        parse_named(address)


def test_each_coordinator_has_a_name_and_the_first_is_the_deployments_own_actor():
    named = DeploymentName("jobs", "grpo")
    first, second = named.of_coordinator(1), parse_named(str(named.of_coordinator(2)))
    assert [one.is_one_coordinator for one in (named, first, second)] == [False, True, True]
    assert [one.actor for one in (named, first, second)] == ["grpo", "grpo", "grpo.coordinator-2"]


def test_all_nodes_that_will_do_are_chosen_this_one_first():
    assert choose(NODES, here="bb", resources={}, labels={}) == ["bb", "aa"]
    assert choose(NODES, here="bb", node="aa", resources={}, labels={}) == ["aa"]


def test_names_are_those_of_tables_without_a_slash():
    with pytest.raises(UsageError, match="deployment name 'a/b' has a slash"):
        checked(DeploymentName("jobs", "a/b"))
    with pytest.raises(UsageError, match="namespace name 'no good' has characters"):
        parse_named("ray://no good/x")


def test_ports_are_the_same_every_time_and_others_for_others():
    ports = DeploymentName("a", "b").ports()
    assert ports == DeploymentName("a", "b").ports() != DeploymentName("a", "c").ports()
    assert len(set(ports)) == 64
    assert min(ports) >= 20_000
    assert max(ports) < 32_768


def test_what_an_actor_says_is_read_against_its_type():
    for told in (Endpoints("host", "ipc:///a", "tqjoin_secret"), DeployRefused("NotFound", "no")):
        assert read(write(told), REPLY) == told
    assert "tqjoin" not in repr(Endpoints("host", "ipc:///a", "tqjoin_secret"))
    deploy = DeploySpec(DeploymentName(), "id", "process", "", 0, 0, "")
    assert read(write(deploy), DEPLOY_SPEC) == deploy
    for wrong in (b"{}", "", "{}", write(deploy).replace("}", ',"more":1}', 1)):
        with pytest.raises(ProtocolError):
            read(wrong, REPLY)


NODES = [
    {"NodeID": "aa", "Alive": True, "Resources": {"CPU": 4.0}, "Labels": {"zone": "x"}},
    {"NodeID": "bb", "Alive": True, "Resources": {"CPU": 8.0, "ssd": 1.0}, "Labels": {"zone": "y"}},
    {"NodeID": "cc", "Alive": False, "Resources": {}},
]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"here": "bb"}, "bb"),
        ({"here": "gone"}, "aa"),
        ({"here": "aa", "resources": {"ssd": 1}}, "bb"),
        ({"here": "aa", "labels": {"zone": "y"}}, "bb"),
        ({"here": "aa", "node": "bb", "resources": {"CPU": 8}}, "bb"),
    ],
)
def test_the_node_is_the_one_named_else_here_else_one_that_will_do(wanted, found):
    assert choose(NODES, **{"resources": {}, "labels": {}} | wanted)[0] == found


def test_a_node_that_is_none_and_wishes_that_none_fulfils_are_refused():
    with pytest.raises(NotFound, match=r"node 'cc' is not a living node .* it has aa, bb"):
        choose(NODES, here="aa", node="cc", resources={}, labels={})
    with pytest.raises(Impossible, match=r"resources \{'ssd': 2\} and labels .* bb with .*'ssd': 1\.0"):
        choose(NODES, here="aa", resources={"ssd": 2}, labels={})
    with pytest.raises(Impossible, match="are not all on this node"):
        choose(NODES, here="aa", node="aa", resources={"ssd": 1}, labels={})


@pytest.fixture
def owner():
    return DirectoryOwner.here("cluster", "ray://a/b")


def test_what_nothing_can_come_back_to_is_removed(tmp_path, owner):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = DirectoryOwner.here("cluster", "ray://a/other")
    alive = DirectoryOwner(began.host, began.cluster, began.deployment, process.pid, _began(process.pid))
    claim_directory(tmp_path / "ray-1", alive)
    claim_directory(tmp_path / "other", alive)
    (tmp_path / "ray-unowned").mkdir()
    assert remove_stale(owner, tmp_path) == []
    process.communicate()
    assert remove_stale(owner, tmp_path) == [tmp_path / "ray-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "ray-unowned"]


def test_a_name_that_is_deployed_anew_has_no_earlier_one(tmp_path, owner):
    claim_directory(tmp_path / "ray-1", owner)
    held = FileLock(tmp_path / "ray-1" / "lock")
    assert held.take()
    assert remove_stale(owner, tmp_path) == []
    held.release()
    assert remove_stale(owner, tmp_path) == [tmp_path / "ray-1"]


def test_what_cannot_be_seen_from_here_stays(tmp_path, owner):
    boot, _, pids = owner.host.partition("/")
    claim_directory(tmp_path / "ray-1", DirectoryOwner(f"{boot}/another", "cluster", "ray://a/b", 1, "1"))
    assert remove_stale(owner, tmp_path) == []
    claim_directory(
        tmp_path / "ray-1", DirectoryOwner(f"before/{pids}", "cluster", "ray://a/x", os.getppid(), owner.began)
    )
    assert remove_stale(owner, tmp_path) == [tmp_path / "ray-1"]


def _began(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"durability": "most"}, "durability 'most' is unknown; choose one of memory, process, disk"),
        ({"durability": "memory", "state": "/x"}, "memory, which keeps nothing"),
        ({"state": "here"}, "state 'here' is relative"),
        ({"snapshots": "here"}, "snapshots 'here' is relative"),
        ({"port": 70_000}, "port 70000 is out of range"),
        ({"max_restarts": -2}, "max_restarts -2 is out of range"),
        ({"arena_bytes": "much"}, "size 'much' is not a size"),
        ({"name": "a/b"}, "has a slash"),
        ({"shard_bytes": "1GiB"}, "shard_bytes '1GiB' is given without shards"),
        ({"spill_dir": "/disk"}, "spill_dir '/disk' and spill_bytes None do not go together"),
        ({"spill_dir": "/disk", "spill_bytes": 1 << 30}, "given with durability process: spilled rows end with the"),
        ({"spill_dir": "disk", "spill_bytes": 1 << 30, "durability": "memory"}, "spill_dir 'disk' is relative"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_before_ray_is_asked(wrong, said):
    with pytest.raises(UsageError, match=said):
        tq.deploy_ray(**wrong)


def test_ray_has_its_own_keys_and_memory():
    with pytest.raises(UsageError, match="which has its own; give them to deploy_ray"):
        tq.connect("ray", arena_bytes="1GiB")
    with pytest.raises(UsageError, match="which has its own; give them to deploy_ray"):
        tq.connect("ray://a/b", key="tqjoin_x")
