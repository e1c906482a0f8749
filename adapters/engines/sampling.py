"""Drawing tokens from logits, with each token's log-probability under the distribution that it was drawn from.

Each row has its own random numbers (`RowDraws`), one for each token: its draws depend on its seed and logits, never on
the rows beside it, and a response continued elsewhere draws as it would have without the interruption.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from transferqueue.adapters.protocols import Sampling

_BITS: Final = 29
"""Bits of a random number. Times a float32 sum of probabilities it is exact in float64, so it stays below that sum."""
_AHEAD: Final = 64


class RowDraws:
    """Random numbers in [0, 1) of one row, by the token's place: Philox (Salmon et al. 2011), keyed by the seed. seed:
    None draws one."""

    def __init__(self, seed: int | None, *, drawn: int = 0) -> None:
        self._bits = np.random.Generator(np.random.Philox(seed))
        self._numbers: list[int] = self._bits.integers(0, 1 << _BITS, size=drawn + _AHEAD).tolist()
        self._at = drawn

    def next(self) -> float:
        """Return the number of the row's next token."""
        if self._at == len(self._numbers):
            self._numbers, self._at = self._bits.integers(0, 1 << _BITS, size=_AHEAD).tolist(), 0
        self._at += 1
        return self._numbers[self._at - 1] * 2.0**-_BITS


def draw(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token a row. Temperature 0 takes the most likely token, with log-probability 0.

    Args:
        logits_BV: ``[rows, vocabulary]``.
        sampling: temperature and top_p.
        generator: torch's source of random numbers, on the device of the logits.

    Returns:
        Ids int64 ``[rows]`` and log-probabilities float32 ``[rows]``.
    """
    numbers_B = torch.randint(0, 1 << _BITS, logits_BV.shape[:1], generator=generator, device=logits_BV.device)
    return draw_by(logits_BV, sampling, numbers_B.double() * 2.0**-_BITS)


def draw_by(logits_BV: Tensor, sampling: Sampling, numbers_B: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` with the rows' own random numbers, float64 ``[rows]`` in [0, 1), by inversion.

    A row gets the first token at which the sum of the probabilities exceeds its number.
    """
    if sampling.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, torch.zeros_like(tokens_B, dtype=torch.float32)
    logprobs_BV = log_distribution(logits_BV, sampling)
    sums_BV = logprobs_BV.exp().cumsum(-1).double()
    tokens_B1 = torch.searchsorted(sums_BV, numbers_B[:, None] * sums_BV[:, -1:], right=True)
    return tokens_B1[:, 0], logprobs_BV.gather(-1, tokens_B1)[:, 0]


def log_distribution(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probabilities ``[rows, vocabulary]`` after temperature and nucleus sampling (Holtzman et al. 2020,
    section 3.1).

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
