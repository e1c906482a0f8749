"""The demo's job, made small: its modes and options, the death of a process, and its end by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("reasoning_gym")
import msgspec

from tests.scale import only_long
from tests.workflows.test_flow import ROOT, wait_gone
from transferqueue.errors import Impossible
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.job.demo import TASK, demo_job
from transferqueue.workflows.job.devices.placement import FoundDevice
from transferqueue.workflows.job.run.dry_run import dry_run
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import JobOutcome, RunningJob, run_job
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import checked
from transferqueue.workflows.job.settings.sizes import GIB
from transferqueue.workflows.job.tiny_model.make import make, write_data

STEPS, PROMPTS, GROUP = 4, 8, 8
ROWS = STEPS * PROMPTS * GROUP
OVER_SAMPLED = {"pacing": {"over_sample": 1.5}}
FILTERED = {"algorithm": {"filter_equal": True}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned nothing yet, and questions."""
    return make_small(tmp_path_factory.mktemp("inputs"))


def make_small(folder: Path) -> Path:
    """Write inputs of a small job."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    make(folder / "model", kind="builtin", **small)
    write_data(folder / "data", task=TASK, train=64, test=16)
    return folder


def small_job(inputs: Path, changes: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> Job:
    """The demo's job with few rows, evaluated on few questions. changes: of keys, by table."""
    job = demo_job(inputs, **{"steps": STEPS, **options})
    replace = msgspec.structs.replace
    for table, keys in (changes or {}).items():
        job = replace(job, **{table: replace(getattr(job, table), **keys)})
    return replace(
        job,
        trainer=replace(job.trainer, prompts_per_step=PROMPTS),
        evaluation=replace(job.evaluation, rows=16, samples=1),
        queue=replace(job.queue, memory_gib=0.0625),
    )


def run(job: Job, directory: Path, **arguments: Any) -> JobOutcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        outcome = run_job(job, folder=RunFolder(directory), **arguments)
    assert outcome.summary.steps == STEPS
    assert outcome.audit.put == outcome.audit.done + outcome.audit.dropped_rows
    assert outcome.audit.done == ROWS
    assert all(path.stat().st_size for path in outcome.files)
    return outcome


@pytest.mark.slow
def test_synchronous_rows_are_never_stale_and_kl_brings_a_reference(inputs: Path, tmp_path: Path) -> None:
    outcome = run(small_job(inputs, {"algorithm": {"kl": 0.05}}, mode="sync"), tmp_path / "run")
    assert outcome.summary.staleness == {"0": ROWS}
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    assert "reference-0" in {event["args"].get("name") for event in trace}
    assert (tmp_path / "run" / "job.toml").exists()


@pytest.mark.long
@pytest.mark.slow
def test_each_process_of_a_run_sees_its_own_gpus(inputs: Path, tmp_path: Path) -> None:
    """GPUs that no machine here has: torch finds none of them, and the job runs on the CPU."""
    job = checked(small_job(inputs, rollouts=2))
    devices = [FoundDevice(name=f"{4 + at}", total=2 * GIB, free=2 * GIB) for at in range(3)]
    seen: dict[str, str] = {}

    def look(running: RunningJob) -> None:
        for label, pid in running.pids.items():
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            seen[label] = dict(each.partition("=")[::2] for each in variables).get("CUDA_VISIBLE_DEVICES", "unset")

    lines = dry_run(job, devices=devices).devices
    assert [line.partition(" (")[0] for line in lines] == ["GPU 0", "GPU 1", "GPU 2", "threads: 1 in each process"]
    assert [name for name in ("rollout-0", "evaluate-0", "KV cache") if name not in lines[0]] == []
    assert "train-0" in lines[2]
    with pytest.raises(Impossible, match="GPU 2 cannot hold what is placed on it: train-0"):
        run_job(job, devices=[*devices[:2], FoundDevice(name="6", total=GIB, free=GIB // 4)])
    run(job, tmp_path / "run", devices=devices, started=look)
    mapped = {"rollout-0": "4", "rollout-1": "5", "train-0": "6", "evaluate-0": "4", "prompts-0": "", "advantage-0": ""}
    assert seen == {**mapped, "reward-0": os.environ.get("CUDA_VISIBLE_DEVICES", "unset")}


@pytest.mark.long
@pytest.mark.slow
def test_asynchronous_rows_stay_within_their_bound(inputs: Path, tmp_path: Path) -> None:
    outcome = run(small_job(inputs, rollouts=2), tmp_path / "run")
    assert set(outcome.summary.staleness) <= {"0", "1"}


@pytest.mark.long
@pytest.mark.slow
def test_delayed_rows_are_one_version_behind_but_for_those_of_the_first_step(inputs: Path, tmp_path: Path) -> None:
    found = run(small_job(inputs, mode="delayed"), tmp_path / "run").summary
    assert found.staleness == {"0": 64, "1": 192}
    parts = (found.staleness_in_flight, found.staleness_in_queue)
    assert [sum(part.values()) for part in parts] == [ROWS, ROWS]
    assert sum(int(behind) * rows for part in parts for behind, rows in part.items()) == 192
    assert found.swaps.count
    assert found.publish_lag_s > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param(OVER_SAMPLED, {"mode": "sync", "rollouts": 2}, id="over-sampling"),
        pytest.param({"sampling": {"budget": 2}}, {"rollouts": 2}, id="in parts"),
        pytest.param({}, {"mode": "colocated"}, id="colocated"),
        pytest.param(FILTERED, {}, id="groups replaced"),
        pytest.param({**OVER_SAMPLED, **FILTERED}, {"mode": "sync"}, id="both"),
    ],
)
def test_a_job_trains_on_exactly_its_rows(
    changes: dict[str, dict[str, Any]], options: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    outcome = run(checked(small_job(inputs, changes, **options)), tmp_path / "run")
    assert set(outcome.summary.staleness) <= {"0", "1"}
    if "algorithm" not in changes:
        assert outcome.audit.dropped == {}


@pytest.mark.slow
@pytest.mark.parametrize("stage", only_long("rollout", "train"))
def test_the_job_survives_the_death_of_a_process(stage: str, inputs: Path, tmp_path: Path) -> None:
    pids: dict[str, int] = {}

    def kill(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == "step" and event.values["step"] == 2 and pids:
            os.kill(pids.pop(f"{stage}-0"), signal.SIGKILL)
            pids.clear()

    def started(running: RunningJob) -> None:
        pids.update(running.pids)

    outcome = run(small_job(inputs, {"sampling": {"budget": 2}}), tmp_path / "run", observe=kill, started=started)
    assert outcome.audit.put == ROWS
    assert not pids


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, *only_long(signal.SIGTERM)])
def test_ctrl_c_ends_every_process_within_seconds(number: signal.Signals, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "transferqueue.cli", "demo", "--steps", "5", "--out", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"TRANSFERQUEUE_RUNTIME": str(tmp_path / "runtime")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    assert demo.stdout.readline() == "warm-up of the model\n"
    assert demo.stdout.readline().startswith("run in ")
    assert demo.stdout.readline().startswith("6 processes: prompts-0, ")
    children = children_of(demo.pid)
    assert len(children) == 7
    demo.send_signal(number)
    assert wait_gone(children, 5.0) == []
    assert demo.wait(10) == 130
    assert "go on with: transferqueue train --resume" in demo.communicate()[1]


def children_of(pid: int) -> list[int]:
    """Children of a process."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_every_option_has_its_place_in_the_job(tmp_path: Path) -> None:
    job = checked(demo_job(tmp_path, seed=7, steps=9, engine="vllm", rollouts=2, log=("tensorboard",)))
    assert (job.seed, job.steps, job.pacing.max_staleness, job.pacing.depth) == (7, 9, 1, 1)
    assert (job.engine[0].kind, job.engine[0].count, job.log.to) == ("vllm", 2, ("tensorboard",))
    assert checked(demo_job(tmp_path, mode="sync")).pacing.max_staleness == 0
