"""Random ragged batches, our losses on them, and how far another library's are from ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transferqueue.adapters.trainers.learners import LossSum
from transferqueue.workflows.job.algorithms.losses import policy_loss
from transferqueue.workflows.job.algorithms.responses import Responses
from transferqueue.workflows.job.settings.job import AlgorithmSettings

TOKENS_MAX = 12
CHOICES = 5


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A batch as libraries take it: float64, padded with 0 to ``[rows, tokens]``. present: tokens that exist; mask:
    those that the loss is over."""

    present_BT: Tensor
    mask_BT: Tensor
    now_BT: Tensor
    rollout_BT: Tensor
    old_BT: Tensor
    ref_BT: Tensor
    advantages_B: Tensor
    token_advantages_BT: Tensor
    values_BT: Tensor
    old_values_BT: Tensor
    returns_BT: Tensor
    teacher_BT: Tensor
    student_logits_BTK: Tensor
    teacher_logprobs_BTK: Tensor
    rewards_B: Tensor
    group_id_B: Tensor


def draw(seed: int, *, spread: float = 0.5) -> Drawn:
    """Draw 4 to 16 rows of 1 to TOKENS_MAX tokens, a fifth of them masked but never all of a row; spread: of the
    log-ratios."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(2, 5))
    rows = groups * int(rng.integers(2, 5))
    lengths = rng.integers(1, TOKENS_MAX + 1, rows)
    present = np.arange(lengths.max()) < lengths[:, None]
    mask = present & (rng.random(present.shape) < 0.8)
    mask[np.arange(rows), lengths - 1] = True

    def near(centre: np.ndarray, scale: float) -> Tensor:
        return torch.from_numpy((centre + rng.normal(0, scale, centre.shape)) * present)

    old = rng.normal(-2, 0.7, present.shape)
    values = rng.normal(0, 1, present.shape)
    logits = rng.normal(0, 1, (*present.shape, CHOICES))
    return Drawn(
        present_BT=torch.from_numpy(present),
        mask_BT=torch.from_numpy(mask),
        now_BT=near(old, spread).requires_grad_(),
        rollout_BT=near(old, spread),
        old_BT=near(old, 0),
        ref_BT=near(old, 0.4),
        advantages_B=torch.from_numpy(rng.normal(size=rows)),
        token_advantages_BT=near(values, 1),
        values_BT=near(values, 0.3).requires_grad_(),
        old_values_BT=near(values, 0),
        returns_BT=near(values, 0.5),
        teacher_BT=near(old, 0.4),
        student_logits_BTK=torch.from_numpy(logits + rng.normal(size=logits.shape)).requires_grad_(),
        teacher_logprobs_BTK=torch.from_numpy(logits).log_softmax(-1),
        rewards_B=torch.from_numpy(rng.choice([0.0, 0.5, 1.0, 1.5], rows)),
        group_id_B=torch.arange(rows) % groups,
    )


def responses_of(drawn: Drawn, *, tokenwise: bool = False, choices: bool = False) -> Responses:
    """Return the batch as our losses take it: without padding. Gradients reach the leaves of ``drawn``."""
    there = drawn.present_BT
    advantages_BT = drawn.token_advantages_BT if tokenwise else drawn.advantages_B[:, None].expand(there.shape)
    teacher_NK = drawn.teacher_logprobs_BTK[there] if choices else drawn.teacher_BT[there][:, None]
    return Responses(
        logprobs_N=drawn.now_BT[there],
        rollout_logprobs_N=drawn.rollout_BT[there],
        old_logprobs_N=drawn.old_BT[there],
        ref_logprobs_N=drawn.ref_BT[there],
        advantages_N=advantages_BT[there],
        values_N=drawn.values_BT[there],
        old_values_N=drawn.old_values_BT[there],
        returns_N=drawn.returns_BT[there],
        teacher_logprobs_NK=teacher_NK,
        logprobs_NK=drawn.student_logits_BTK.log_softmax(-1)[there],
        mask_N=drawn.mask_BT[there],
        offsets_R1=torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)]),
    )


def policy_mean(drawn: Drawn, algorithm: AlgorithmSettings, *, tokenwise: bool = False) -> Tensor:
    """Return our loss of the batch as one number: the sum over its denominator."""
    responses = responses_of(drawn, tokenwise=tokenwise, choices=bool(algorithm.top_k))
    return mean(policy_loss(responses, algorithm, tokens_max=TOKENS_MAX))


def mean(loss: LossSum) -> Tensor:
    return loss.total / loss.weight


@dataclass(frozen=True)
class Case:
    """One loss of ours and the library's own: both of one batch, as scalars. spreads: of the log-ratios of the
    batches."""

    kind: str
    ours: Callable[[Drawn], Tensor]
    theirs: Callable[[Drawn], Tensor]
    spreads: Sequence[float] = (0.5,)


@dataclass(frozen=True)
class Values:
    """Advantages of ours and the library's own, at unmasked tokens or rows."""

    kind: str
    ours: Callable[[Drawn], Tensor]
    theirs: Callable[[Drawn], Tensor]


def worst_of_losses(case: Case, *, batches: int = 200) -> tuple[float, float]:
    """Return the worst difference in loss and in any element of a gradient, each relative to the library's where that
    is above 1."""
    differences = [_differences(case, draw(seed, spread=spread)) for seed in range(batches) for spread in case.spreads]
    return max(loss for loss, _ in differences), max(gradient for _, gradient in differences)


def worst_of_values(values: Values, *, batches: int = 200) -> float:
    """Return the worst difference of an advantage."""
    return max(_relative(values.ours(drawn), values.theirs(drawn)) for drawn in map(draw, range(batches)))


def _differences(case: Case, drawn: Drawn) -> tuple[float, float]:
    leaves = [drawn.now_BT, drawn.values_BT, drawn.student_logits_BTK]
    ours, theirs = case.ours(drawn), case.theirs(drawn)
    pairs = zip(_gradients(ours, leaves), _gradients(theirs, leaves), strict=True)
    return _relative(ours.detach(), theirs.detach()), max(_relative(found, wanted) for found, wanted in pairs)


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))
