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


@pytest.fixture(params=["embedded", "ipc", "tcp", "remote"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How to connect: arguments of `connect`. "remote" is tcp, with the bytes over the network too."""
    if request.param == "embedded":
        return {"address": None}
    if request.param == "remote":
        return {"address": request.getfixturevalue("server").tcp, "data": "remote"}
    return {"address": str(getattr(request.getfixturevalue("server"), request.param))}


@pytest.fixture
def address(way: dict[str, Any]) -> str | None:
    """Where to connect; None is embedded."""
    return way["address"]


@pytest.fixture(params=["sync", "async"])
def queue(request: pytest.FixtureRequest, way: dict[str, Any]) -> Iterator[Any]:
    """A queue of either front, connected in each way."""
    if request.param == "sync":
        with tq.connect(**way) as found:
            yield found
        return
    with LoopThread() as loop, loop.connect(**way) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    """A table's name that no other test has."""
    return f"t{next(_numbers)}"
