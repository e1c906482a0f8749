"""Measures the scoring of rows by the models between generation and training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transferqueue.adapters.protocols import Completion, Ids
from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.job import Job, ScorerSettings


def scorer_row_s(
    job: Job, task: str, prompts: Sequence[Ids], drawn: Sequence[Completion], clock: Callable[[], float]
) -> float:
    """Return the seconds of a row in one forward pass after the other, as a process of `task` makes them. Loads the
    model and frees it again.
    """
    import torch

    from transferqueue.adapters.scoring import micro_batches, response_logprobs, response_values

    settings = _settings(job, task)
    score = response_values if task == names.VALUE else response_logprobs
    model = _model(settings, job, task)
    sizes = [len(prompts[each.prompt]) + len(each.ids) for each in drawn]
    seconds = []
    with torch.no_grad():
        for _ in range(2):  # the first pass warms up
            started = clock()
            for rows in micro_batches(sizes, tokens=max(settings.tokens, *sizes)):
                score(model, [prompts[drawn[at].prompt] for at in rows], [drawn[at].ids for at in rows])
            seconds.append((clock() - started) / len(drawn))
    return seconds[-1]


def _settings(job: Job, task: str) -> ScorerSettings:
    """The settings of the model; the proximal policy is the trained one."""
    policy = ScorerSettings(path=job.model.path, dtype=job.model.dtype, tokens=job.trainer.micro_tokens)
    return {names.REFERENCE: job.reference, names.VALUE: job.critic, names.TEACHER: job.teacher}.get(task, policy)


def _model(settings: ScorerSettings, job: Job, task: str) -> Any:
    from transferqueue.adapters.scoring import load_causal_lm, load_value_model

    load = load_value_model if task == names.VALUE else load_causal_lm
    return load(settings.path, dtype=settings.dtype or job.model.dtype)
