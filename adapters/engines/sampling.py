"""Drawing tokens from logits, with each token's log-probability under the distribution that it was drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from transferqueue.adapters.protocols import Sampling


def draw(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token a row. Return ids int64 ``[rows]`` and log-probabilities float32 ``[rows]``.

    Temperature 0 takes the most likely token, with log-probability 0.
    """
    if sampling.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, torch.zeros_like(tokens_B, dtype=torch.float32)
    logprobs_BV = log_distribution(logits_BV, sampling)
    tokens_B = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)[:, 0]
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def log_distribution(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probabilities ``[rows, vocabulary]`` after temperature and nucleus sampling (Holtzman et al. 2020, section 3.1).

    Tokens outside the nucleus have -inf.
    """
    logprobs_BV = (logits_BV.float() / sampling.temperature).log_softmax(-1)
    if sampling.top_p >= 1:
        return logprobs_BV
    sorted_BV, order_BV = logprobs_BV.sort(-1, descending=True)
    probabilities_BV = sorted_BV.exp()
    before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    sorted_BV = sorted_BV.masked_fill(before_BV >= sampling.top_p, -torch.inf).log_softmax(-1)
    return torch.empty_like(logprobs_BV).scatter_(-1, order_BV, sorted_BV)
