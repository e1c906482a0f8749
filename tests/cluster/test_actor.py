"""The actor of a deployment, without Ray: it is a class like any other, and its server a real one."""

import socket
import subprocess
import sys

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.cluster.on_ray.coordinator_actor import CoordinatorActorBase
from transferqueue.cluster.on_ray.messages import (
    REPLY,
    DeploymentName,
    DeployRefused,
    DeploySpec,
    Endpoints,
    read,
    write,
)
from transferqueue.errors import PermissionDenied
from transferqueue.server.process.supervisor import EXIT_AGAIN
from transferqueue.transport import this_host

NAMED = DeploymentName("tests", "one")


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
    return directory


@pytest.fixture
def live():
    """Makes actors, and stops them in the end."""
    made = []

    def make(durability="process", state="", port=0, again=False, **spill):
        told = write(DeploySpec(NAMED, "id", durability, str(state), 1 << 26, port, "", **spill))
        made.append(CoordinatorActorBase(told, "127.0.0.1", "cluster", again))
        return made[-1]

    yield make
    for actor in made:
        actor.stop()


def ways(actor, role="admin"):
    said = read(actor.ways(role), REPLY)
    assert isinstance(said, Endpoints)
    return said


def put_one(queue):
    return queue.create_table("t", tasks=[tq.Task("train", needs=["x"])]).put(x=[1.0])


def test_both_ways_lead_to_the_same_queue(live):
    found = ways(live())
    assert found.host == this_host()
    with tq.connect(found.ipc) as near, tq.connect(found.token) as far:
        put_one(near)
        assert far.tables() == ["t"]


def test_rows_that_memory_does_not_hold_go_to_the_disk(live, tmp_path):
    found = ways(live("memory", spill_dir=str(tmp_path / "spill"), spill_bytes=1 << 28))
    with tq.connect(found.ipc) as queue:
        table = queue.create_table("t", retention=tq.Manual())
        for number in range(12):
            table.put(x=np.full((1, 1 << 20), float(number)), timeout_s=60)
        for number in range(12):
            with table.read([number]) as rows:
                assert float(rows["x"].numpy()[0, -1]) == number


@pytest.mark.parametrize("kept", [b"", b"70000", b"7\xff7"])
def test_a_port_file_that_is_damaged_is_refused(live, tmp_path, kept):
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "port").write_bytes(kept)
    said = read(live(state=state).ways("admin"), REPLY)
    assert isinstance(said, DeployRefused)
    assert said.error == "Corruption"
    assert "holds no port; put it back, or remove it" in said.text


def test_a_key_may_what_its_role_may(live):
    actor = live()
    with tq.connect(ways(actor, "observer").token) as queue, pytest.raises(PermissionDenied):
        put_one(queue)
    said = read(actor.ways("king"), REPLY)
    assert isinstance(said, DeployRefused)
    assert said.error == "NotFound"


def test_the_next_life_is_where_the_first_was_and_has_its_rows(live, tmp_path):
    first = live(state=tmp_path / "state")
    before = ways(first)
    with tq.connect(before.token) as queue:
        put_one(queue)
    first.stop()
    assert read(first.ways(), REPLY) == DeployRefused(
        "Unreachable", "deployment ray://tests/one was closed; make another with deploy_ray"
    )
    assert ways(live(state=tmp_path / "state", again=True)) == before
    with tq.connect(before.ipc) as queue, queue.table("t").lease("train", rows=1) as batch:
        assert batch["x"].list() == [1.0]


@pytest.mark.parametrize("durability", ["memory", "process", "disk"])
def test_what_nobody_named_goes_with_the_deployment(live, runtime, durability):
    actor = live(durability)
    assert len(list(runtime.glob("ray-*/owner.json"))) == 1
    actor.stop()
    assert [path.name for path in runtime.glob("ray-*")] == []


def test_a_first_life_that_cannot_be_says_why(live, tmp_path):
    live(state=tmp_path / "state")
    said = read(live(state=tmp_path / "state").ways(), REPLY)
    assert isinstance(said, DeployRefused)
    assert said.error == "AddressInUse"
    assert "is in use" in said.text


def test_a_port_that_was_asked_for_is_taken_or_told(live):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = read(live(port=port).ways(), REPLY)
    assert isinstance(said, DeployRefused)
    assert said.error == "AddressInUse"
    assert str(port) in said.text


def test_a_later_life_that_cannot_be_ends_its_process(live, tmp_path):
    live(state=tmp_path / "state")
    told = write(DeploySpec(NAMED, "id", "process", str(tmp_path / "state"), 1 << 26, 0, ""))
    program = (
        "import sys; from transferqueue.cluster.on_ray.coordinator_actor import CoordinatorActorBase; "
        "CoordinatorActorBase(sys.argv[1], '127.0.0.1', 'c', True)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, told], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == EXIT_AGAIN, ended.stderr
    assert "the actor cannot restart the server of ray://tests/one" in ended.stderr
