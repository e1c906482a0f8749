"""One server process for all tests of this folder, and queues on it by every way and both fronts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import transferqueue as tq
from tests.client.deployments import LoopThread, Served, served

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture(params=["embedded", "ipc", "tcp"])
def address(request: pytest.FixtureRequest) -> str | None:
    """Where to connect; None is embedded."""
    if request.param == "embedded":
        return None
    return str(getattr(request.getfixturevalue("server"), request.param))


@pytest.fixture(params=["sync", "async"])
def queue(request: pytest.FixtureRequest, address: str | None) -> Iterator[Any]:
    """A queue of either front at each kind of address."""
    if request.param == "sync":
        with tq.connect(address) as found:
            yield found
        return
    with LoopThread() as loop, loop.connect(address) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    """A table's name that no other test has."""
    return f"t{next(_numbers)}"
