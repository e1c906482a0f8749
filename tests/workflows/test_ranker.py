"""Length rankers: refused input, recall at the top on prompts not seen before, refresh, and dispatch with them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.published.dispatch import RANDOM_FIFO, choose, generation_s
from transferqueue.errors import UsageError
from transferqueue.workflows.sim.simulated_job import Site
from transferqueue.workflows.streamrl.ranker import HistoryRanker, PromptRanker, as_lengths, recall

Prompts = list[list[int]]


def _prompts(count: int, seed: int, *, hard: int = 7) -> tuple[Prompts, NDArray[np.int64]]:
    """Prompts whose answers get longer with every token ``hard`` in them, and noise of a fifth."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, 400, rng.integers(5, 30)).tolist() for _ in range(count)]
    harder = rng.integers(0, 6, count)
    prompts = [ids + [hard] * int(times) for ids, times in zip(prompts, harder, strict=True)]
    lengths = 400 * np.exp(0.6 * harder + 0.2 * rng.normal(size=count))
    return prompts, lengths.astype(np.int64)


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="has seen no lengths; fit it"):
        PromptRanker().score([[1]])
    with pytest.raises(UsageError, match="one positive number of tokens a prompt"):
        PromptRanker().fit([[1], [2]], [3])
    with pytest.raises(UsageError, match="one positive number of tokens a prompt"):
        HistoryRanker().fit(["a"], [0])
    with pytest.raises(UsageError, match="weight=0 is not a positive"):
        HistoryRanker(weight=0)


@pytest.mark.slow
def test_it_finds_the_longest_of_prompts_it_has_never_seen() -> None:
    ranker = PromptRanker()
    prompts, lengths = _prompts(800, 0)
    ranker.fit(prompts, lengths.tolist())
    fresh, truth = _prompts(300, 1)
    predicted = as_lengths(ranker.score(fresh), lengths)
    assert [recall(truth, predicted, share) > 2 * share for share in (0.2, 0.1, 0.05)] == [True] * 3
    site = Site(4, 16)
    known = generation_s(truth, predicted, site, choose(predicted, site))
    assert known < generation_s(truth, predicted, site, RANDOM_FIFO)


@pytest.mark.slow
def test_recent_rows_refresh_it() -> None:
    ranker = PromptRanker()
    ranker.fit(*[list(part) for part in _prompts(400, 0)])
    moved, truth = _prompts(800, 2, hard=9)
    before = recall(truth, as_lengths(ranker.score(moved), truth), 0.2)
    ranker.fit(*[list(part) for part in _prompts(800, 3, hard=9)])
    assert recall(truth, as_lengths(ranker.score(moved), truth), 0.2) > before


def test_a_history_ranks_by_what_a_prompt_took_and_trusts_more_rows_more() -> None:
    history = HistoryRanker()
    history.fit(["short", "long", "long", "once"], [10, 1000, 1000, 1000])
    short, unknown, once, long = history.score(["short", "unknown", "once", "long"])
    assert short < unknown < once < long
    assert as_lengths(np.array([short, long]), np.array([10, 1000])).tolist() == [10, 1000]
