"""The defaults of each kind of algorithm: settings that a job leaves open, tasks, and columns that tasks read. No torch
here.

A kind is a row of `KINDS`. `filled` replaces the open settings of an algorithm (an empty text, 0 for a clip bound,
None) by those of its kind; `tasks_of` and `columns_of` say which tasks a job has and which columns each of them reads.
Sources of the values: the papers that `transferqueue docs losses` names for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.job import AlgorithmKind, AlgorithmSettings


@dataclass(frozen=True, kw_only=True)
class KindDefaults:
    """One kind of algorithm.

    std: divisor of a group's centred rewards. ratio: of each token, or of the whole sequence (its geometric mean over
    tokens). aggregate: the unit of the loss's mean: ``tokens``; ``rows`` of token means; ``rows_max``: rows times the
    longest response that is allowed. clip_low, clip_high: bounds of the ratio, ``[1 - clip_low, 1 + clip_high]``.
    whiten: advantages get mean 0 and deviation 1 over the batch. filter_equal: groups with equal rewards are replaced.
    compares: responses of one prompt are compared, so group_size is at least 2. tokenwise: advantages are one for each
    token (column ``token_advantages``, else ``advantages``). critic: a value model is trained. rollout: responses are
    generated (not for sft). rewarded: rows have rewards and advantages.
    """

    std: Literal["sample", "none"] = "none"
    ratio: Literal["token", "sequence"] = "token"
    aggregate: Literal["tokens", "rows", "rows_max"] = "tokens"
    clip_low: float = 0.2
    clip_high: float = 0.2
    whiten: bool = False
    filter_equal: bool = False
    compares: bool = False
    tokenwise: bool = False
    critic: bool = False
    rollout: bool = True
    rewarded: bool = True


KINDS: Final[Mapping[AlgorithmKind, KindDefaults]] = MappingProxyType(
    {
        "grpo": KindDefaults(std="sample", aggregate="rows", compares=True),
        "dr_grpo": KindDefaults(aggregate="rows_max", compares=True),
        "rloo": KindDefaults(compares=True),
        "reinforce_pp": KindDefaults(whiten=True, tokenwise=True),
        "dapo": KindDefaults(std="sample", clip_high=0.28, filter_equal=True, compares=True),
        "gspo": KindDefaults(
            std="sample", ratio="sequence", aggregate="rows", clip_low=3e-4, clip_high=4e-4, compares=True
        ),
        "ppo": KindDefaults(whiten=True, tokenwise=True, critic=True),
        "distill": KindDefaults(rewarded=False),
        "sft": KindDefaults(rollout=False, rewarded=False),
    }
)
"""Every kind of algorithm, by its name in a job file."""


def defaults_of(kind: AlgorithmKind) -> KindDefaults:
    """Return what ``kind`` implies.

    >>> defaults_of("dapo").clip_high
    0.28
    """
    return KINDS[kind]


def filled(settings: AlgorithmSettings) -> AlgorithmSettings:
    """Return ``settings`` with nothing left open. A clip_low that is set is also the clip_high, but for dapo and gspo.

    >>> algorithm = filled(AlgorithmSettings(kind="grpo", clip_low=0.1))
    >>> algorithm.std, algorithm.aggregate, algorithm.clip_high
    ('sample', 'rows', 0.1)
    """
    kind = defaults_of(settings.kind)
    wider = kind.clip_high != kind.clip_low
    return msgspec.structs.replace(
        settings,
        std=settings.std or kind.std,
        ratio=settings.ratio or kind.ratio,
        aggregate=settings.aggregate or kind.aggregate,
        clip_low=settings.clip_low or kind.clip_low,
        clip_high=settings.clip_high or (kind.clip_high if wider else settings.clip_low or kind.clip_low),
        whiten=kind.whiten if settings.whiten is None else settings.whiten,
        filter_equal=kind.filter_equal if settings.filter_equal is None else settings.filter_equal,
    )


def updates(settings: AlgorithmSettings) -> int:
    """Return how many optimizer updates a step takes."""
    return settings.epochs * settings.minibatches


def tasks_of(settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the tasks of a job with this algorithm, in the order of a row's life; evaluation apart.

    The proximal policy is scored by a task only where a step takes several updates; before the first one it is the
    trained policy itself.

    >>> tasks_of(AlgorithmSettings(kind="ppo", kl=0.05, kl_in="reward"))
    ('rollout', 'reward', 'reference', 'value', 'advantage', 'train', 'train_critic')
    """
    kind = defaults_of(settings.kind)
    wanted = {
        names.ROLLOUT: kind.rollout,
        names.REWARD: kind.rewarded,
        names.REFERENCE: settings.kl > 0,
        names.PROXIMAL: kind.rewarded and settings.old == "trainer" and updates(settings) > 1,
        names.TEACHER: settings.kind == "distill",
        names.VALUE: kind.critic,
        names.ADVANTAGE: kind.rewarded,
        names.TRAIN: True,
        names.TRAIN_CRITIC: kind.critic,
    }
    return tuple(task for task, is_wanted in wanted.items() if is_wanted)


def columns_of(settings: AlgorithmSettings) -> dict[str, tuple[str, ...]]:
    """Return the columns that tasks ``advantage``, ``train`` and ``train_critic`` read; only the tasks that the job
    has.

    ``loss_mask`` is not among them: it is read wherever it exists, in episodes and in conversations of sft.

    >>> columns_of(AlgorithmSettings(kind="grpo"))["train"]
    ('prompt_ids', 'response_ids', 'rollout_logprobs', 'advantages')
    """
    columns = {
        names.ADVANTAGE: _advantage_columns(settings),
        names.TRAIN: _train_columns(settings),
        names.TRAIN_CRITIC: ("prompt_ids", "response_ids", "values", "returns"),
    }
    tasks = tasks_of(settings)
    return {task: read for task, read in columns.items() if task in tasks}


def advantage_columns(settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the columns that task ``advantage`` gives.

    >>> advantage_columns(AlgorithmSettings(kind="ppo"))
    ('token_advantages', 'returns')
    """
    kind = defaults_of(settings.kind)
    if kind.critic:
        return ("token_advantages", "returns")
    return ("token_advantages",) if kind.tokenwise else ("advantages",)


def _advantage_columns(settings: AlgorithmSettings) -> tuple[str, ...]:
    kind = defaults_of(settings.kind)
    in_reward = settings.kl > 0 and settings.kl_in == "reward"
    reads = {
        "rewards": True,
        "response_ids": kind.tokenwise or settings.overlong_buffer > 0,
        "rollout_logprobs": in_reward and names.PROXIMAL not in tasks_of(settings),
        "prox_logprobs": in_reward and names.PROXIMAL in tasks_of(settings),
        "ref_logprobs": in_reward,
        "values": kind.critic,
    }
    return tuple(column for column, is_read in reads.items() if is_read)


def _train_columns(settings: AlgorithmSettings) -> tuple[str, ...]:
    kind = defaults_of(settings.kind)
    reads = {
        "prompt_ids": True,
        "response_ids": True,
        "rollout_logprobs": kind.rollout,
        "prox_logprobs": names.PROXIMAL in tasks_of(settings),
        "ref_logprobs": settings.kl > 0,
        "advantages": kind.rewarded and not kind.tokenwise,
        "token_advantages": kind.tokenwise,
        "teacher_ids": settings.kind == "distill",
        "teacher_logprobs": settings.kind == "distill",
        "finish_reason": settings.mask_truncated and kind.rollout,
        "routes": settings.router_replay,
    }
    return tuple(column for column, is_read in reads.items() if is_read)
