"""Losses, gradients and advantages on 200 random ragged batches against the functions of TRL (`make test-engines`) and
verl (`make test-verl`)."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest

from bench.agreement.__main__ import LIBRARIES
from bench.agreement.batches import worst_of_losses, worst_of_values

with warnings.catch_warnings(action="ignore"):  # TRL warns when it is imported beside a newer vLLM
    INSTALLED = [
        importlib.import_module(f"bench.agreement.of_{library}")
        for library in LIBRARIES
        if importlib.util.find_spec(library) is not None
    ]
if not INSTALLED:
    pytest.skip("make test-engines installs TRL, make test-verl verl", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]


def named(value: object) -> str:
    return getattr(value, "kind", str(value))


@pytest.mark.parametrize("case", [case for library in INSTALLED for case in library.CASES], ids=named)
def test_losses_and_gradients_agree(case):
    loss, gradient = worst_of_losses(case)
    assert loss < 1e-6
    assert gradient < 1e-6


@pytest.mark.parametrize("values", [values for library in INSTALLED for values in library.VALUES], ids=named)
def test_advantages_agree(values):
    assert worst_of_values(values) < 1e-6
