"""A client over tcp learns of a killed server from the host of the server, as a client of a socket file learns from the
kernel."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from typing import Literal

import pytest

import transferqueue as tq
from tests.client.deployments import Served
from tests.client.test_connection import Caller
from tests.client.test_restart import Supervised, free_port
from transferqueue.limits import SERVER_GONE_S, SESSION_SILENCE_S

TASKS = [tq.Task("train", needs=["x"])]


@pytest.mark.slow
@pytest.mark.parametrize("data", ["auto", "remote"])
def test_the_clients_of_a_killed_server_learn_of_it_over_tcp(data: Literal["auto", "remote"], tmp_path: Path) -> None:
    server = Served(tmp_path, "64MiB")
    with tq.connect(server.tcp, data=data) as queue:
        table = queue.create_table("t", tasks=TASKS)
        waiting = Caller(lambda: table.lease("train", rows=1, timeout_s=100))
        server.process.kill()
        _end(server.process)
        began = time.monotonic()
        assert isinstance(waiting.outcome(), tq.Disconnected)
        assert str(waiting.outcome()) == f"the server at {server.tcp} is gone; start it, and connect again"
        assert time.monotonic() - began < SESSION_SILENCE_S
        with pytest.raises(tq.Disconnected, match="is gone"):
            table.put(x=[1])


@pytest.mark.slow
def test_an_event_loop_that_goes_on_calling_learns_of_it_too(tmp_path: Path) -> None:
    async def work(server: Served) -> tq.TransferQueueError:
        async with tq.aconnect(server.tcp) as queue:
            table = await queue.create_table("t", tasks=TASKS)
            server.process.kill()
            _end(server.process)
            began = time.monotonic()
            while time.monotonic() - began < SESSION_SILENCE_S:
                try:
                    await table.lease("train", rows=1, timeout_s=0.01)
                except tq.DeadlineExceeded:
                    await asyncio.sleep(
                        0.05
                    )  # the I/O thread looks at what was given up, and the next call finds it idle
                except tq.PeerError as error:
                    return error
            raise AssertionError("it goes on")

    assert "is gone" in str(asyncio.run(work(Served(tmp_path, "64MiB"))))


@pytest.mark.slow
def test_a_durable_server_may_be_away_for_longer(tmp_path: Path) -> None:
    place = f"127.0.0.1:{free_port()}"
    with (
        Supervised(tmp_path, "process", "--tcp", place, supervise=False) as server,
        tq.connect(f"tcp://{place}") as queue,
    ):
        table = queue.create_table("t", tasks=TASKS)
        server.kill()
        _end(server.process)
        with pytest.raises(tq.DeadlineExceeded, match="did not answer"):
            table.lease("train", rows=1, timeout_s=3 * SERVER_GONE_S)
        server.start("--tcp", place)
        table.put(x=[7])
        with table.lease("train", rows=1) as batch:
            assert batch["x"].list() == [7]


def _end(process: subprocess.Popen[str]) -> None:
    process.wait(20)
    assert process.stdout is not None
    process.stdout.close()
