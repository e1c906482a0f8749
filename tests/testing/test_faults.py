"""The test of the tests: every planted bug is found by the simulator within a few seeds."""

import pytest

from transferqueue.testing.faults import FAULTS, planted
from transferqueue.testing.simulator import simulate

SEEDS = 60


def test_each_fault_replaces_an_attribute_that_exists():
    missing = [
        (fault, name) for fault, plants in FAULTS.items() for where, name, _ in plants if not hasattr(where, name)
    ]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_planted_fault_is_caught(fault):
    with planted(fault):
        assert any(simulate(seed).broken for seed in range(SEEDS))
