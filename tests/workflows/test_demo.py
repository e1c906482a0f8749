"""The main job, made small: both modes, with and without a reference stage, and its end by Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from tests.scale import only_long
from tests.workflows.test_flow import ROOT, wait_gone
from tests.workflows.test_report import KEYS
from transferqueue.errors import Impossible, UsageError
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.grpo.job import JobSettings, stages
from transferqueue.workflows.grpo.learning.settings import LearningSettings
from transferqueue.workflows.grpo.run import RunOutcome, run_demo

SMALL = LearningSettings(
    dataset="spell_backward",
    steps=4,
    prompts_per_step=8,
    warmup_steps=4,
    warmup_rows=16,
    width=32,
    heads=2,
    layers=1,
    hidden=32,
    evaluation_samples=1,
)


def run(settings: JobSettings, directory: Path) -> RunOutcome:
    outcome = run_demo(settings, directory=directory)
    assert list(json.loads((directory / "summary.json").read_text())) == KEYS
    assert all(path.stat().st_size for path in outcome.files)
    assert outcome.summary.rows_put == outcome.summary.rows_done == 4 * 64
    assert outcome.summary.steps == 4
    return outcome


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> RunOutcome:
    """A synchronous run with a reference stage, of the other problem set."""
    learning = replace(SMALL, kl_weight=0.05, dataset="chain_sum")
    settings = JobSettings(learning=learning, mode="sync", max_staleness=0, depth=0)
    return run(settings, tmp_path_factory.mktemp("synchronous"))


@pytest.mark.slow
def test_synchronous_rows_are_never_stale(synchronous: RunOutcome) -> None:
    assert synchronous.summary.staleness_histogram == {"0": 256}


@pytest.mark.long
@pytest.mark.slow
def test_asynchronous_rows_stay_within_their_bound(tmp_path: Path) -> None:
    outcome = run(JobSettings(learning=SMALL, rollouts=2), tmp_path)
    assert set(outcome.summary.staleness_histogram) <= {"0", "1"}
    assert sum(outcome.summary.staleness_histogram.values()) == 256


@pytest.mark.long
@pytest.mark.slow
def test_delayed_rows_are_one_version_behind_but_for_those_of_the_first_step(tmp_path: Path) -> None:
    outcome = run(JobSettings(learning=SMALL, mode="delayed"), tmp_path)
    found = outcome.summary
    assert found.staleness_histogram == {"0": 64, "1": 192}
    assert sum(found.staleness_in_flight.values()) == sum(found.staleness_in_queue.values()) == 256
    behind = sum(
        int(lag) * rows for part in (found.staleness_in_flight, found.staleness_in_queue) for lag, rows in part.items()
    )
    assert behind == 192
    assert found.swaps
    assert found.publish_lag_s > 0


@pytest.mark.slow
def test_kl_brings_a_reference_stage(synchronous: RunOutcome) -> None:
    (timeline,) = (path for path in synchronous.files if path.name == "timeline.json")
    trace = json.loads(timeline.read_text())["traceEvents"]
    assert "reference-0" in {event["args"].get("name") for event in trace}


@pytest.mark.slow
@pytest.mark.parametrize("stage", only_long("rollout", "train"))
def test_the_job_survives_the_death_of_a_process(stage: str, tmp_path: Path) -> None:
    """Killed at the second step: the trainer between publishing weights and acknowledging the rows they come from."""
    flows: list[Flow] = []

    def kill(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.values.get("step") == 2 and len(flows) == 1:
            flows.append(flows[0])
            os.kill(flows[0].pids()[f"{stage}-0"], signal.SIGKILL)

    settings = JobSettings(learning=SMALL)
    outcome = run_demo(settings, directory=tmp_path, observe=kill, started=flows.append)
    assert len(flows) == 2
    assert (outcome.audit.put, outcome.audit.done) == (256, 256)
    assert set(outcome.summary.staleness_histogram) <= {"0", "1"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, *only_long(signal.SIGTERM)])
def test_ctrl_c_ends_everything_within_three_seconds(number: signal.Signals, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    demo = subprocess.Popen(
        [sys.executable, "-m", "transferqueue.cli", "demo", "--steps", "5", "--out", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"TRANSFERQUEUE_RUNTIME": str(runtime)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    assert demo.stdout.readline().startswith("5 processes: prompts-0, ")
    children = children_of(demo.pid)
    assert len(children) == 5
    demo.send_signal(number)
    assert wait_gone([*children, demo.pid], 3.0) == []
    assert demo.wait() == 130
    demo.communicate()
    assert [path for path in runtime.rglob("*") if not path.is_dir()] == []


def children_of(pid: int) -> list[int]:
    """Children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(Impossible, match="mode sync with depth=1"):
        JobSettings(mode="sync")
    with pytest.raises(Impossible, match="mode async with depth=0"):
        JobSettings(depth=0)
    with pytest.raises(Impossible, match="mode delayed with depth=1 and max_staleness=2"):
        JobSettings(mode="delayed", max_staleness=2)
    with pytest.raises(Impossible, match="mode delayed with engine vllm"):
        JobSettings(mode="delayed", engine="vllm")
    with pytest.raises(UsageError, match="rollouts=0"):
        JobSettings(rollouts=0)


def test_every_field_that_a_stage_needs_is_given_before_it() -> None:
    for kl_weight in (0.0, 0.1):
        given = {"prompt_ids", "problem"}
        settings = JobSettings(learning=replace(SMALL, kl_weight=kl_weight))
        order = sorted(stages(settings), key=lambda stage: stage.task.name == "train")
        for stage in order:
            assert set(stage.task.needs) <= given, stage.task.name
            given |= set(stage.task.gives)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("stages.problem_stages", {"torch"}),
        ("stages.advantage_stage", {"torch", "reasoning_gym"}),
        ("job", {"torch", "reasoning_gym"}),
    ],
)
def test_a_process_loads_no_more_than_its_stage_needs(module: str, unwanted: set[str]) -> None:
    code = f"import sys, transferqueue.workflows.grpo.{module}, transferqueue.workflows.flow.processes.stage_process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert unwanted & set(loaded.stdout.split()) == set()
