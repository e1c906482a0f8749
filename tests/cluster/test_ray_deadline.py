"""`connect` to a deployment on Ray keeps its deadline, though Ray itself looks for a cluster that is gone for 20 s and
more."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

import transferqueue as tq

WAIT_S = 0.2
LATE_S = 10.0
"""What a busy machine may add."""


@pytest.fixture
def ray_that_looks_for_a_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the package: it joins no cluster until the test ends."""
    over = threading.Event()
    ray = types.ModuleType("ray")

    def init(**_: object) -> None:
        over.wait()
        raise ConnectionError("no cluster")

    ray.init, ray.is_initialized = init, lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    yield
    over.set()


@pytest.mark.usefixtures("ray_that_looks_for_a_cluster")
@pytest.mark.parametrize("address", ["ray", "ray://jobs/tq"])
def test_a_cluster_that_is_gone_is_told_at_the_deadline(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(tq.Unreachable, match=r"no Ray cluster reported within .* s where deployment .* is"):
        tq.connect(address, timeout_s=WAIT_S)
    assert time.monotonic() - began < WAIT_S + LATE_S
