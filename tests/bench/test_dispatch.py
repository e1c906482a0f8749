"""Dispatch in simulation: refused input, and never later than the given order when lengths are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.published.dispatch import RANDOM_FIFO, Site, choose, generation_s, ptl_s, published_lengths, ranked
from tests.scale import examples
from transferqueue.errors import UsageError
from transferqueue.workflows.dispatch.ranker_accuracy import recall


def test_bad_settings_are_refused() -> None:
    lengths = np.array([3, 0])
    with pytest.raises(UsageError, match="length 0 is not a positive number of tokens"):
        generation_s(lengths, lengths, Site(1, 1), RANDOM_FIFO)
    with pytest.raises(UsageError, match="0 engines: give at least one"):
        generation_s(lengths[:1], lengths[:1], Site(0, 1), RANDOM_FIFO)


def test_one_instance_with_one_slot_takes_the_sum() -> None:
    lengths = np.array([5, 7, 11])
    assert generation_s(lengths, lengths, Site(1, 1), RANDOM_FIFO) == pytest.approx(23 * ptl_s(1))


def test_the_published_lengths_and_an_oracle() -> None:
    lengths = published_lengths(20_000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(4928, rel=0.03)
    assert recall(lengths, ranked(lengths, 0.0, np.random.default_rng(0)), 0.05) == 1.0


@settings(deadline=None, max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=40),
    instances=st.integers(1, 6),
    slots=st.integers(1, 12),
)
def test_with_known_lengths_it_never_loses_to_the_given_order(lengths: list[int], instances: int, slots: int) -> None:
    site, known = Site(instances, slots), np.array(lengths)
    ours = generation_s(known, known, site, choose(known, site))
    assert ours <= generation_s(known, known, site, RANDOM_FIFO) * (1 + 1e-9)
