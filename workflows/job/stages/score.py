"""The processes that score rows by a model: reference and teacher, which stay as they are, proximal policy and critic,
which are trained.

A process whose model is trained waits for the first version before its first row, and then takes the newest version for
each lease. Where the step of a row decides its version (`step_versions`), it scores each row with the version that the
row was generated with.

In sync mode the critic that scores a row must have learned from all earlier steps. It may be published a little after
the policy of the same step, whose version admits new rows. Versions of both channels are equal
(`transferqueue.workflows.job.training.policy_critic_pair`), so a lease waits for the critic's version that its rows
were generated with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import transferqueue as tq
from transferqueue.adapters.protocols import WeightSource
from transferqueue.adapters.scoring.load import load_causal_lm, load_value_model
from transferqueue.adapters.scoring.stages import LogProbs, TeacherTopK, Turns, Values
from transferqueue.adapters.weights import ModuleLoader, WeightUpdater
from transferqueue.errors import DeadlineExceeded
from transferqueue.workflows.flow.events import SWAP
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job.data.tokenizer import revision_of
from transferqueue.workflows.job.devices.repeat import repeat_bits
from transferqueue.workflows.job.names import CRITIC, IMAGES, POLICY, TRAIN, TRAIN_CRITIC
from transferqueue.workflows.job.settings.job import IN_TURN, Job, ModelSettings, ScorerSettings
from transferqueue.workflows.job.settings.sizes import has_step_versions, pass_tokens
from transferqueue.workflows.job.stages.step_versions import in_turns, pull_exactly

FIRST_S: Final = 3600.0
"""Longest wait for the first weights, which the trainer publishes when its model is loaded."""
CRITIC_S: Final = 3600.0
"""Longest wait of rows for the critic to learn from the steps before them."""


@contextmanager
def reference(context: Context) -> Iterator[LogProbs]:
    """Yield the stage that gives ``ref_logprobs``, by the model of ``reference.path`` (default: the policy as it was),
    which takes the newest weights every ``reference.sync_every`` steps."""
    job = context.settings(Job)
    repeat_bits(job)
    model = load_scorer(policy_loader(job), job.reference, job.model)
    every = job.reference.sync_every
    yield LogProbs(
        model,
        gives="ref_logprobs",
        temperature=job.sampling.temperature,
        tokens=pass_tokens(job, job.reference.tokens),
        images=IMAGES if job.data.images else "",
        turns=_after(_synchronised(context, model, every)) if every else None,
    )


@contextmanager
def proximal(context: Context) -> Iterator[LogProbs]:
    """Yield the stage that gives ``prox_logprobs``, by the policy as it is trained."""
    job = context.settings(Job)
    repeat_bits(job)
    policy = ScorerSettings(tokens=job.trainer.micro_tokens)
    model = load_scorer(policy_loader(job), policy, job.model)
    newest = _followed(context, POLICY, model)
    turns = _each_by_its_own(context, newest, POLICY) if has_step_versions(job) else _after(lambda _: newest.follow())
    yield LogProbs(
        model,
        gives="prox_logprobs",
        temperature=job.sampling.temperature,
        tokens=pass_tokens(job, policy.tokens),
        images=IMAGES if job.data.images else "",
        turns=turns,
    )


@contextmanager
def value(context: Context) -> Iterator[Values]:
    """Yield the stage that gives ``values``, by the critic as it is trained."""
    job = context.settings(Job)
    repeat_bits(job)
    model = load_scorer(load_value_model, job.critic, job.model)
    newest = _followed(context, CRITIC, model)

    def refresh(batch: tq.Batch) -> None:
        if job.pacing.mode in IN_TURN:
            _wait_for_critic(newest, int(batch.policy_version.max()))
        newest.follow()

    turns = _each_by_its_own(context, newest, CRITIC) if has_step_versions(job) else _after(refresh)
    yield Values(model, tokens=pass_tokens(job, job.critic.tokens), turns=turns)


@contextmanager
def teacher(context: Context) -> Iterator[TeacherTopK]:
    """Yield the stage that gives ``teacher_ids`` and ``teacher_logprobs``: ``top_k`` most probable tokens, or the drawn
    one alone."""
    job = context.settings(Job)
    repeat_bits(job)
    yield TeacherTopK(
        load_scorer(load_causal_lm, job.teacher, job.model),
        k=job.algorithm.top_k,
        temperature=job.sampling.temperature,
        tokens=pass_tokens(job, job.teacher.tokens),
    )


def policy_loader(job: Job) -> Callable[..., Any]:
    """Return what loads a model of the policy's kind: with a processor, if prompts have images."""
    return partial(load_causal_lm, images=bool(job.data.images))


def load_scorer(load: Callable[..., Any], scorer: ScorerSettings, policy: ModelSettings) -> Any:
    """Load a scorer's model by one of the loaders of `transferqueue.adapters.scoring`; without a path, the policy."""
    path = scorer.path or policy.path
    return load(
        path,
        dtype=policy.dtype,
        revision=revision_of(policy, path) or "",
        trust_remote_code=policy.trust_remote_code,
    )


def _after(refresh: Callable[[tq.Batch], object]) -> Turns:
    """Score all rows of a batch at once, after `refresh`."""

    def turns(batch: tq.Batch) -> Iterator[Sequence[int]]:
        refresh(batch)
        yield range(len(batch.policy_version))

    return turns


def _each_by_its_own(context: Context, newest: WeightUpdater, name: str) -> Turns:
    """Score each row with the version that it was generated with, the oldest first. A version of the critic may be
    published after that of the policy."""
    channel = context.queue.weights(name)

    def turns(batch: tq.Batch) -> Iterator[Sequence[int]]:
        for version, rows in in_turns(batch.policy_version):
            if version != newest.version:
                try:
                    weights = pull_exactly(channel, version, CRITIC_S)
                except DeadlineExceeded as error:
                    raise _never_published(newest.version, version, name) from error
                newest.apply(weights)
            yield rows

    return turns


def _synchronised(context: Context, model: Any, every: int) -> Callable[[tq.Batch], None]:
    """Return what loads the newest version of the policy before a batch, `every` versions after the last one."""
    newest = _updater(context, POLICY, model)
    newest.version = 0  # the policy at its start, which the model is

    def refresh(batch: tq.Batch) -> None:
        if int(batch.policy_version.max()) // every > newest.version // every:
            newest.follow()

    return refresh


def _updater(context: Context, channel: str, model: Any) -> WeightUpdater:
    loader = ModuleLoader(model)

    def update(source: WeightSource, version: int) -> None:
        with context.span(SWAP, version):
            loader.check(source)
            loader.load(source)

    return WeightUpdater(context.queue, channel, update)


def _followed(context: Context, channel: str, model: Any) -> WeightUpdater:
    """Load the first version of `channel` into `model`; return what loads the newest.

    Raises `DeadlineExceeded` if no first version comes.
    """
    updater = _updater(context, channel, model)
    if not updater.follow(FIRST_S):
        raise DeadlineExceeded(
            f'no weights came on channel "{channel}" within {FIRST_S:g} s; the trainer publishes them before its first '
            "step"
        )
    return updater


def _wait_for_critic(newest: WeightUpdater, version: int) -> None:
    """Wait until the critic has that version. Raises `DeadlineExceeded` if it publishes none for `CRITIC_S`."""
    while newest.version < version:
        if not newest.follow(CRITIC_S):
            raise _never_published(newest.version, version, CRITIC)


def _never_published(newest: int, version: int, name: str) -> DeadlineExceeded:
    whose, task = ("critic", TRAIN_CRITIC) if name == CRITIC else ("policy", TRAIN)
    return DeadlineExceeded(
        f"rows of version {version} wait for that version of the {whose}, which is at {newest}, and "
        f'channel "{name}" got no other for {CRITIC_S:g} s; see the log of task "{task}"'
    )
