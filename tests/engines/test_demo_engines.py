"""The GRPO job with a real engine for its generation: a few steps, weights changed in flight, nothing lost, log-probs the trainer's.

`make test-engines` runs it, as it runs everything in this folder; `make test` leaves it out, where transformers is installed too.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="make test-engines installs it")
pytest.importorskip("matplotlib")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

from transferqueue.workflows.flow.events import Event, Figures, TimeSpan
from transferqueue.workflows.grpo.job import JobSettings
from transferqueue.workflows.grpo.learning.settings import LearningSettings, for_engine
from transferqueue.workflows.grpo.run import run_demo

STEPS, PROMPTS, GROUP = 4, 8, 8
SMALL = LearningSettings(
    dataset="spell_backward", warmup_steps=4, warmup_rows=16, width=128, layers=1, hidden=64, evaluation_samples=1
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("partial", [0, 2])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_job_runs_on_a_real_engine(engine: str, partial: int, tmp_path: Path) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    events: list[tuple[str, Event]] = []
    learning = replace(for_engine(SMALL), steps=STEPS, prompts_per_step=PROMPTS, group_size=GROUP)
    settings = JobSettings(learning=learning, engine=engine, partial=partial)  # type: ignore[arg-type]
    outcome = run_demo(settings, directory=tmp_path, observe=lambda label, event: events.append((label, event)))
    assert outcome.summary.steps == STEPS
    assert (outcome.audit.put, outcome.audit.done) == (STEPS * PROMPTS * GROUP,) * 2
    assert set(outcome.summary.staleness_histogram) <= {"0", "1"}
    spans = [event.name for label, event in events if label == "rollout-0" and isinstance(event, TimeSpan)]
    assert spans.count("engine start") == 1
    assert "weights" in spans
    steps = [event.values for _, event in events if isinstance(event, Figures) and event.kind == "step"]
    assert steps[0]["staleness"] == {"0": PROMPTS * GROUP}
    assert abs(steps[0]["rollout_kl"]) < 1e-6  # the engine's log-probabilities are the trainer's
