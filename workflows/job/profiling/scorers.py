"""Measures the scoring of rows by the models between generation and training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    from transferqueue.adapters.scoring import (
        load_causal_lm,
        load_value_model,
        micro_batches,
        response_logprobs,
        response_values,
    )
    from transferqueue.workflows.job.stages.score import load_scorer

    settings = _settings(job, task)
    score = response_values if task == names.VALUE else response_logprobs
    model = load_scorer(load_value_model if task == names.VALUE else load_causal_lm, settings, job.model)
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
    policy = ScorerSettings(tokens=job.trainer.micro_tokens)
    return {names.REFERENCE: job.reference, names.VALUE: job.critic, names.TEACHER: job.teacher}.get(task, policy)
