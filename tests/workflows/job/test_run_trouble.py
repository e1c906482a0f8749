"""Runs that go wrong: in six ways at once, and by rewards that fail for a row. Output, page and summary say it."""

import io
import os
from contextlib import suppress

import msgspec
import pytest
from rich.console import Console

pytest.importorskip("torch", exc_type=ImportError)

from tests.workflows.job.short_run import lines
from transferqueue.cli.screens.train import Lines
from transferqueue.errors import DeadlineExceeded, NotFound
from transferqueue.observe.figure_table import FigureTable
from transferqueue.workflows.dispatch.channels import newest
from transferqueue.workflows.flow.events import Figures
from transferqueue.workflows.job.run.figures import described
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.run.run_page import CHANNEL, RunPage
from transferqueue.workflows.job.run.samples import samples
from transferqueue.workflows.job.settings.job import LogSettings, RewardSettings
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.tiny_model.make import make, write_data

STEPS, GROUP = 12, 4
REWARDS = """
def rarely(prompts, completion_ids):
    teaches = [sum(map(ord, prompt)) % 16 == 0 for prompt in prompts]
    return [sum(ids) % 7 / 7 if differs else 0.5 for differs, ids in zip(teaches, completion_ids)]


def dead(completions):
    return [0.0] * len(completions)
"""
ROWS_FAIL = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def fails(prompts, completion_ids):
    for row in map(str, zip(prompts, completion_ids)):
        if is_the("hangs", row):
            time.sleep(600)
        elif is_the("raises", row):
            raise ValueError("no such unit")
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def is_the(name, row):
    file = HERE / name
    if not file.exists():
        file.write_text(row)
    return file.read_text() == row
"""
"""A reward that hangs for the first row that it sees, and raises for the second."""
OTHER_WEIGHTS = """
from pathlib import Path

if '"name":"rollout"' in Path("/proc/self/cmdline").read_text():
    import torch
    from transferqueue.adapters.engines.transformers import TransformersGenerator

    take = TransformersGenerator.update_weights

    def take_wrongly(self, source, version, **terms):
        take(self, source, version, **terms)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.5)

    TransformersGenerator.update_weights = take_wrongly
elif '"name":"train"' in Path("/proc/self/cmdline").read_text():
    import time
    from transferqueue.workflows.job.training.learner import PolicyLearner

    step = PolicyLearner.step

    def step_slowly(self, **terms):
        time.sleep(0.5)
        return step(self, **terms)

    PolicyLearner.step = step_slowly
"""
"""What Python runs when a process starts: the engine's weights are not those that it was given, and the trainer is
slower than generation."""
LOG = """
def log(step, figures):
    with open({file!r}, "a") as file:
        print(step, sorted(figures), file=file)
"""
WORDS = {
    "truncated": "of responses are cut at tokens_max = 4",
    "reward_std/own_rewards:dead": "reward term own_rewards:dead is 0 in every row",
    "equal_groups": "groups are equal",
    "ref_kl": "the KL from the reference explodes",
    "staleness_mean": "rows are stale: the policy that drew them is",
    "engine_error": "the engine has other weights than the trainer",
}


def job_in(folder):
    model = str(folder / "model")
    return job_from_values(
        {
            "name": "trouble",
            "steps": STEPS,
            "model": {"path": model, "dtype": "float32"},
            "data": {"path": str(folder / "data"), "prompt": "question", "prompt_tokens_max": 28},
            "engine": [{"kind": "builtin", "slots": 64}],
            "sampling": {"group_size": GROUP, "tokens_max": 4},
            "reward": [{"function": "own_rewards:rarely"}, {"function": "own_rewards:dead"}],
            "algorithm": {"kind": "grpo", "kl": 1e-6},
            "reference": {"path": model},
            "trainer": {"prompts_per_step": 16, "lr": 0.05, "gradient_norm_max": 100.0, "micro_tokens": 68},
            "pacing": {"mode": "async", "depth": 4, "max_staleness": 8},
            "weights": {"dtype": "float32"},
            "checkpoint": {"every": 0},
            "log": {"to": ["own_log:log"]},
            "queue": {"memory_gib": 0.0625},
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_goes_wrong_in_six_ways_says_so(tmp_path):
    make(tmp_path / "model", kind="builtin", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    write_data(tmp_path / "data", train=256, test=16)
    for name, text in {"own_rewards": REWARDS, "sitecustomize": OTHER_WEIGHTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "own_log.py").write_text(LOG.format(file=str(tmp_path / "own_log.txt")))
    told, on_page, show = {}, set(), RunPage.show

    def observe(label, event):
        if isinstance(event, Figures) and event.kind == "warning":
            told[event.values["figure"]] = event.values["text"]

    def show_and_read(page, record, *, at_once=False):
        show(page, record, at_once=at_once)
        with suppress(DeadlineExceeded):  # the first step is not on the page yet
            on_page.update(newest(page._queue, CHANNEL, FigureTable)[1].warnings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunPage, "show", show_and_read)
        patch.setenv("OMP_NUM_THREADS", "1")
        outcome = run_job(job_in(tmp_path), folder=RunFolder(tmp_path / "run"), code=tmp_path, observe=observe)
    summary = outcome.summary
    for figure, words in WORDS.items():
        assert words in told.get(figure, ""), (figure, told)
        assert words in summary.text(), figure
        assert any(words in warning for warning in on_page), (figure, on_page)
    assert {warning.figure for warning in summary.warnings} >= set(WORDS)
    steps = lines(tmp_path / "run" / "steps.jsonl")
    assert [step["step"] for step in steps] == [*range(1, STEPS + 1)]
    assert all(described(name) or name == "at" for step in steps for name in step)
    assert any(step.get("generation_tokens_per_s", 0) > 0 for step in steps)  # those in which a generation ended
    own = (tmp_path / "own_log.txt").read_text().splitlines()
    assert len(own) >= STEPS
    assert "'truncated'" in own[0]
    numbers = {line["step"] for line in lines(tmp_path / "run" / "samples.jsonl")}
    for number in numbers:
        found = samples(tmp_path / "run", step=number, rows=16)
        assert len({sample.ordinal // GROUP for sample in found}) == len(found) <= 4
        assert {sample.step for sample in found} == {number}
        assert all({*sample.terms} == {"own_rewards:rarely", "own_rewards:dead"} for sample in found)
    assert found == samples(tmp_path / "run"), "of the newest step"
    with pytest.raises(NotFound, match=rf"has no samples of that step; it has steps {min(numbers)} to {max(numbers)}"):
        samples(tmp_path / "run", step=STEPS + 100)
    assert {sample.finish_reason for sample in found} <= {"stop", "length"}
    assert all(sample.tokens and sample.prompt for sample in found)
    assert msgspec.to_builtins(summary)["figures"]["truncated"][0] > 0.5
    assert os.path.getsize(tmp_path / "run" / "warnings.jsonl")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reward_that_hangs_for_one_row_and_raises_for_another_loses_these_two(tmp_path):
    make(tmp_path / "model", kind="builtin", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    write_data(tmp_path / "data", train=64, test=16)
    (tmp_path / "row_rewards.py").write_text(ROWS_FAIL)
    job = job_in(tmp_path)
    job = msgspec.structs.replace(
        job,
        steps=3,
        reward=(RewardSettings(function="row_rewards:fails", timeout_s=1.0, on_error="drop"),),
        trainer=msgspec.structs.replace(job.trainer, prompts_per_step=4, lr=1e-3),
        log=LogSettings(),
    )
    output = io.StringIO()
    lines_of_run = Lines(Console(file=output), steps=3)
    outcome = run_job(job, folder=RunFolder(tmp_path / "run"), code=tmp_path, observe=lines_of_run)
    failed = {line["row"]: line["text"] for line in lines(tmp_path / "run" / "failed_rows.jsonl")}
    hangs, raises = (
        next(text for text in failed.values() if words in text)
        for words in ("did not return within reward.0.timeout_s=1 s", "raised ValueError: no such unit; row ")
    )
    assert "; row " in hangs
    assert outcome.audit.dropped["reward_error"] == len(failed)
    assert len(lines(tmp_path / "run" / "steps.jsonl")) == 3
    for text in (hangs, raises):
        assert f"{text}: the row is dropped" in output.getvalue()
        assert text in outcome.summary.text()
