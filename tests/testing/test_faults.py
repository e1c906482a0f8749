"""The test of the tests: every planted bug is found by the simulator within a few seeds."""

import pytest

from transferqueue.testing.faults import FAULTS, planted
from transferqueue.testing.simulator import simulate

SEEDS = 60


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_planted_fault_is_caught(fault):
    with planted(fault):
        assert any(simulate(seed).broken for seed in range(SEEDS))
