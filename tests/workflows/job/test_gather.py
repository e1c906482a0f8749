"""Which rows a step takes, and when: without a queue."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.scale import examples
from transferqueue.errors import UsageError
from transferqueue.workflows.job.training.gather import StepGatherer, StepShape, WantedUnits


def gatherer(units: int, **shape: object) -> StepGatherer[int]:
    return StepGatherer(StepShape(units=units, **shape))  # type: ignore[arg-type]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("at_least", [0, 5])
def test_a_request_for_no_units_or_more_than_a_step_is_refused(at_least: int) -> None:
    with pytest.raises(UsageError, match=rf"at_least={at_least} of units=4: a request takes 1 to 4 units"):
        StepShape(units=4, at_least=at_least)


def test_a_window_below_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match=r"window=0\.5: a step could never be complete"):
        StepShape(units=4, window=0.5)


# ---------------------------------------------------------------- whole and streaming steps


def test_a_whole_step_asks_for_all_and_computes_when_all_have_come() -> None:
    steps = gatherer(3, stream=False, at_least=2)
    assert steps.wanted() == WantedUnits(3, 3, None)
    steps.add(5, 5)
    assert steps.parts() == []
    steps.add(4, 4)
    steps.add(9, 9)
    assert steps.is_complete
    assert steps.parts() == [[4, 5, 9]]


def test_a_streaming_step_computes_with_what_has_come_and_asks_for_the_rest() -> None:
    steps = gatherer(4, at_least=3)
    assert steps.wanted() == WantedUnits(4, 3, None)
    for place in (7, 2, 3):
        steps.add(place, place)
    assert steps.parts() == [[2, 3, 7]]
    assert steps.parts() == []
    assert steps.wanted() == WantedUnits(1, 1, None)


def test_a_table_that_ends_makes_a_smaller_step() -> None:
    steps = gatherer(4, stream=False)
    steps.add(0, 0)
    steps.end()
    assert steps.is_complete
    assert steps.parts() == [[0]]
    steps.finish()
    assert (steps.count, steps.is_complete) == (0, False)


# ---------------------------------------------------------------- window and order


def test_a_window_is_counted_from_the_oldest_unfinished_place() -> None:
    steps = gatherer(2, window=1.5)
    assert steps.wanted().below == 3
    steps.add(1, 1)
    steps.add(2, 2)
    steps.finish()
    assert steps.wanted().below == 5  # 0, 3, 4
    assert steps.missing() == [0, 3, 4]
    steps.gone([0])
    assert steps.wanted().below == 6
    assert steps.missing() == [3, 4, 5]


def test_units_are_computed_in_order_whatever_comes_first() -> None:
    steps = gatherer(4, order="ordinal", at_least=2)
    computed = []
    for place in (3, 0, 2, 1):
        steps.add(place, place)
        computed.append(steps.parts())
    assert computed == [[], [], [], [[0, 1], [2, 3]]]


def test_a_gone_place_is_skipped_and_the_next_one_joins_the_step() -> None:
    steps = gatherer(2, order="ordinal")
    assert steps.wanted().below == 2
    steps.add(1, 1)
    assert (steps.parts(), steps.missing()) == ([], [0])
    steps.gone([0])
    assert steps.parts() == [[1]]
    assert steps.wanted() == WantedUnits(1, 1, 3)
    steps.add(2, 2)
    assert steps.parts() == [[2]]


def test_a_step_that_is_given_up_is_gathered_again() -> None:
    steps = gatherer(2, order="ordinal")
    steps.add(0, 0)
    assert steps.parts() == [[0]]
    steps.discard()
    assert steps.wanted() == WantedUnits(2, 1, 2)
    steps.add(1, 1)
    steps.add(0, 0)
    assert steps.parts() == [[0], [1]]


@settings(max_examples=examples(60))
@given(st.data())
def test_every_place_is_computed_with_once_and_in_order_the_parts_are_always_the_same(data: st.DataObject) -> None:
    """Places arrive in any order allowed by what is asked for; some are gone."""
    units, at_least = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    ordered, stream = data.draw(st.booleans()), data.draw(st.booleans())
    window = 1.0 if ordered else data.draw(st.sampled_from([1.0, 1.5, 3.0, math.inf]))
    gone = data.draw(st.sets(st.integers(0, 11), max_size=4))
    order = "ordinal" if ordered else "ready"
    steps = gatherer(units, at_least=min(at_least, units), stream=stream, order=order, window=window)
    left = [place for place in range(24) if place not in gone]
    computed: list[list[int]] = []
    while len(left) >= units:
        parts: list[list[int]] = []
        while not steps.is_complete:
            wanted = steps.wanted()
            may = [place for place in left if wanted.below is None or place < wanted.below]
            if not may:
                lost = [place for place in steps.missing() if place in gone]
                assert lost, "the step waits for nothing"
                steps.gone(lost)
                continue
            place = data.draw(st.sampled_from(may))
            left.remove(place)
            steps.add(place, place)
            if data.draw(st.booleans()):
                steps.gone([place for place in steps.missing() if place in gone])
            parts += steps.parts()
        parts += steps.parts()
        assert sum(map(len, parts)) == units
        computed += parts
        steps.finish()
    flat = [place for part in computed for place in part]
    assert len(flat) == len(set(flat))
    if ordered:
        known = [place for place in range(24) if place not in gone]
        assert flat == known[: len(flat)]
        size = min(at_least, units)
        assert [len(part) for part in computed] == [
            min(size, units - at) for _ in range(len(flat) // units) for at in range(0, units, size)
        ]
