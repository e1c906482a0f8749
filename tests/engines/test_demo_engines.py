"""The demo's job with a real engine for its generation: a few steps, weights changed in flight, nothing lost, log-probs
the trainer's.

`make test-engines` runs it, as it runs everything in this folder; `make test` leaves it out, where transformers is
installed too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("transformers", reason="make test-engines installs it")
pytest.importorskip("reasoning_gym")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

from tests.workflows.test_demo import GROUP, PROMPTS, STEPS, run, small_job
from transferqueue.workflows.flow.events import Event, Figures, TimeSpan
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.tiny_model.gym_tasks import GYM_TASKS
from transferqueue.workflows.job.tiny_model.make import make, write_data

TASK = "spell_backward"
"""A model that has learned nothing has unequal rewards."""


def spelling_job(folder: Path, **options: Any) -> Job:
    """Write a small model and questions; return their job."""
    make(folder / "model", kind="builtin", num_hidden_layers=1, num_attention_heads=4)
    write_data(folder / "data", task=TASK, train=64, test=16)
    gym, job = GYM_TASKS[TASK], small_job(folder, **options)
    return replace(
        job,
        data=replace(job.data, prompt_tokens_max=gym.question_chars_max + 2),
        sampling=replace(job.sampling, tokens_max=gym.answer_chars_max + 1),
        reward=(replace(job.reward[0], args={"task": TASK}),),
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("budget", [0, 2])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_job_runs_on_a_real_engine(engine: str, budget: int, tmp_path: Path) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    events: list[tuple[str, Event]] = []
    job = spelling_job(tmp_path, engine=engine, changes={"sampling": {"budget": budget}})
    outcome = run(job, tmp_path / "run", observe=lambda label, event: events.append((label, event)))
    assert outcome.audit.dropped == {}
    assert set(outcome.summary.staleness) <= {"0", "1"}
    spans = [event.name for label, event in events if label == "rollout-0" and isinstance(event, TimeSpan)]
    assert spans.count("engine start") == 1
    assert "weights" in spans
    steps = [event.values for _, event in events if isinstance(event, Figures) and event.kind == "step"]
    assert steps[0]["staleness"] == {"0": PROMPTS * GROUP}
    assert steps[0]["engine_error"] < 1e-3  # the engine's log-probabilities are the trainer's


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_engine_beside_its_trainer_draws_with_the_trainers_weights_in_each_step(engine: str, tmp_path: Path) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    steps: list[Mapping[str, Any]] = []

    def hear(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == "step":
            steps.append(event.values)

    outcome = run(spelling_job(tmp_path, engine=engine, mode="colocated"), tmp_path / "run", observe=hear)
    assert outcome.audit.dropped == {}
    assert outcome.summary.staleness == {"0": STEPS * PROMPTS * GROUP}
    assert all(values["engine_error"] < 1e-3 and values["gradient_norm"] > 0 for values in steps)
