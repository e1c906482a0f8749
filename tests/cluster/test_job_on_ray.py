"""A training job on a Ray cluster of three nodes that share nothing but a disk: a node killed in the middle, and all of
them, then --resume.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("reasoning_gym")
ray = pytest.importorskip("ray", reason="make test-ray has Ray")

import transferqueue as tq  # noqa: E402
from tests.cluster.ray_nodes import RayNodes, check_isolation  # noqa: E402
from tests.scale import only_long  # noqa: E402
from tests.workflows.job.recorded_environment import create_table, recording  # noqa: E402
from tests.workflows.test_demo import ROWS, STEPS, make_small, small_job  # noqa: E402
from transferqueue.errors import UsageError  # noqa: E402
from transferqueue.workflows.flow.events import RESTART, Event, Figures  # noqa: E402
from transferqueue.workflows.job.devices.placement import FoundDevice  # noqa: E402
from transferqueue.workflows.job.graph import stage_jobs  # noqa: E402
from transferqueue.workflows.job.run.dry_run import dry_run  # noqa: E402
from transferqueue.workflows.job.run.folder import RunFolder  # noqa: E402
from transferqueue.workflows.job.run.on_ray import (  # noqa: E402
    ANYWHERE,
    actor_options,
    cluster_devices,
    flow_on_ray,
    reserved,
)
from transferqueue.workflows.job.run.preflight import placement_of  # noqa: E402
from transferqueue.workflows.job.run.run import JobOutcome, RunningJob, run_job  # noqa: E402
from transferqueue.workflows.job.settings.job import Job, RaySettings  # noqa: E402
from transferqueue.workflows.job.settings.read import checked  # noqa: E402
from transferqueue.workflows.job.settings.write import job_as_toml  # noqa: E402
from transferqueue.workflows.job.tiny_model.make import make, write_data  # noqa: E402

ray_ignored = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), *ray_ignored]

KILLED_AT_STEP = 2
AT_A = {"options": {name: {"resources": {"a": 0.1}} for name in ("rollout", "advantage")}}
"""The node that is killed generates, and has a shard; what it did starts again on the next node with the resource."""


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A folder that every node sees: each has a /tmp of its own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def inputs(disk: Path) -> Path:
    return make_small(disk / "inputs")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    check_isolation()
    tmp_path.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        with RayNodes() as cluster:
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            for resource in "ab":
                cluster.add(resource)
            yield cluster
            ray.shutdown()


def on_ray(inputs: Path, engine: str = "builtin", **settings: Any) -> Job:
    job = small_job(inputs, engine=engine)
    checkpoint = msgspec.structs.replace(job.checkpoint, every=1)
    return msgspec.structs.replace(job, on="ray", ray=RaySettings(**settings), checkpoint=checkpoint)


class Steps:
    """Hears the steps of a run, and does something after one of them."""

    def __init__(self, then: Any = lambda: None) -> None:
        self.rows: dict[int, int] = {}
        self._then = then

    def __call__(self, label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == "step":
            step = int(event.values["step"])
            if step == KILLED_AT_STEP and step not in self.rows:
                self._then()
            self.rows[step] = int(event.values["rows"])


def check(outcome: JobOutcome, steps: Steps) -> None:
    """As many rows were trained as were to be, each once; and all that were put are accounted for."""
    assert steps.rows == dict.fromkeys(range(1, STEPS + 1), ROWS // STEPS)
    assert (outcome.audit.live, outcome.audit.done) == (0, ROWS)
    assert outcome.audit.put == outcome.audit.done + outcome.audit.dropped_rows
    assert set(outcome.summary.staleness) <= {"0", "1"}
    assert outcome.summary.after is not None


@pytest.fixture(scope="module")
def inputs_of_vllm(disk: Path) -> Path:
    make(disk / "inputs-vllm" / "model", kind="builtin", num_hidden_layers=1, num_attention_heads=4)
    write_data(disk / "inputs-vllm" / "data", task="spell_backward", train=64, test=16)
    return disk / "inputs-vllm"


def run_and_kill_a_node(engine: str, replicas: int, nodes: RayNodes, inputs: Path, disk: Path) -> None:
    if engine != "builtin":
        pytest.importorskip(engine)

    def kill() -> None:
        nodes.kill(0)
        nodes.add("a")

    steps = Steps(kill)
    job = on_ray(inputs, engine, replicas=replicas, **AT_A)
    outcome = run_job(job, folder=RunFolder(disk / f"killed-{engine}"), observe=steps)
    check(outcome, steps)
    if replicas == 2:
        assert "lost" not in outcome.audit.dropped


@pytest.mark.parametrize(("engine", "replicas"), [("builtin", 1), ("transformers", 2)])
def test_a_node_is_killed_in_the_middle(engine: str, replicas: int, nodes: RayNodes, inputs: Path, disk: Path) -> None:
    run_and_kill_a_node(engine, replicas, nodes, inputs, disk)


def test_a_node_with_vllm_is_killed_in_the_middle(nodes: RayNodes, inputs_of_vllm: Path, disk: Path) -> None:
    """`make test-engines` has vLLM and Ray together."""
    run_and_kill_a_node("vllm", 1, nodes, inputs_of_vllm, disk)


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[RayNodes]:
    """A cluster of the head alone, whose processes this one can kill."""
    tmp_path.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        with RayNodes(num_cpus=4) as cluster:
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield cluster
            ray.shutdown()


@pytest.mark.parametrize("label", ["rollout-0", "train-0", *only_long("advantage-0")])
def test_a_process_is_killed_and_the_flow_starts_it_again(
    label: str, one_node: RayNodes, inputs: Path, disk: Path
) -> None:
    """The trainer goes on with its checkpoint, and rows that a process held go to the one that follows it."""
    restarts, first = killed_in(on_ray(inputs), label, disk)
    assert [(found, text.partition(" ended: ")[0]) for found, text in restarts] == [(label, label)]
    assert "its process or its node died" in restarts[0][1]
    assert first["label"] == label


def test_a_rank_is_killed_and_all_ranks_start_again(one_node: RayNodes, inputs: Path, disk: Path) -> None:
    job = on_ray(inputs)
    job = msgspec.structs.replace(job, trainer=msgspec.structs.replace(job.trainer, parallel="ddp", ranks=2))
    restarts, _ = killed_in(checked(job), "train-1", disk)
    assert {label.rpartition("-")[0] for label, _ in restarts} == {"train"}


def killed_in(job: Job, label: str, disk: Path) -> tuple[list[tuple[str, str]], Any]:
    """Run a job of which a process is killed after a step; return the events of restarts, and the first that the folder
    of the run has."""
    running: list[RunningJob] = []
    restarts: list[tuple[str, str]] = []

    def kill() -> None:
        with tq.connect(running[0].address) as queue:
            pids = [session.pid for session in queue.sessions().values() if session.label == label]
        os.kill(pids[0], signal.SIGKILL)

    steps = Steps(kill)

    def observe(of: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == RESTART:
            restarts.append((of, event.values["text"]))
        steps(of, event)

    folder = disk / f"{label}-{job.trainer.ranks}"
    outcome = run_job(job, folder=RunFolder(folder), observe=observe, started=running.append)
    check(outcome, steps)
    return restarts, json.loads((folder / "restarts.jsonl").read_text().splitlines()[0])


def summary_after_the_death_of_all_nodes(disk: Path, runtime: Path, *words: str) -> Any:
    """Run a command on three nodes with `run` as its folder, kill every process once the queue has a snapshot, start
    three other nodes, and go on; return the summary.
    """
    check_isolation()
    runtime.chmod(0o700)
    environment = {"TRANSFERQUEUE_RUNTIME": str(runtime), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "OMP_NUM_THREADS": "1"}

    def command(cluster: RayNodes, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "transferqueue.cli", *words, "--out", "run"],
            cwd=disk,
            env=os.environ | environment | {"RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with RayNodes() as first:
            first.add()
            first.add()
            run = command(first, *words)
            snapshots = disk / "run" / "snapshots" / "queue"
            while run.poll() is None and not any(snapshots.glob("*/MANIFEST.json")):
                time.sleep(0.05)
            assert run.poll() is None, run.communicate()
            for number in range(2):
                first.kill(number)
            run.send_signal(signal.SIGKILL)
            run.communicate()
        with RayNodes() as second:
            second.add()
            second.add()
            stdout, stderr = command(second, "train", "--resume", "--json").communicate(timeout=600)
    shutil.rmtree(disk / "run")
    assert stdout, stderr
    summary = json.loads(stdout)
    assert summary["starts"] == 2
    assert summary["rows_put"] == summary["rows_done"] + sum(summary["rows_dropped"].values())
    return summary


def test_after_the_death_of_all_nodes_the_command_goes_on(inputs: Path, disk: Path, tmp_path: Path) -> None:
    (disk / "job.toml").write_text(job_as_toml(on_ray(inputs)))
    summary = summary_after_the_death_of_all_nodes(disk, tmp_path, "train", "job.toml")
    assert summary["steps"] == STEPS
    assert summary["after"] is not None


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_resumed_run_learns_what_five_whole_ones_learn(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = ("demo", "--steps", "60")
    whole = []
    for seed in range(5):
        folder = disk / f"seed-{seed}"
        words = [sys.executable, "-m", "transferqueue.cli", *demo, "--seed", str(seed), "--out", str(folder)]
        subprocess.run(words, check=True, capture_output=True, timeout=600)
        summary = json.loads((folder / "summary.json").read_text())
        whole.append(summary["after"] - summary["before"])
    summary = summary_after_the_death_of_all_nodes(disk, tmp_path, *demo, "--on", "ray")
    gain = summary["after"] - summary["before"]
    with capsys.disabled():
        print(f"held-out gain of five seeds: {whole}; after a kill of all nodes and --resume: {gain}")
    assert summary["steps"] == 60
    # The range of five draws misses a sixth one of the same kind once in three times: four deviations do once in fifty.
    assert gain > 0
    assert abs(gain - mean(whole)) <= 4 * stdev(whole)


def test_what_the_job_says_of_a_process_goes_to_ray(tmp_path: Path) -> None:
    job = checked(on_ray(tmp_path, options={"train": {"num_gpus": 1}, "rollout-0": {"num_cpus": 2}}))
    options = actor_options(job, stage_jobs(job), {})
    assert options["train-0"] == {**ANYWHERE, "num_gpus": 1}
    assert options["rollout-0"] == {**ANYWHERE, "num_cpus": 2}
    assert options["reward-0"] == ANYWHERE
    job = msgspec.structs.replace(job, ray=RaySettings(options={"trian": {}}))
    with pytest.raises(UsageError, match=r"ray.options.trian: the job has no such task or process; it has advantage"):
        actor_options(job, stage_jobs(job), {})


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FoundDevice]]:
    """A cluster of two nodes with two GPUs each, which no machine has; a program on each says their bytes."""
    from ray.cluster_utils import Cluster

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0, GPU-a, 81559, 81000\necho 1, GPU-b, 40960, 40000\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2, num_gpus=2)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster_devices()
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_processes_have_their_gpus_on_two_hosts(two_hosts: list[FoundDevice], inputs: Path) -> None:
    """Two ranks, two engines and the evaluation beside one of them, as their actors see them."""
    assert [device.name for device in two_hosts] == ["0", "1", "0", "1"]
    assert len({device.host for device in two_hosts}) == 2
    job = small_job(inputs)
    engine = msgspec.structs.replace(job.engine[0], count=2)
    trainer = msgspec.structs.replace(job.trainer, parallel="fsdp2", ranks=2)
    job = checked(msgspec.structs.replace(job, on="ray", engine=(engine,), trainer=trainer))
    placement = placement_of(job)
    assert {device.total for device in two_hosts} == {40960 << 20}, "of the smallest: Ray chooses the node"
    shown = dry_run(msgspec.structs.replace(job, ray=RaySettings(shard_gib=0.5))).devices
    assert sum(line.startswith("GPU ") and "(40.00 GiB of 40.00 GiB free): " in line for line in shown) == 4
    assert "train-1" in shown[3]
    nodes = [line.rpartition("(")[2] for line in shown if line.startswith("node ")]
    assert sorted(line.partition("): ")[2] for line in nodes) == [
        "a shard, up to 0.50 GiB",
        "the server, up to 64.00 MiB",
    ]
    assert all("2 cores, " in line and ", 2 GPUs)" in line for line in nodes)
    found: dict[str, tuple[str, str]] = {}

    def hear(label: str, event: Event) -> None:
        if isinstance(event, Figures):
            found[label] = (event.values["node"], event.values["gpus"])

    with tq.connect(label="supervisor") as queue, reserved(placement, job) as gpus:
        create_table(queue)
        processes = recording(stage_jobs(job))
        with flow_on_ray(job, processes, queue.address, environment={}, observe=hear, gpus=gpus) as flow:
            flow.run()
    assert found["rollout-0"] == found["evaluate-0"]
    own = [found[label] for label in ("rollout-0", "rollout-1", "train-0", "train-1")]
    assert sorted(own) == sorted((device.host, device.name) for device in two_hosts)
    assert {found[label][1] for label in ("prompts-0", "advantage-0")} == {""}
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}


@pytest.mark.long
def test_the_demo_runs_on_the_cluster(nodes: RayNodes, disk: Path) -> None:
    """Joined by RAY_ADDRESS, from a driver of its own; nothing of it is left afterwards."""
    words = ("demo", "--on", "ray", "--steps", "2", "--out", str(disk / "demo"))
    done = subprocess.run(
        [sys.executable, "-m", "transferqueue.cli", *words],
        env=os.environ | {"RAY_ADDRESS": nodes.address},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "6 processes: prompts-0, " in done.stdout
    summary = json.loads((disk / "demo" / "summary.json").read_text())
    assert (summary["steps"], summary["rows_done"]) == (2, 1024)
    assert [one for one in ray.util.list_named_actors(all_namespaces=True) if one["name"].startswith("demo-")] == []
