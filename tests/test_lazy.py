"""Names that are looked up late: every name of `__all__` is there, and old names work and warn."""

from importlib import import_module

import pytest

PACKAGES = [
    "transferqueue",
    "transferqueue.weights",
    "transferqueue.workflows.asyncflow",
    "transferqueue.workflows.flow",
    "transferqueue.workflows.streamrl",
]
RENAMED = [
    ("transferqueue", "Release", "DeliverPartial"),
    ("transferqueue.policies", "Release", "DeliverPartial"),
    ("transferqueue.adapters.protocols", "Part", "PartialResult"),
    ("transferqueue.adapters.protocols", "Stage", "StageFunction"),
    ("transferqueue.adapters.weights", "Follower", "WeightUpdater"),
    ("transferqueue.adapters.weights", "Relay", "WeightHandoff"),
    ("transferqueue.testing.conformance.matrix", "Record", "MatrixRecord"),
    ("transferqueue.testing.conformance.report", "Broken", "RuleBroken"),
    ("transferqueue.testing.conformance.report", "Outcome", "CheckOutcome"),
    ("transferqueue.weights", "Carrier", "RelayProcess"),
    ("transferqueue.weights", "Relay", "WeightRelay"),
    ("transferqueue.workflows.streamrl", "Stream", "CompletionStream"),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package):
    module = import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_works_and_warns(module, old, new):
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {module}.{new}"):
        assert getattr(import_module(module), old) is getattr(import_module(module), new)


@pytest.mark.parametrize("package", [*PACKAGES, "transferqueue.adapters.protocols"])
def test_a_name_that_never_was_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="has no attribute 'never_was'"):
        import_module(package).never_was  # noqa: B018
