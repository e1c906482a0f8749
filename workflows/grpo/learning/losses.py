"""Gains per token for rows that another policy generated, to be summed by a loss.

Three policies occur in an asynchronous job. *behaviour* drew the tokens (``rollout_logprobs``), *proximal* is the policy
that a step must stay near, *current* is being trained. On fresh rows the first two are equal, and all gains below
equal PPO's.

- PPO (arXiv 1707.06347, equation 7): ``min(r A, clip(r) A)`` with ``r = current / behaviour``. The clip is around the
  behaviour policy, so old rows leave it at once and teach nothing, or pull the policy back.
- Decoupled PPO (Hilton et al., arXiv 2110.00641, equation 4; AReaL, arXiv 2505.24298): the clip is around the proximal policy,
  ``r = current / proximal``, and ``proximal / behaviour`` is a constant weight of the token.
- Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
  training"; Espeholt et al., IMPALA, arXiv 1802.01561): that weight is cut at a bound, which trades variance for bias.

All tensors are float32 ``[rows, tokens]``, log-probs natural, advantages broadcast against them. Values at masked
positions of the inputs affect only the same positions of the result; `grpo_loss` takes the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from transferqueue.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Clip:
    """The bounds of a ratio, ``[1 - low, 1 + high]``. `UsageError` unless ``0 < low < 1`` and ``0 < high``, both finite."""

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        if not (0 < self.low < 1 and 0 < self.high < math.inf):
            raise UsageError(f"clip low={self.low} high={self.high}: give 0 < low < 1 and a finite high above 0")


def ppo_gain(logprobs_BT: Tensor, behaviour_BT: Tensor, advantages_B1: Tensor, clip: Clip) -> Tensor:
    """``min(r A, clip(r) A)`` with ``r = current / behaviour``."""
    ratio_BT = (logprobs_BT - behaviour_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - clip.low, 1 + clip.high)
    return torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)


def truncated_weight(proximal_BT: Tensor, behaviour_BT: Tensor, weight_max: float) -> Tensor:
    """``min(proximal / behaviour, weight_max)``, without a gradient. ``weight_max`` may be ``math.inf``.

    `UsageError` unless ``weight_max`` is at least 1: less would weigh fresh rows down too.
    """
    if not weight_max >= 1:
        raise UsageError(f"weight_max={weight_max} is below 1: rows of the policy itself have weight 1; give 1 or more")
    return (proximal_BT - behaviour_BT).exp().clamp(max=weight_max).detach()


def decoupled_gain(
    logprobs_BT: Tensor,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_B1: Tensor,
    clip: Clip,
    *,
    weight_max: float = math.inf,
) -> Tensor:
    """``w min(r A, clip(r) A)`` with ``r = current / proximal`` and ``w = min(proximal / behaviour, weight_max)``.

    ``proximal_BT`` is a column, computed once a step before the first update, not by the policy that is being changed; it
    gets no gradient. With ``weight_max`` this is truncated importance sampling around PPO.
    """
    weight_BT = truncated_weight(proximal_BT, behaviour_BT, weight_max)
    return weight_BT * ppo_gain(logprobs_BT, proximal_BT.detach(), advantages_B1, clip)
