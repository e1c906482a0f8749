from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from transferqueue.storage.memory.intervals import Intervals

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=30)


@given(steps=STEPS, low=st.integers(0, 30), high=st.integers(0, 30))
def test_intervals_are_the_set_of_their_points(steps: list[tuple[bool, int, int]], low: int, high: int) -> None:
    intervals, points = Intervals(), set[int]()
    for add, start, end in steps:
        (intervals.add if add else intervals.remove)(start, end)
        points = points | set(range(start, end)) if add else points - set(range(start, end))
        assert intervals.total == len(points)
    gaps = intervals.gaps(low, high)
    assert {point for start, end in gaps for point in range(start, end)} == set(range(low, high)) - points
    assert all(start < end for start, end in gaps)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(gaps))
