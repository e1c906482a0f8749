"""Synthetic prompts whose answers have the lengths digitised from StreamRL's figure 7, for a length ranker to learn
from. StreamRL published no prompts.

Rules:

1. A prompt's *difficulty* is the sum of fixed weights of its tokens, which a ranker does not know. The length of an
   answer is the published quantile at the rank of difficulty plus luck, so lengths are distributed as published,
   whatever the luck.
2. `LUCK` is the deviation of answers to one prompt over the deviation of prompts. 0.25 bounds every ranker: one that
   knew the difficulty itself would have about the recall of the published 7B (0.87 of the longest fifth).
3. A ranker learns from earlier observations: `SEEN` other prompts with an answer each. A history learns from `TIMES`
   answers to each prompt of the batch.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.published.dispatch import published_lengths
from transferqueue.workflows.dispatch.ranker import LengthRanker
from transferqueue.workflows.planner.engine_times import Lengths

LUCK: Final = 0.25
SEEN: Final = 4096
TIMES: Final = 4
TOKENS: Final = 32
VOCABULARY: Final = 256
_WORDS_SEED: Final = 7
_QUANTILES: Final = 20_000


class SyntheticPrompts(msgspec.Struct, frozen=True):
    """Token ids ``[prompts, TOKENS]``, and the difficulty of each, of mean 0 and variance 1: ``[prompts]``."""

    ids: NDArray[np.int64]
    difficulty: NDArray[np.float64]

    def answers(self, rng: np.random.Generator) -> Lengths:
        """Draw the length of an answer to each prompt, with luck from `rng`: ``[prompts]``, tokens."""
        lucky = self.difficulty + LUCK * rng.normal(size=self.difficulty.size)
        ranks = np.argsort(np.argsort(lucky / np.hypot(1, LUCK)))
        sorted_lengths = np.sort(published_lengths(max(_QUANTILES, lucky.size), np.random.default_rng(_WORDS_SEED)))
        at = (ranks + 0.5) / lucky.size
        lengths: Lengths = np.quantile(sorted_lengths, at, method="nearest").astype(np.int64)
        return lengths


def draw_prompts(count: int, rng: np.random.Generator) -> SyntheticPrompts:
    """Draw prompts of uniformly distributed tokens."""
    ids = rng.integers(0, VOCABULARY, (count, TOKENS))
    return SyntheticPrompts(ids, difficulty_of(ids))


def difficulty_of(ids: NDArray[Any]) -> NDArray[np.float64]:
    """Return the difficulty of prompts of token ids ``[..., tokens]``: ``[...]``."""
    weights = np.random.default_rng(_WORDS_SEED).normal(size=VOCABULARY)
    found: NDArray[np.float64] = (weights[ids % VOCABULARY] - weights.mean()).sum(axis=-1)
    return found / (weights.std() * np.sqrt(ids.shape[-1]))


def trained_ranker(seed: int) -> LengthRanker:
    """Train the live ranker on `SEEN` prompts and an answer to each."""
    rng = np.random.default_rng((seed, 1))
    seen = draw_prompts(SEEN, rng)
    ranker = LengthRanker()
    ranker.observe(list(seen.ids), seen.answers(rng))
    ranker.refit()
    return ranker


def as_lengths(scores: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn scores ``[rows]`` into tokens int64 ``[rows]``: a row gets the quantile of the observed `lengths` at its
    rank."""
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    at = (ranks + 0.5) / len(scores)
    predicted: NDArray[np.int64] = np.quantile(lengths, at, method="nearest").astype(np.int64)
    return predicted


def by_ranker(ranker: LengthRanker, prompts: SyntheticPrompts, lengths: Lengths) -> Lengths:
    """Predict lengths by the ranks of the model, which has not seen these prompts: ``[prompts]``, tokens."""
    return as_lengths(ranker.predict(list(prompts.ids)).astype(np.float64), lengths)


def by_history(prompts: SyntheticPrompts, lengths: Lengths, rng: np.random.Generator) -> Lengths:
    """Predict lengths by a ranker that has seen `TIMES` answers to each of these prompts and nothing else:
    ``[prompts]``, tokens."""
    ranker = LengthRanker()
    for _ in range(TIMES):
        ranker.observe(list(prompts.ids), prompts.answers(rng))
    ranker.refit()
    return by_ranker(ranker, prompts, lengths)
