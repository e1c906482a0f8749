"""The processes that score rows by a model: reference and teacher, which stay as they are, proximal policy and critic, which are trained.

A process whose model is trained waits for the first version before its first row. Then it takes the newest version before each lease. In
sync mode it takes exactly the version that the rows belong to, and waits for it: the critic of a step may be published a little
after the policy of that step, which moves the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import transferqueue as tq
from transferqueue.adapters.protocols import WeightSource
from transferqueue.adapters.scoring.load import load_causal_lm, load_value_model
from transferqueue.adapters.scoring.stages import LogProbs, TeacherTopK, Values
from transferqueue.adapters.weights import WeightUpdater, copy_weights
from transferqueue.errors import DeadlineExceeded
from transferqueue.workflows.flow.events import SWAP
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job.names import CRITIC, POLICY
from transferqueue.workflows.job.settings.job import Job, ModelSettings, ScorerSettings

FIRST_S: Final = 3600.0
"""Longest wait for the first weights, which the trainer publishes when its model is loaded."""
NEWER_S: Final = 3600.0
"""Longest wait of rows for the version that they belong to."""


@contextmanager
def reference(context: Context) -> Iterator[LogProbs]:
    """Yield the stage that gives ``ref_logprobs``, by the model of ``reference.path`` (default: the policy as it was)."""
    job = context.settings(Job)
    model = _scorer(load_causal_lm, job.reference, job.model)
    yield LogProbs(model, gives="ref_logprobs", temperature=job.sampling.temperature, tokens=job.reference.tokens)


@contextmanager
def proximal(context: Context) -> Iterator[LogProbs]:
    """Yield the stage that gives ``prox_logprobs``, by the policy as it is trained."""
    job = context.settings(Job)
    policy = ScorerSettings(tokens=job.trainer.micro_tokens, device=job.trainer.device)
    model = _scorer(load_causal_lm, policy, job.model)
    yield LogProbs(
        model,
        gives="prox_logprobs",
        temperature=job.sampling.temperature,
        tokens=policy.tokens,
        refresh=_followed(context, POLICY, model, job),
    )


@contextmanager
def value(context: Context) -> Iterator[Values]:
    """Yield the stage that gives ``values``, by the critic as it is trained."""
    job = context.settings(Job)
    model = _scorer(load_value_model, job.critic, job.model)
    yield Values(model, tokens=job.critic.tokens, refresh=_followed(context, CRITIC, model, job))


@contextmanager
def teacher(context: Context) -> Iterator[TeacherTopK]:
    """Yield the stage that gives ``teacher_ids`` and ``teacher_logprobs``: ``top_k`` most probable tokens, or the drawn one alone."""
    job = context.settings(Job)
    yield TeacherTopK(
        _scorer(load_causal_lm, job.teacher, job.model),
        k=job.algorithm.top_k if job.algorithm.direction == "forward" else 0,
        temperature=job.sampling.temperature,
        tokens=job.teacher.tokens,
    )


def _scorer(load: Callable[..., Any], scorer: ScorerSettings, policy: ModelSettings) -> Any:
    """Load a scorer's model; what its settings leave open is the policy's."""
    return load(
        scorer.path or policy.path,
        dtype=scorer.dtype or policy.dtype,
        device=scorer.device,
        revision="" if scorer.path else policy.revision,
        trust_remote_code=policy.trust_remote_code,
    )


def _followed(context: Context, channel: str, model: Any, job: Job) -> Callable[[tq.Batch], None]:
    """Load the first version of `channel` into `model`; return what loads later ones before a batch. Raises `DeadlineExceeded` if none comes."""

    def update(source: WeightSource, version: int) -> None:
        with context.span(SWAP, version):
            copy_weights(source, model)

    updater = WeightUpdater(context.queue, channel, update)
    if not updater.follow(FIRST_S):
        raise DeadlineExceeded(
            f'no weights came on channel "{channel}" within {FIRST_S:g} s; the trainer publishes them before its first step'
        )

    def refresh(batch: tq.Batch) -> None:
        updater.follow()
        while job.pacing.mode == "sync" and updater.version < batch.version:
            if not updater.follow(NEWER_S):
                raise DeadlineExceeded(
                    f'rows of version {batch.version} waited {NEWER_S:g} s for it on channel "{channel}", which has {updater.version}'
                )

    return refresh
