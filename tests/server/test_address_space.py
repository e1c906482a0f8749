"""A server that runs out of address space (`ulimit -v`): by row id, nothing is done that no worker acked, and no
confirmed ack comes again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scale import sizes
from tests.server.address_space import LimitedServer, judge, work
from transferqueue.limits import MIB
from transferqueue.server.process.supervisor import EXIT_TORN

HEADROOMS = (1, 3, 6, 12, 20, 30, 40, 55, 70, 85, 100, 130)
"""MiB beside what a server has mapped when it begins. With the least, a frame cannot be read; with the most, two puts
of five are accepted."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", sizes(3, len(HEADROOMS)))
@pytest.mark.parametrize("level", ["memory", "process", "disk"])
def test_what_ran_out_of_memory_is_refused_or_ends_the_server_and_no_row_is_wrong(
    level: str, count: int, tmp_path: Path
) -> None:
    for number, headroom in enumerate(HEADROOMS[:: len(HEADROOMS) // count]):
        directory = tmp_path / str(number)
        directory.mkdir(mode=0o700)
        server = LimitedServer(directory, level)
        try:
            _check(server, level, headroom)
        finally:
            server.process.kill()
            server.process.wait()


def _check(server: LimitedServer, level: str, headroom: int) -> None:
    out = work(server, headroom * MIB, rows=300_000, at_once=15_000)
    assert out.refused or out.ended is not None, f"{headroom} MiB were enough"
    assert all("memory of the server process is exhausted" in text for text in out.refused)
    if out.ended is not None:
        assert out.ended == EXIT_TORN
        assert "memory" in server.process.communicate()[1].lower()
    elif level != "memory":
        server.stop(signal.SIGKILL)
    if level != "memory":
        server.start()
    elif out.ended is not None:
        return
    server.limit(None)
    wrong = judge(server, out)
    assert not wrong, f"{headroom} MiB: {wrong}"
    assert server.stop(signal.SIGTERM)[0] == 0
