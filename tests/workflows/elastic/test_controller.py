"""The controller of generators: the law under constant, changing, noisy and adversarial loads."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import examples
from transferqueue.errors import Impossible, UsageError
from transferqueue.workflows.elastic.controller import (
    CALM,
    PATIENCE_MAX,
    ElasticController,
    ElasticTerms,
    StepTimes,
)

RECORDED = [0.55, 0.61, 0.58, 0.57, 1.92, 2.05, 1.88, 1.97, 2.11, 1.9, 1.95, 2.0, 0.6, 0.57, 0.55, 0.59, 0.61, 0.56]
"""Seconds of generation by one instance, of a run whose limits were longer in its middle third; training took 0.9 s."""


def times(one_s: float, training_s: float, generators: int) -> StepTimes:
    """A step of a job whose sides overlap: the longer side is the step."""
    generation_s = one_s / generators
    seconds = max(generation_s, training_s)
    return StepTimes(
        seconds=seconds,
        trainer_wait_s=seconds - training_s,
        generator_wait_s=seconds - generation_s,
        generators=generators,
    )


def run(terms: ElasticTerms, one_s: list[float], training_s: float, generators: int = 1) -> list[int]:
    """The number of generators at each step."""
    controller, counts = ElasticController(terms), []
    for seconds in one_s:
        change = controller.step(times(seconds, training_s, generators))
        generators += change.by if change else 0
        counts.append(generators)
    return counts


def opposite_changes(counts: list[int]) -> int:
    by = [after - before for before, after in itertools.pairwise(counts) if after != before]
    return sum(first == -second for first, second in itertools.pairwise(by))


def test_a_bottleneck_half_way_gets_an_instance_and_loses_it_again() -> None:
    counts = run(ElasticTerms(max=2), [each for each in RECORDED for _ in range(2)], training_s=0.9)
    assert counts[:8] == [1] * 8
    assert max(counts) == 2
    assert counts[-1] == 1
    assert opposite_changes(counts) == 1


@settings(max_examples=examples(200), deadline=None)
@given(
    one_s=st.floats(0.01, 100),
    training_s=st.floats(0.01, 100),
    threshold=st.floats(0.05, 2),
    most=st.integers(1, 8),
    begin=st.integers(1, 8),
)
def test_under_a_constant_load_no_change_is_undone(
    one_s: float, training_s: float, threshold: float, most: int, begin: int
) -> None:
    terms = ElasticTerms(max=most, threshold=threshold)
    counts = run(terms, [one_s] * 60, training_s, min(begin, most))
    assert opposite_changes(counts) == 0
    assert len(set(counts[-10:])) == 1, "it settles"
    last = counts[-1]
    gain_s = one_s / last - one_s / (last + 1)
    assert last == most or one_s / last - training_s < max(threshold * gain_s, 1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(
    loads=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 10.0]), min_size=50, max_size=600),
    patience=st.integers(1, 4),
    threshold=st.floats(0.05, 2),
)
def test_under_any_load_opposite_changes_are_few(loads: list[float], patience: int, threshold: float) -> None:
    counts = run(ElasticTerms(max=4, patience=patience, threshold=threshold), loads, training_s=1.0)
    assert opposite_changes(counts) <= math.log2(PATIENCE_MAX) + 1 + len(loads) / CALM


def test_a_load_that_always_follows_the_last_change_is_followed_ever_more_slowly() -> None:
    controller, generators, changes = ElasticController(ElasticTerms(max=2)), 1, []
    for number in range(2_000):
        adversary_s = 10.0 if generators == 1 else 0.1
        if change := controller.step(times(adversary_s, 1.0, generators)):
            generators += change.by
            changes.append(number)
    assert len(changes) <= 6 + 2_000 / PATIENCE_MAX
    assert changes[-1] - changes[-2] > 10 * (changes[1] - changes[0])


def test_steps_with_another_number_of_generators_decide_nothing() -> None:
    controller = ElasticController(ElasticTerms(max=8, patience=1))
    assert all(controller.step(times(100.0, 1.0, 1 + number % 2)) is None for number in range(10))


def test_noise_below_the_bound_changes_nothing() -> None:
    loads = [1.0 + 0.4 * math.sin(number) for number in range(300)]
    assert set(run(ElasticTerms(max=8), loads, training_s=1.0)) == {1}


def test_it_scales_to_zero_without_rows_and_comes_back_with_the_first() -> None:
    controller = ElasticController(ElasticTerms(min=0, max=2, idle_s=10.0))
    assert controller.look(0.0, rows=3, generators=1) is None
    assert controller.look(1.0, rows=0, generators=1) is None
    assert controller.look(10.9, rows=0, generators=1) is None
    gone = controller.look(11.0, rows=0, generators=1)
    assert gone is not None
    assert (gone.by, gone.why) == (-1, "no rows")
    assert controller.look(12.0, rows=0, generators=0) is None
    back = controller.look(13.0, rows=1, generators=0)
    assert back is not None
    assert (back.by, back.why) == (1, "rows wait")
    assert controller.look(24.0, rows=0, generators=1) is None, "the next time it is more patient"
    assert controller.look(34.1, rows=0, generators=1) is None
    assert controller.look(44.1, rows=0, generators=1) is not None


def test_the_last_generator_stays_while_min_is_one_or_rows_are_there() -> None:
    controller = ElasticController(ElasticTerms(min=1, max=2, idle_s=0.0))
    assert controller.look(1e9, rows=0, generators=1) is None
    controller = ElasticController(ElasticTerms(min=0, max=2, idle_s=0.0))
    assert controller.look(1.0, rows=1, generators=1) is None
    assert controller.step(times(0.001, 100.0, 1)) is None


@pytest.mark.parametrize(("generators", "by", "why"), [(5, -1, "over max"), (0, 1, "below min"), (3, 0, "")])
def test_the_number_is_brought_within_its_bounds(generators: int, by: int, why: str) -> None:
    change = ElasticController(ElasticTerms(min=1, max=4)).look(0.0, rows=1, generators=generators)
    assert (change.by, change.why) == (by, why) if change else by == 0


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ({"min": 3, "max": 2}, Impossible, r"min=3, max=2: give"),
        ({"min": -1, "max": 2}, Impossible, r"min=-1"),
        ({"max": 0, "min": 0}, Impossible, r"max=0: give 0 or more, and at least 1"),
        ({"max": 2, "threshold": 0.0}, UsageError, r"threshold=0: give more than 0 \(at 0 noise decides\)"),
        ({"max": 2, "threshold": math.nan}, UsageError, r"threshold=nan"),
        ({"max": 2, "patience": 0}, UsageError, r"patience=0"),
        ({"max": 2, "idle_s": math.inf}, UsageError, r"idle_s=inf"),
    ],
)
def test_terms_that_the_law_does_not_cover_are_refused(
    terms: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ElasticTerms(**terms)  # type: ignore[arg-type]
