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


def test_after_the_death_of_every_process_at_once_a_run_ends_bit_equal(place, whole):
    folder = place / "killed"
    process = train(place, "job.toml", "--out", "killed")
    wait_for(process, folder / "steps.jsonl", 3)
    for pid in [*descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    resumed = finished(train(place, "job.toml", "--resume", "--out", "killed", "--json"))
    assert (resumed["starts"], resumed["rows_put"], resumed["rows_done"], resumed["rows_dropped"]) == (2, 32, 32, {})
    assert final_weights(folder) == final_weights(place / "whole")


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, children first."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found
