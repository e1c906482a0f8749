"""Estimators of KL(policy || reference) from the log-probs of drawn tokens.

J. Schulman, "Approximating KL Divergence", 2020 (http://joschu.net/blog/kl-approx.html), with
``x = log(policy / reference)``:

- k1 = ``x``: unbiased, may be negative; as a loss its gradient has mean 0, so it belongs into the reward.
- k2 = ``x^2 / 2``: biased, never negative.
- k3 = ``exp(-x) + x - 1``: unbiased and never negative. TRL's and GRPO's KL term.

k3 has the bounds that verl gives it: ``x`` within 20, the estimate within 10.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from transferqueue.workflows.job.algorithms.advantages import K3_MAX, LOG_RATIO_MAX


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Return the estimate at each token, ``[N]``, with a gradient by ``logprobs_N``.

    >>> import torch
    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), "k1").tolist()
    [0.5]
    """
    log_ratio_N = logprobs_N - ref_logprobs_N
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return 0.5 * log_ratio_N.square()
    inverse_N = (-log_ratio_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return (inverse_N.exp() - inverse_N - 1).clamp(-K3_MAX, K3_MAX)
