"""A deployment on a real Ray cluster of four nodes (processes of this machine): make test-ray runs these."""

import os
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import transferqueue as tq
from tests.cluster.shards import ShardProcess, await_shards, shards
from transferqueue.errors import AlreadyExists, Impossible, NotFound, UsageError
from transferqueue.transport import runtime_directory
from transferqueue.wire.home_coordinator import home_coordinator

ray = pytest.importorskip("ray", reason="make test-ray has Ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
GENEROUS_S = 60.0
FIRST_LEASE_S = 10.0
ROWS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        cluster.workers = [cluster.add_node(num_cpus=2, resources={f"node{number}": 1}) for number in range(3)]
        cluster.add_node(num_cpus=1, labels={"disk": "fast"})
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def deployed(cluster):
    with tq.deploy_ray() as deployment:
        yield deployment


def table_of(queue, name="rows"):
    tasks = [tq.Task("double", needs=["x"], gives=["y"]), tq.Task("train", needs=["x", "y"])]
    return queue.create_table(name, tasks=tasks)


def kill_server(queue):
    """SIGKILL to the process of the actor; returns its number."""
    pid = queue.stats().server.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_from_deploy_to_the_first_lease_is_under_ten_seconds(cluster):
    began = time.perf_counter()
    with tq.deploy_ray() as deployment, tq.connect("ray") as queue:
        assert deployment.owned
        assert queue.address == deployment.address == "ray://transferqueue/default"
        table = table_of(queue)
        table.put(x=[1.0])
        with table.lease("double", rows=1, timeout_s=GENEROUS_S) as batch:
            took = time.perf_counter() - began
            batch.ack(y=batch["x"].numpy() * 2)
    print(f"deploy_ray to first lease: {took:.2f} s")
    assert took < FIRST_LEASE_S


def test_an_actor_that_is_killed_comes_back_and_nothing_is_lost(deployed):
    with tq.connect("ray") as near, tq.connect("ray", data="remote") as far:
        table = table_of(near)
        table.put(x=[[1.0, 2.0], [3.0]])
        batch = far.table("rows").lease("double", rows=1, timeout_s=GENEROUS_S)
        before = kill_server(near)
        batch.ack(y=[1.0])  # of a lease of the life before, by another way
        with table.lease("double", rows=1, timeout_s=GENEROUS_S) as rest:
            rest.ack(y=[2.0])
        with table.lease("train", rows=2, timeout_s=GENEROUS_S) as both:
            assert [list(row) for row in both["x"].list()] == [[1.0, 2.0], [3.0]]
        assert near.stats().server.pid != before
        assert near.audit().tables["rows"].rows_done == 2


def test_guests_come_and_go_and_crash(deployed):
    """In processes of other nodes; the rows of the one that died go to the next."""

    @ray.remote(num_cpus=0, max_retries=0)
    def guest(crash):
        with tq.connect("ray") as queue:
            batch = queue.table("rows").lease("double", rows=1, timeout_s=GENEROUS_S)
            if crash:
                os.kill(os.getpid(), signal.SIGKILL)
            batch.ack(y=batch["x"].numpy() * 2)

    with tq.connect("ray") as queue:
        table = table_of(queue)
        table.put(x=[1.0])
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(guest.options(resources={"node0": 0.1}).remote(True), timeout=GENEROUS_S)
        ray.get(guest.options(resources={"node1": 0.1}).remote(False), timeout=GENEROUS_S)
        with table.lease("train", rows=1, timeout_s=GENEROUS_S) as batch:
            assert batch["y"].list() == [2.0]


def test_deployments_stand_side_by_side_and_only_their_owner_ends_them(deployed):
    with tq.deploy_ray("other", namespace="jobs", durability="memory") as other:
        with tq.connect(other.address) as queue, tq.connect("ray") as first:
            table_of(queue, "theirs")
            assert first.tables() == []
        with pytest.raises(AlreadyExists, match="deployment ray://jobs/other exists; join it"):
            tq.deploy_ray("other", namespace="jobs")
        with tq.deploy_ray("other", namespace="jobs", exist_ok=True) as guest:
            assert not guest.owned
        with tq.connect(other.address) as queue:
            assert queue.tables() == ["theirs"]
        with tq.connect(other.token("observer")) as queue:
            assert queue.tables() == ["theirs"]
    other.close()
    with pytest.raises(NotFound, match=r"deployment ray://jobs/other does not exist .* ray://transferqueue/default"):
        tq.connect(other.address)


def test_a_deployment_gets_the_node_that_was_asked_for(cluster):
    wanted = next(one["NodeID"] for one in ray.nodes() if one["Labels"].get("disk") == "fast")
    with tq.deploy_ray(labels={"disk": "fast"}, resources={"CPU": 1}), tq.connect("ray"):
        actor = ray.get_actor("default", namespace="transferqueue")
        assert ray._private.state.actors(actor._actor_id.hex())["Address"]["NodeID"] == wanted
    with pytest.raises(Impossible, match="are not all on one node of this Ray cluster"):
        tq.deploy_ray(resources={"CPU": 1000})
    with pytest.raises(NotFound):
        tq.connect("ray")


def test_what_makes_a_first_life_impossible_is_told_and_leaves_nothing(cluster, tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    state.chmod(0o755)
    with pytest.raises(UsageError, match="other users could open the queue"):
        tq.deploy_ray(state=state)
    with pytest.raises(NotFound):
        tq.connect("ray")


def test_a_state_directory_outlives_its_deployment(cluster, tmp_path):
    for life in range(2):
        with tq.deploy_ray(state=tmp_path / "state", durability="disk"), tq.connect("ray") as queue:
            if life == 0:
                table_of(queue).put(x=[1.0])
            assert queue.tables() == ["rows"]


def test_several_coordinators_are_one_queue_and_one_that_dies_comes_back(cluster):
    with tq.deploy_ray(coordinators=2, resources={"CPU": 1}) as deployment:
        names = [next(f"t{n}" for n in range(99) if home_coordinator(f"t{n}", 2) == seat) for seat in (1, 2)]
        with tq.connect("ray") as near, tq.connect(deployment.token("admin")) as far:
            seats = [f"{deployment.address}.coordinator-{number}" for number in (1, 2)]
            assert near.coordinators == seats
            for name in names:
                table_of(near, name).put(x=[1.0])
                assert far.table(name).audit().rows_live == 1
            said = near.stats().coordinators[seats[1]].server
            os.kill(said.pid, signal.SIGKILL)
            assert near.table(names[0]).put(x=[2.0]).tolist() == [1]
            assert near.table(names[1]).put(x=[2.0]).tolist() == [1]
            assert near.audit().balanced
        with tq.connect(near.address) as again, tq.connect(seats[1]) as alone:
            assert sorted(again.tables()) == names
            assert alone.tables() == names[1:]
        with tq.deploy_ray(exist_ok=True) as guest:
            assert not guest.owned
            assert guest.token().count("tqjoin_") == 2
        actors = [ray.get_actor(name, namespace="transferqueue") for name in ("default", "default.coordinator-2")]
        assert len({ray._private.state.actors(one._actor_id.hex())["Address"]["NodeID"] for one in actors}) == 2
    with pytest.raises(NotFound):
        tq.connect("ray")


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"coordinators": 0}, "coordinators 0 is out of range; give 1 to 64"),
        ({"coordinators": True}, "coordinators True is out of range"),
        ({"coordinators": 2, "port": 7777}, "port 7777 is given with 2 coordinators; leave it out"),
        ({"name": "a.coordinator-1"}, "is reserved for one coordinator of several; take another"),
    ],
)
def test_several_that_cannot_be_are_refused(cluster, wanted, why):
    with pytest.raises(UsageError, match=why):
        tq.deploy_ray(**wanted)


DRIVER = """
import sys, ray, transferqueue as tq
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
deployment = tq.deploy_ray("driven", detached=sys.argv[2] == "detached")
print("deployed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("lifetime", ["owned", "detached"])
def test_a_driver_that_dies_takes_along_what_is_not_detached(cluster, lifetime):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address, lifetime],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout.readline() == "deployed\n"
    queue = tq.connect("ray://transferqueue/driven")
    pid = queue.stats().server.pid
    death = os.pidfd_open(pid)
    driver.kill()
    driver.communicate()
    if lifetime == "detached":
        table_of(queue).put(x=[1.0])
        with tq.deploy_ray("driven", exist_ok=True) as guest:
            assert not guest.owned
        ray.kill(ray.get_actor("driven", namespace="transferqueue"))
    assert select.select([death], [], [], GENEROUS_S)[0]
    os.close(death)
    queue.close()


def test_a_job_over_four_nodes_outlives_a_node_and_the_server(cluster, deployed):
    """Each row is doubled and trained once, though a node is removed and the server killed twice meanwhile."""

    @ray.remote(num_cpus=0.5, max_retries=-1)
    def double():
        done = 0
        with tq.connect("ray", timeout_s=GENEROUS_S) as queue:
            table = queue.table("rows", timeout_s=GENEROUS_S)
            while True:
                try:
                    with table.lease("double", rows=10, timeout_s=GENEROUS_S) as batch:
                        batch.ack(y=batch["x"].numpy() * 2)
                        done += len(batch)
                except tq.EndOfTable:
                    return done

    with tq.connect("ray") as queue:
        table = table_of(queue)
        workers = [double.remote() for _ in range(4)]
        seen = []
        for step in range(8):
            first = step * ROWS // 8
            table.put(x=[float(one) for one in range(first, first + ROWS // 8)])
            if step in (2, 5):
                kill_server(queue)
            if step == 4:
                cluster.remove_node(cluster.workers[-1])
            with table.lease("train", rows=ROWS // 8, timeout_s=GENEROUS_S) as batch:
                assert (batch["y"].numpy() == batch["x"].numpy() * 2).all()
                seen += batch["x"].list()
        table.seal()
        ray.get(workers, timeout=GENEROUS_S)
        while len(seen) < ROWS:
            with table.lease("train", rows=ROWS - len(seen), timeout_s=GENEROUS_S) as batch:
                seen += batch["x"].list()
        assert sorted(seen) == [float(one) for one in range(ROWS)]
        counts = queue.audit().tables["rows"]
        assert (counts.rows_done, counts.rows_dropped, counts.balanced) == (ROWS, 0, True)


def test_nothing_is_left_of_deployments_that_were_not_closed(cluster):
    """Those of killed drivers went with the next deployment of their name."""
    with tq.deploy_ray("driven"):
        assert len(list(runtime_directory().glob("ray-*/owner.json"))) == 1
    assert list(runtime_directory().glob("ray-*/owner.json")) == []


def test_a_shard_started_by_hand_adds_the_memory_of_a_node_that_joins_later(deployed):
    with tq.connect("ray") as queue, ShardProcess(deployed.token("shard")):
        await_shards(queue, 1)
        table = queue.create_table("rows", replicas=2)
        table.put(x=[np.full(50_000, 1)])
        assert shards(queue)[0].used_bytes >= 400_000


def test_shards_on_every_node_and_a_node_is_removed(cluster):
    node = cluster.add_node(num_cpus=1)
    with (
        tq.deploy_ray(name="spread", shards="per-node", shard_bytes="256MiB") as deployment,
        tq.connect(deployment.address) as queue,
    ):
        there = await_shards(queue, len(cluster.list_all_nodes()) - 1)
        assert sorted(one.label for one in there) == [f"spread.shard-{at}" for at in range(len(there))]
        table = table_of(queue)
        for number in range(12):
            table.put(x=[np.full(50_000, number) for _ in range(8)])
        assert all(one.used_bytes for one in shards(queue))
        cluster.remove_node(node)
        left = await_shards(queue, len(there) - 1)
        assert len(left) == len(there) - 1
        audit = queue.audit().tables["rows"]
        assert audit.balanced
        assert 0 < audit.rows_lost == audit.rows_dropped < 96
        table.put(x=[np.full(50_000, 12)])
        rows = 97 - audit.rows_lost
        kill_server(queue)
        with table.lease("double", rows=rows, timeout_s=GENEROUS_S) as batch:
            assert all((row == row[0]).all() for row in batch["x"])
            batch.ack(y=[1.0] * rows)
        del batch
        assert len(await_shards(queue, len(left))) == len(left), "they go on with the next life of the server"
    with pytest.raises(NotFound):
        tq.connect("ray://transferqueue/spread")
    assert not [name for name in ray.util.list_named_actors(all_namespaces=True) if name["name"].startswith("spread")]
