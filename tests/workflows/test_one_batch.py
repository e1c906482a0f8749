"""Dispatch in simulation: refused input, and never later than the given order when lengths are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.given_lengths import PTL
from tests.scale import examples
from tests.workflows.one_batch import GIVEN_ORDER, Site, choose, generation_s
from transferqueue.errors import UsageError


def test_bad_settings_are_refused() -> None:
    lengths = np.array([3, 0])
    with pytest.raises(UsageError, match="length 0 is not a positive number of tokens"):
        generation_s(lengths, lengths, Site(1, 1), GIVEN_ORDER)
    with pytest.raises(UsageError, match="0 engines: give at least one"):
        generation_s(lengths[:1], lengths[:1], Site(0, 1), GIVEN_ORDER)


def test_one_instance_with_one_slot_takes_the_sum() -> None:
    lengths = np.array([5, 7, 11])
    seconds = generation_s(lengths, lengths, Site(1, 1), GIVEN_ORDER)
    assert seconds == pytest.approx(23 * PTL.token_ms(1) / 1000)


@settings(deadline=None, max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=40),
    instances=st.integers(1, 6),
    slots=st.integers(1, 12),
)
def test_with_known_lengths_it_never_loses_to_the_given_order(lengths: list[int], instances: int, slots: int) -> None:
    site, known = Site(instances, slots), np.array(lengths)
    ours = generation_s(known, known, site, choose(known, site))
    assert ours <= generation_s(known, known, site, GIVEN_ORDER) * (1 + 1e-9)
