"""The simulator over the production state machines: no promise broken, and the same course for the same seed."""

import pytest

from transferqueue.testing.simulate import sweep
from transferqueue.testing.simulator import replay_command, simulate


def test_a_seed_is_replayed_exactly():
    assert simulate(17) == simulate(17)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_promise_is_broken(first):
    broken = [(one.broken, replay_command(one.seed)) for one in map(simulate, range(first, first + 20)) if one.broken]
    assert not broken


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_seeds_with_two_hundred_thousand_faults():
    faults, broken = sweep(first=1000, seeds=2400)
    assert not [(one.broken, replay_command(one.seed)) for one in broken]
    assert faults.total() >= 200_000
