"""The processes that score rows by a model: reference and teacher, which stay as they are, proximal policy and critic, which are trained.

A process whose model is trained waits for the first version before its first row, and then takes the newest version for each lease.

In sync mode the critic that scores a row must have learned from all earlier steps. It may be published a little after the policy of the same step, whose
version admits new rows. So a lease waits while task ``train_critic`` has more rows left to ack than task ``train``; a trainer publishes before it acks.
Versions do not say whether the critic is behind: each channel counts its own, and a trainer that was killed publishes more versions than the other.
"""

from __future__ import annotations

import time
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
from transferqueue.workflows.job.names import CRITIC, POLICY, TRAIN, TRAIN_CRITIC
from transferqueue.workflows.job.settings.job import Job, ModelSettings, ScorerSettings

FIRST_S: Final = 3600.0
"""Longest wait for the first weights, which the trainer publishes when its model is loaded."""
CRITIC_S: Final = 3600.0
"""Longest wait of rows for the critic to learn from the steps before them."""
CHECK_S: Final = 0.05
"""How often a waiting process asks whether the critic has acked: nothing wakes it, since the ack follows the version."""

_OPEN: Final = ("pending", "held", "ready", "leased")
"""States of rows that a task has not acked."""


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
    newest = _followed(context, POLICY, model)
    yield LogProbs(
        model,
        gives="prox_logprobs",
        temperature=job.sampling.temperature,
        tokens=policy.tokens,
        refresh=lambda batch: newest(0.0),
    )


@contextmanager
def value(context: Context) -> Iterator[Values]:
    """Yield the stage that gives ``values``, by the critic as it is trained."""
    job = context.settings(Job)
    model = _scorer(load_value_model, job.critic, job.model)
    newest = _followed(context, CRITIC, model)

    def refresh(batch: tq.Batch) -> None:
        if job.pacing.mode == "sync":
            _wait_for_critic(context.table, newest)
        newest(0.0)

    yield Values(model, tokens=job.critic.tokens, refresh=refresh)


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


def _followed(context: Context, channel: str, model: Any) -> Callable[[float], object]:
    """Load the first version of `channel` into `model`; return what loads the newest, and waits for one so many seconds if there is none.

    Raises `DeadlineExceeded` if no first version comes.
    """

    def update(source: WeightSource, version: int) -> None:
        with context.span(SWAP, version):
            copy_weights(source, model)

    updater = WeightUpdater(context.queue, channel, update)
    if not updater.follow(FIRST_S):
        raise DeadlineExceeded(
            f'no weights came on channel "{channel}" within {FIRST_S:g} s; the trainer publishes them before its first step'
        )
    return updater.follow


def _wait_for_critic(table: tq.Table, newest: Callable[[float], object]) -> None:
    """Wait until the critic has acked as many rows as the policy. Raises `DeadlineExceeded` if it does not."""
    deadline = time.monotonic() + CRITIC_S
    while (behind := _rows_behind(table)) > 0:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f'task "{TRAIN_CRITIC}" has {behind} rows to learn from that task "{TRAIN}" has acked, and acked none of them for {CRITIC_S:g} s; '
                "see the log of its process"
            )
        newest(CHECK_S)


def _rows_behind(table: tq.Table) -> int:
    """How many live rows the policy has acked and the critic has not, less those of which the opposite is true."""
    tasks = table.stats()["tasks"]
    critic, policy = (sum(tasks[name][state] for state in _OPEN) for name in (TRAIN_CRITIC, TRAIN))
    return int(critic - policy)
