"""The length ranker and its judge: refused input, recall on prompts not seen before, history, drift, bounded memory,
and dispatch with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.workflows.one_batch import GIVEN_ORDER, Site, as_lengths, choose, generation_s
from transferqueue.errors import UsageError
from transferqueue.workflows.dispatch.ranker import LengthRanker
from transferqueue.workflows.dispatch.ranker_accuracy import PROMPTS_MIN, accuracy_of, recall

Prompts = list[list[int]]


def _prompts(count: int, seed: int, *, hard: int = 7) -> tuple[Prompts, NDArray[np.int64]]:
    """Prompts whose answers get longer with every token ``hard`` in them, and noise of a fifth."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, 400, rng.integers(5, 30)).tolist() for _ in range(count)]
    harder = rng.integers(0, 6, count)
    prompts = [ids + [hard] * int(times) for ids, times in zip(prompts, harder, strict=True)]
    lengths = 400 * np.exp(0.6 * harder + 0.2 * rng.normal(size=count))
    return prompts, lengths.astype(np.int64)


def _fitted(prompts: Prompts, lengths: NDArray[np.int64], ranker: LengthRanker | None = None) -> LengthRanker:
    ranker = ranker or LengthRanker()
    ranker.observe(prompts, lengths)
    ranker.refit()
    return ranker


def test_bad_input_is_refused_and_changes_nothing() -> None:
    ranker = LengthRanker()
    with pytest.raises(UsageError, match="has seen no lengths; let it observe"):
        ranker.refit()
    with pytest.raises(UsageError, match="not been fitted; call refit"):
        ranker.predict([[1]])
    for lengths in ([3], [3, 0], [3, float("nan")]):
        with pytest.raises(UsageError, match="one positive number of tokens a prompt"):
            ranker.observe([[1], [2]], lengths)
    with pytest.raises(UsageError, match="prompts_max=0 is not a positive"):
        LengthRanker(prompts_max=0)
    with pytest.raises(UsageError, match="are not a ranker with 770 features"):
        LengthRanker.restored({"products": np.zeros(3)})
    assert (ranker.rows, ranker.version) == (0, 0)


def test_it_finds_the_longest_of_prompts_it_has_never_seen() -> None:
    prompts, lengths = _prompts(800, 0)
    ranker = _fitted(prompts, lengths)
    fresh, truth = _prompts(300, 1)
    predicted = ranker.predict(fresh)
    assert [recall(truth, predicted, share) > 2 * share for share in (0.2, 0.1, 0.05)] == [True] * 3
    assert accuracy_of(np.arange(300), predicted, truth).skilled
    site, ranked = Site(4, 16), as_lengths(predicted.astype(float), truth)
    known = generation_s(truth, ranked, site, choose(ranked, site))
    assert known < generation_s(truth, ranked, site, GIVEN_ORDER)


def test_recent_rows_refresh_it() -> None:
    ranker = _fitted(*_prompts(400, 0))
    moved, truth = _prompts(800, 2, hard=9)
    before = recall(truth, ranker.predict(moved), 0.2)
    _fitted(*_prompts(800, 3, hard=9), ranker)
    assert recall(truth, ranker.predict(moved), 0.2) > before
    assert ranker.version == 2


def test_a_history_ranks_by_what_a_prompt_took_and_trusts_more_rows_more() -> None:
    same = [1, 2, 3]  # the model sees equal prompts, but for the order
    ranker = _fitted([[1, 2, 3], [3, 2, 1], [3, 2, 1], [2, 1, 3]], np.array([10, 1000, 1000, 1000]))
    short, unknown, once, long = ranker.predict([same, [3, 1, 2], [2, 1, 3], [3, 2, 1]])
    assert short < unknown < once < long


def test_a_prompt_whose_answers_grew_is_noticed() -> None:
    ranker = _fitted([[5, 6]] * 500, np.full(500, 10))
    grown = _fitted([[5, 6]] * 64, np.full(64, 1000), ranker)
    assert grown.predict([[5, 6]])[0] > 300


def test_its_memory_is_bounded_and_it_goes_on_where_it_was_saved() -> None:
    ranker = LengthRanker(prompts_max=10)
    prompts, lengths = _prompts(50, 0)
    _fitted(prompts, lengths, ranker)
    arrays = ranker.saved()
    assert arrays["history"].shape == (10, 2)
    again = LengthRanker.restored(arrays, prompts_max=10)
    assert again.predict(prompts).tolist() == ranker.predict(prompts).tolist()
    assert (again.rows, again.version) == (50, 1)


# ---------------------------------------------------------------- skill


def test_chance_has_no_skill_and_too_few_prompts_have_none_yet() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, 400)
    assert not accuracy_of(np.arange(400), rng.permutation(lengths), lengths).skilled
    few = np.arange(1, PROMPTS_MIN)
    assert not accuracy_of(few, few, few).skilled
    assert accuracy_of(few, few, few).why() == "19 of 20 prompts seen"
    assert accuracy_of(few[:0], few[:0], few[:0]).rows == 0


def test_about_one_test_in_a_hundred_calls_chance_skill() -> None:
    rng = np.random.default_rng(1)
    lengths = np.arange(100)
    skilled = sum(accuracy_of(lengths, rng.permutation(100), lengths).skilled for _ in range(1000))
    assert skilled <= 25


def test_rows_of_a_prompt_count_as_one_test() -> None:
    prompts = np.repeat(np.arange(10), 40)  # 400 rows, 10 prompts
    assert not accuracy_of(prompts, prompts, prompts).skilled


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_recall_is_a_share_and_one_for_an_oracle(lengths: list[int], random: object) -> None:
    actual = np.array(lengths)
    for share in (0.2, 0.1, 0.05):
        assert recall(actual, actual, share) == 1.0
        assert 0.0 <= recall(actual, actual[::-1], share) <= 1.0
