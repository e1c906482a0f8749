"""Ratios of two policies at drawn tokens, and the weights of rows that another policy drew.

Three policies occur in an asynchronous job. *rollout* drew the tokens (``rollout_logprobs``), *old* is the policy
before the step, which a step must stay near, *current* is being trained. On fresh rows all are equal and every ratio is
1.

- Token ratio (PPO, arXiv 1707.06347): ``current / old`` at each token.
- Sequence ratio (GSPO, arXiv 2507.18071, equations 7 and 14): the geometric mean of a row's token ratios; every token
  of the row gets it, with the gradient of its own log-prob.
- Product ratio (RLOO, arXiv 2402.14740, as in TRL): the product of a row's token ratios; the response is one action.
- Truncated importance weight (Espeholt et al., IMPALA, arXiv 1802.01561): ``min(old / rollout, bound)``, a constant.
  With a clip around *old* it is decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298).

Log-ratios are held within the bounds that verl gives them, beyond which they have no gradient.
"""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from transferqueue.errors import UsageError
from transferqueue.workflows.job.algorithms.advantages import LOG_RATIO_MAX
from transferqueue.workflows.job.algorithms.responses import Responses

SEQUENCE_LOG_RATIO_MAX: Final = 10.0
"""Bound of the log of a sequence ratio, as in verl."""


def token_ratio(responses: Responses, old_logprobs_N: Tensor) -> Tensor:
    """Return ``current / old`` at each token, ``[N]``."""
    return (responses.logprobs_N - old_logprobs_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def sequence_ratio(responses: Responses, old_logprobs_N: Tensor) -> Tensor:
    """Return each row's geometric mean of ``current / old`` at its tokens, ``[N]``: by value the row's, by gradient the
    token's own."""
    logprobs_N = responses.logprobs_N
    means_R = _row_means(responses, (logprobs_N - old_logprobs_N).detach())
    own_N = logprobs_N - logprobs_N.detach()
    return (own_N + responses.over_tokens(means_R)).clamp(max=SEQUENCE_LOG_RATIO_MAX).exp()


def product_ratio(responses: Responses, old_logprobs_N: Tensor) -> Tensor:
    """Return each row's product of ``current / old`` over its tokens, ``[N]``; the gradient goes to all tokens of the
    row."""
    sums_R = responses.row_sums(responses.logprobs_N - old_logprobs_N)
    return responses.over_tokens(sums_R.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp())


def truncated_weight(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, weight_max: float) -> Tensor:
    """Return ``min(old / rollout, weight_max)``, ``[N]``, without a gradient. ``weight_max`` may be ``math.inf``.

    `UsageError` unless ``weight_max`` is at least 1: less would weigh fresh rows down too.
    """
    if math.isnan(weight_max) or weight_max < 1:
        raise UsageError(f"weight_max={weight_max} is below 1: rows of the policy itself have weight 1; give 1 or more")
    log_ratio_N = (old_logprobs_N - rollout_logprobs_N).detach().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return log_ratio_N.exp().clamp(max=weight_max)


def _row_means(responses: Responses, values_N: Tensor) -> Tensor:
    tokens_R = responses.row_sums(values_N.new_ones(len(values_N)))
    return responses.row_sums(values_N) / tokens_R.clamp(min=1)
