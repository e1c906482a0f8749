"""Prompts whose answers are as long as published: what a length ranker can learn from, made up where nothing was published.

Rules:

1. A prompt's *difficulty* is what its tokens weigh; the weights are fixed and unknown to a ranker. The length of an answer is the
   published quantile at the rank of difficulty and luck, so lengths are distributed as published, whatever the luck.
2. `LUCK` is how far apart answers to one prompt are, over how far apart prompts are. 0.25 bounds every ranker: one that knew the
   difficulty itself would have about the recall of the published 7B (0.87 of the longest fifth).
3. What a ranker learns from was observed before: `SEEN` other prompts with an answer each, and for a history `TIMES` answers to each
   of the prompts of the batch.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.workflows.sim.generation import Lengths, published_lengths
from transferqueue.workflows.sim.ranker import HistoryRanker, PromptRanker, as_lengths

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
        """Lengths of an answer to each, with the luck of ``rng``: ``[prompts]``, tokens."""
        drawn = self.difficulty + LUCK * rng.normal(size=self.difficulty.size)
        ranks = np.argsort(np.argsort(drawn / np.hypot(1, LUCK)))
        sorted_lengths = np.sort(published_lengths(max(_QUANTILES, drawn.size), np.random.default_rng(_WORDS_SEED)))
        at = (ranks + 0.5) / drawn.size
        found: Lengths = np.quantile(sorted_lengths, at, method="nearest").astype(np.int64)
        return found


def draw_prompts(count: int, rng: np.random.Generator) -> SyntheticPrompts:
    """Prompts of tokens that all are as likely."""
    weights = np.random.default_rng(_WORDS_SEED).normal(size=VOCABULARY)
    ids = rng.integers(0, VOCABULARY, (count, TOKENS))
    return SyntheticPrompts(ids, (weights[ids] - weights.mean()).sum(axis=1) / (weights.std() * np.sqrt(TOKENS)))


def trained_ranker(seed: int) -> PromptRanker:
    """A ranker that has learned from `SEEN` prompts and an answer to each. Blocks (seconds)."""
    rng = np.random.default_rng((seed, 1))
    seen = draw_prompts(SEEN, rng)
    ranker = PromptRanker(seed=seed)
    ranker.fit(seen.ids.tolist(), seen.answers(rng).tolist())
    return ranker


def by_ranker(ranker: PromptRanker, prompts: SyntheticPrompts, lengths: Lengths) -> Lengths:
    """The lengths at the ranks that the model gives to prompts it has never seen."""
    return as_lengths(ranker.score(prompts.ids.tolist()), lengths)


def by_history(prompts: SyntheticPrompts, lengths: Lengths, rng: np.random.Generator) -> Lengths:
    """The lengths at the ranks of what each prompt took `TIMES` times before."""
    history, keys = HistoryRanker(), [str(number) for number in range(len(prompts.ids))]
    for _ in range(TIMES):
        history.fit(keys, prompts.answers(rng).tolist())
    return as_lengths(history.score(keys), lengths)
