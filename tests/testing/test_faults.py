"""The test of the tests: every planted bug is found by the simulator within a few seeds."""

import pytest

from tests.simulator import bounds, simulate
from tests.simulator.faults import FAULTS, KIND_OF, planted

SEEDS = 100


def test_each_fault_replaces_an_attribute_that_exists():
    missing = [
        (fault, name) for fault, plants in FAULTS.items() for where, name, _ in plants if not hasattr(where, name)
    ]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_planted_fault_is_caught(fault, monkeypatch):
    monkeypatch.setattr(bounds, "EVENT_S", 0.3)
    with planted(fault):
        assert any(simulate(seed, KIND_OF.get(fault, "mixed")).broken for seed in range(SEEDS))
