"""A process that may open no more files: the client, an embedded queue, the server. Each says so, and goes on when it
may."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import transferqueue as tq
from tests.client.deployments import Served, served


@contextmanager
def descriptors(left: int) -> Iterator[None]:
    """This process may open so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, before[1]))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in opened:
            os.close(descriptor)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("run"), "64MiB") as found:
        yield found


@pytest.mark.parametrize("left", [1, 2, 3, 5, 8, 13])
def test_a_client_without_descriptors_is_told_which_limit_to_raise(server: Served, left: int) -> None:
    tq.connect(server.ipc, timeout_s=20).close()  # everything is imported
    tq.connect(arena_bytes="1MiB").close()
    with descriptors(left):
        with pytest.raises(tq.UsageError, match=r"Too many open files. Raise its limit \(ulimit -n\)"):
            tq.connect(server.ipc, timeout_s=1)
        with pytest.raises(tq.UsageError, match=r"Too many open files. Raise its limit \(ulimit -n\)"):
            tq.connect(arena_bytes="1MiB")
    tq.connect(server.ipc, timeout_s=20).close()


@pytest.mark.slow
def test_a_connection_outlives_a_time_without_descriptors(server: Served) -> None:
    with tq.connect(server.ipc, timeout_s=20) as queue:
        table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"])])
        with descriptors(0):
            with pytest.raises(tq.DeadlineExceeded):
                table.lease("work", rows=1, timeout_s=5)  # its thread looks whether the server lives meanwhile
            with pytest.raises(tq.OutOfMemory, match=r"cannot be opened: Too many open files; raise the limit"):
                table.put(x=[bytes(100_000)])
        table.put(x=[bytes(100_000)])
        with table.lease("work", rows=1, timeout_s=20) as batch:
            assert len(batch["x"].list()[0]) == 100_000
        queue.drop_table("t")


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_server_without_descriptors_says_so(server: Served, more: int) -> None:
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    with tq.connect(server.ipc, timeout_s=20) as queue:
        open_files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (open_files + more, before[1]))
        try:
            with pytest.raises((tq.Full, tq.Unreachable), match="may open no more files"):
                tq.connect(server.ipc, timeout_s=1)
            assert queue.tables() == []
        finally:
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
