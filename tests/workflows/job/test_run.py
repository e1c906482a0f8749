"""Whole runs: a job file to its summary, and on after the death of everything."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.markdown import ROOT
from transferqueue.workflows.job.run.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
pytest.importorskip("transformers", exc_type=ImportError)

STEPS = 4
JOB = f"""
name = "short"
steps = {STEPS}
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = 32 }}
engine = [{{ kind = "transformers", slots = 16 }}]
sampling = {{ group_size = 2, tokens_max = 6 }}
reward = [{{ function = "any_rewards:spread" }}]
algorithm = {{ kind = "grpo" }}
trainer = {{ prompts_per_step = 4, lr = 1e-3, order = "ordinal" }}
pacing = {{ mode = "sync" }}
checkpoint = {{ every = 2 }}
weights = {{ dtype = "float32" }}
evaluation = {{ path = "data", every = 2, rows = 8 }}
queue = {{ memory_gib = 0.125 }}
"""

REWARDS = """
def spread(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""
"""A reward that differs between responses of an untrained model, so that each step changes the weights."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    folder = tmp_path_factory.mktemp("job")
    make(
        folder / "model", hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    write_data(folder / "data", train=64, test=16)
    (folder / "job.toml").write_text(JOB)
    (folder / "any_rewards.py").write_text(REWARDS)
    return folder


def train(place: Path, *words: str) -> subprocess.Popen[str]:
    """`transferqueue train` in a process group of its own, so that a test may end it as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-m", "transferqueue.cli", "train", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def finished(process: subprocess.Popen[str]) -> dict:
    stdout, stderr = process.communicate(timeout=500)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(process: subprocess.Popen[str], path: Path, rows: int) -> None:
    """Wait until a file of the run has so many lines. The run writes it, so there is nothing else to wait on."""
    deadline = time.monotonic() + 400
    while len(lines(path)) < rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} has {len(lines(path))} lines, not {rows}"
        time.sleep(0.05)


def final_weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / "train" / f"step-{STEPS:08}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(place):
    """The summary of an undisturbed run in the folder ``whole``."""
    return finished(train(place, "job.toml", "--out", "whole", "--json"))


def test_a_run_trains_every_row_and_leaves_files_and_no_memory(place, whole):
    folder = place / "whole"
    assert (whole["steps"], whole["rows_put"], whole["rows_done"], whole["rows_dropped"]) == (STEPS, 32, 32, {})
    assert (whole["measure"], whole["starts"], whole["staleness"]) == ("reward", 1, {"0": 32})
    assert whole["before"] is not None
    assert whole["after"] is not None
    assert [(found["when"], found["step"]) for found in lines(folder / "evaluations.jsonl")] == [
        ("before", 0),
        ("during", 2),
        ("after", 4),
    ]
    assert {"prompt", "response", "reward"} <= lines(folder / "samples.jsonl")[0].keys()
    assert [step["step"] for step in lines(folder / "steps.jsonl")] == [1, 2, 3, 4]
    assert all(step["gradient_norm"] > 0 for step in lines(folder / "steps.jsonl"))
    assert json.loads((folder / "summary.json").read_text()) == whole
    assert (folder / "timeline.json").exists()
    assert not (folder / "state").exists()
    assert RunFolder(folder).finished


@pytest.mark.long
def test_ctrl_c_ends_a_run_that_resume_brings_to_the_same_weights(place, whole):
    folder = place / "interrupted"
    process = train(place, "job.toml", "--out", "interrupted")
    wait_for(process, folder / "steps.jsonl", 3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: transferqueue train --resume --out interrupted" in stderr
    resumed = finished(train(place, "--resume", "--out", "interrupted", "--json"))
    assert (resumed["starts"], resumed["steps"], resumed["rows_done"], resumed["rows_dropped"]) == (2, STEPS, 32, {})
    assert final_weights(folder) == final_weights(place / "whole")


def test_after_the_death_of_every_process_at_once_a_run_ends_bit_equal(place, whole):
    folder = place / "killed"
    process = train(place, "job.toml", "--out", "killed")
    wait_for(process, folder / "steps.jsonl", 3)
    for pid in [*descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    resumed = finished(train(place, "job.toml", "--resume", "--out", "killed", "--json"))
    assert (resumed["starts"], resumed["rows_put"], resumed["rows_done"]) == (2, 32, 32)
    assert final_weights(folder) == final_weights(place / "whole")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["train-0", "rollout-0", "reward-0", "advantage-0", "prompts-0", "evaluate-0", "server"]
)
def test_a_killed_process_is_started_again_and_the_run_ends_bit_equal(place, whole, name, tmp_path):
    folder = tmp_path / "run"
    process = train(place, "job.toml", "--out", str(folder), "--json")
    wait_for(process, folder / "steps.jsonl", 1)
    os.kill(pid_of(process.pid, name), signal.SIGKILL)
    outcome = finished(process)
    assert (outcome["starts"], outcome["rows_put"], outcome["rows_done"]) == (1, 32, 32)
    assert final_weights(folder) == final_weights(place / "whole")


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, children first."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def pid_of(run: int, name: str) -> int:
    """The process id of a stage of the run, or of its serving process."""
    task, _, instance = name.partition("-")
    for pid in descendants(run):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if name == "server" and "serve" in words and pid not in descendants_of_run(run):
            return pid
        if f'"name":"{task}"' in " ".join(words) and f'"instance":{instance or 0}' in " ".join(words):
            return pid
    raise AssertionError(f"no process {name}")


def descendants_of_run(run: int) -> list[int]:
    """The direct children of the run: its stages and the supervisor of its server."""
    return [
        int(child) for task in Path(f"/proc/{run}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.long
def test_a_reward_that_raises_ends_the_run_with_the_row_and_its_text(place):
    (place / "bad_rewards.py").write_text("def bad(completions):\n    raise ValueError('no')\n")
    process = train(
        place,
        "job.toml",
        "--set",
        'reward=[{function="bad_rewards:bad"}]',
        "--out",
        "failed",
        "--set",
        'evaluation.path=""',
    )
    _, stderr = process.communicate(timeout=200)
    assert process.returncode in (2, 3)
    assert "bad_rewards:bad" in stderr
    assert "no" in stderr
