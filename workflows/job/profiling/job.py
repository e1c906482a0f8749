"""The profile of a job: opens its engine and its trainer in this process, one after the other, and times them with the
job's own prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np
from msgspec.structs import replace

from transferqueue.adapters.protocols import Completion
from transferqueue.errors import Impossible, UsageError
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.sequence import NumberedPrompt, PromptSequence
from transferqueue.workflows.job.engines import open_engine
from transferqueue.workflows.job.graph import has_episodes, task_names
from transferqueue.workflows.job.profiling.engine import MeasuredEngine, measure_engine
from transferqueue.workflows.job.profiling.scorers import scorer_row_s
from transferqueue.workflows.job.profiling.trainer import can_stream, measure_trainer
from transferqueue.workflows.job.profiling.trial import check_trials, run_trials
from transferqueue.workflows.job.reward_terms.scorer import RewardScorer
from transferqueue.workflows.job.run.preflight import preflight
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.read import checked
from transferqueue.workflows.job.settings.sizes import batch_rows, group_rows
from transferqueue.workflows.job.stages.rollout import sampling_of
from transferqueue.workflows.job.training.process import policy_learner
from transferqueue.workflows.planner.profile import Profile, StageProfile

PROMPTS_MAX: Final = 64
"""Prompts of the job that are drawn from."""
DEPTHS: Final = (0, 1)
"""Depths of pacing that plans may choose."""


def profile_job(
    job: Job,
    *,
    code: Path | None = None,
    devices: int = 2,
    trial_steps: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Measure `job` here and return its profile, for `devices` devices. Blocks for the start of its engine and its
    model, and some seconds more.

    code: folder whose modules rewards may name. trial_steps: of a run of the whole job at each depth, which shows how
    its processes slow each other (0: none; `trial.run_trials`). say: told each step. Nothing else should run.

    Raises what `preflight` does; `Impossible` for sft, which generates nothing, for a job of episodes, whose time is
    the environment's, for prompts with images, and for engines of several kinds, which a plan cannot choose between;
    `UsageError` for fewer than 2 devices, and for trials of fewer than 3 steps.
    """
    job = checked(job)
    _check(job, devices)
    if trial_steps:
        check_trials(job, DEPTHS, trial_steps)
    data = preflight(job, code=code)
    prompts = PromptSequence(data, job.data, seed=job.seed).take(PROMPTS_MAX)
    settings = job.engine[0]
    say("the engine starts")
    with closing(open_engine(settings, job)) as engine:
        say("the engine: lengths, tokens by rows at once, prompts")
        measured = measure_engine(
            engine,
            sampling_of(job),
            [prompt.ids for prompt in prompts],
            slots=settings.slots,
            samples=job.sampling.group_size,
            seed=job.seed,
        )
        say("the trainer: rows by micro-batch, optimizer, publication")
        trained = measure_trainer(job, policy_learner(job), measured.prompts, measured.drawn, engine)
    say("rewards and scores")
    profile = Profile(
        batch_rows=batch_rows(job),
        generation=measured.generation,
        train=trained,
        stages=_stages(job, data.renderer.tokenizer, prompts, measured),
        depths=DEPTHS,
        devices=devices,
        group_rows=group_rows(job),
        streams=can_stream(job),
        by_length=job.dispatch.kind == "length",
    )
    if not trial_steps:
        return profile
    return replace(profile, trials=run_trials(job, profile, steps=trial_steps, code=code, say=say))


def _check(job: Job, devices: int) -> None:
    if job.algorithm.kind == "sft":
        raise Impossible('profile of a job with kind="sft": it generates nothing, so there is nothing to divide')
    if has_episodes(job):
        raise Impossible(
            "profile of a job of episodes: how long they take is the environment's affair; "
            "write a profile by hand (`transferqueue docs plan`)"
        )
    if job.data.images:
        raise Impossible(
            f"profile of a job with data.images={job.data.images!r}: it times prompts of text alone; "
            "write a profile by hand (`transferqueue docs plan`)"
        )
    if job.pacing.uses > 1:
        raise Impossible(
            f"profile of a job with pacing.uses={job.pacing.uses}: a plan counts the training of a row once; leave it "
            "out"
        )
    if len(job.engine) > 1:
        raise Impossible(
            f"profile of a job with {len(job.engine)} entries of engine: "
            "a plan chooses the count and slots of one; leave one"
        )
    if devices < 2:
        raise UsageError(f"devices={devices}: generation and training need one each; give 2 or more")


def _stages(
    job: Job, tokenizer: object, prompts: Sequence[NumberedPrompt], measured: MeasuredEngine
) -> list[StageProfile]:
    """The stages between generation and training that take time."""
    row_s: dict[str, float] = {}
    tasks = task_names(job)
    if names.REWARD in tasks:
        row_s[names.REWARD] = _reward_row_s(job, tokenizer, prompts, measured.drawn)
    for task in (names.REFERENCE, names.PROXIMAL, names.VALUE, names.TEACHER):
        if task in tasks:
            row_s[task] = scorer_row_s(job, task, measured.prompts, measured.drawn)
    return [StageProfile(name=name, row_s=seconds) for name, seconds in row_s.items()]


def _reward_row_s(
    job: Job,
    tokenizer: object,
    prompts: Sequence[NumberedPrompt],
    drawn: Sequence[Completion],
) -> float:
    seconds = []
    with RewardScorer(job, tokenizer) as scorer:  # type: ignore[arg-type]
        for _ in range(2):  # the first call loads models
            started = time.monotonic()
            scorer.score(
                ids=[prompts[each.prompt].number for each in drawn],
                data=[prompts[each.prompt].data for each in drawn],
                prompt_ids=[prompts[each.prompt].ids for each in drawn],
                response_ids=[np.asarray(each.ids) for each in drawn],
            )
            seconds.append((time.monotonic() - started) / len(drawn))
    return seconds[-1]
