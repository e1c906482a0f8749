"""Prompts by pass rate in a whole job: a run repeats whatever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("reasoning_gym")

from transferqueue.workflows.job.demo import TASK, demo_job
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import RunningJob, run_job
from transferqueue.workflows.job.run_files import SAMPLER, json_lines
from transferqueue.workflows.job.settings.job import Job, RewardSettings, SamplerSettings
from transferqueue.workflows.job.settings.read import checked
from transferqueue.workflows.job.tiny_model.make import make, write_data

PROMPTS, STEPS = 16, 4


def small_job(inputs: Path) -> Job:
    """The demo's job in turn, with few prompts, of which each step chooses some that were measured."""
    replace = msgspec.structs.replace
    job = demo_job(inputs, steps=STEPS, mode="sync")
    return checked(
        replace(
            job,
            reproducible=True,
            data=replace(job.data, sampler=SamplerSettings(by=f"{__name__}:measured", share=0.75)),
            reward=(RewardSettings(function=f"{__name__}:short"),),
            trainer=replace(job.trainer, prompts_per_step=PROMPTS),
            checkpoint=replace(job.checkpoint, every=2),
            evaluation=replace(job.evaluation, rows=8, samples=1),
            queue=replace(job.queue, memory_gib=0.125),
        )
    )


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reproducible_run_takes_the_same_prompts_though_its_source_dies(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    make(inputs / "model", kind="builtin", **small)
    write_data(inputs / "data", task=TASK, train=48, test=8)
    job = small_job(inputs)

    def kill(running: RunningJob) -> None:
        os.kill(running.pids["prompts-0"], signal.SIGKILL)
        os.kill(running.pids["advantage-0"], signal.SIGKILL)

    runs = [tmp_path / "whole", tmp_path / "killed"]
    run_job(job, folder=RunFolder(runs[0]))
    run_job(job, folder=RunFolder(runs[1]), started=kill)
    whole, killed = (list(json_lines(run / SAMPLER)) for run in runs)
    assert [step["first"] for step in whole] == [PROMPTS * step for step in range(STEPS)]
    assert any(row >= 0 for step in whole for row in step["rows"]), "some prompts were chosen"
    assert [step["rows"] for step in killed] == [step["rows"] for step in whole]
    weights = [max((run / "checkpoints" / "train").rglob("model*.safetensors")).read_bytes() for run in runs]
    assert weights[0] == weights[1]


def short(completions: list[str], answer: list[str]) -> list[float]:
    """A reward that differs between responses of a model that knows nothing."""
    return [float(len(said) < 6) for said in completions]


def measured(*, rows, rates, count, source, draws):  # type: ignore[no-untyped-def]
    """A sampler: any prompt that has been measured."""
    return draws.permutation(rows)[:count].tolist()
