"""A process that may open no more files: whoever connects gets an error that says so, and the process lives."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import transferqueue as tq
from tests.client.deployments import in_this_process
from transferqueue.transport import dial
from transferqueue.transport.system.descriptors import CONNECTION_DESCRIPTORS, check_descriptors


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open so many more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    filled = list[int]()
    try:
        while not filled or filled[-1] <= highest:
            filled.append(os.eventfd(0, os.EFD_CLOEXEC))
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + count, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in filled:
            os.close(descriptor)


@pytest.mark.parametrize("left", range(CONNECTION_DESCRIPTORS + 4))
def test_a_channel_is_opened_or_refused(left: int) -> None:
    with descriptors_left(left):
        if left < CONNECTION_DESCRIPTORS + 2:  # two are opened before ZeroMQ's
            with pytest.raises(tq.UsageError, match="ulimit -n"):
                dial("tcp://127.0.0.1:9")
        else:
            dial("tcp://127.0.0.1:9").close()


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_a_session_without_descriptors_is_refused_and_leaves_nothing(way: str, tmp_path: Path) -> None:
    with in_this_process(way, tmp_path) as address:
        with descriptors_left(CONNECTION_DESCRIPTORS - 1), pytest.raises(tq.UsageError, match="ulimit -n"):
            tq.connect(address)
        with tq.connect(address) as queue:
            assert queue.tables() == []


def test_a_check_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    check_descriptors("this test")
    with descriptors_left(3), pytest.raises(tq.UsageError):
        check_descriptors("this test")
    assert os.listdir("/proc/self/fd") == before
