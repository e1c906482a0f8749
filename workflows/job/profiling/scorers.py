"""Measures the scoring of rows by the models between generation and training."""

from __future__ import annotations

import time
from collections.abc import Sequence

from transferqueue.adapters.protocols import Completion, Ids
from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.job import Job, ScorerSettings


def scorer_row_s(job: Job, task: str, prompts: Sequence[Ids], drawn: Sequence[Completion]) -> float:
    """Return the seconds of a row in one forward pass after the other, as a process of `task` makes them. Loads the
    model and frees it again.
    """
    from transferqueue.adapters.scoring import LogProbs, Values, load_causal_lm, load_value_model
    from transferqueue.workflows.job.stages.score import load_scorer

    settings = _settings(job, task)
    load, kind = (load_value_model, Values) if task == names.VALUE else (load_causal_lm, LogProbs)
    stage = kind(load_scorer(load, settings, job.model), tokens=settings.tokens)
    seconds = []
    for _ in range(2):  # the first pass warms up
        started = time.monotonic()
        stage.in_order([prompts[each.prompt] for each in drawn], [each.ids for each in drawn])
        seconds.append((time.monotonic() - started) / len(drawn))
    return seconds[-1]


def _settings(job: Job, task: str) -> ScorerSettings:
    """The settings of the model; the proximal policy is the trained one."""
    policy = ScorerSettings(tokens=job.trainer.micro_tokens)
    return {names.REFERENCE: job.reference, names.VALUE: job.critic, names.TEACHER: job.teacher}.get(task, policy)
