"""A wall clock that is set back or forward between two servers at one address; nothing but the first epoch reads it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import transferqueue as tq
from tests.scale import only_long

HOUR_NS = 3600 * 10**9
SHIFTED = """
import runpy, sys, time
now_ns = time.time_ns
time.time_ns = lambda: now_ns() + {shift}
time.time = lambda: time.time_ns() / 1e9
sys.argv = ["transferqueue.server", *sys.argv[1:]]
runpy.run_module("transferqueue.server", run_name="__main__")
"""


def serve(address: str, shift: int, *options: str) -> subprocess.Popen[str]:
    """A server process whose wall clock is `shift` nanoseconds off."""
    server = subprocess.Popen(
        [sys.executable, "-c", SHIFTED.format(shift=shift), *options, "--arena-bytes", "64MiB", "--address", address],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline().split()[:1] == ["ready"]
    return server


def end(server: subprocess.Popen[str], how: signal.Signals) -> None:
    server.send_signal(how)
    server.wait(timeout=20)
    assert server.stdout is not None
    server.stdout.close()


def waiting(table: tq.Table) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits for a row, and the error that ends its wait."""
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            table.lease("train", rows=1, timeout_s=60).release()
        except tq.TransferQueueError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, errors


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-HOUR_NS, *only_long(HOUR_NS)], ids=["back", "forward"])
def test_a_new_server_is_heard_though_the_clock_was_set(tmp_path: Path, shift: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    server = serve(address, 0)
    queue = tq.connect(address, timeout_s=20)
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    thread, errors = waiting(table)
    end(server, signal.SIGKILL)
    server = serve(address, shift)
    try:
        thread.join(timeout=20)
        assert not thread.is_alive(), "the client drops what the new server answers"
        (error,) = errors
        assert isinstance(error, tq.Disconnected), error
        queue.close()
        with tq.connect(address, timeout_s=20) as again:
            assert again.tables() == []
    finally:
        end(server, signal.SIGTERM)


@pytest.mark.slow
def test_a_durable_server_goes_on_though_the_clock_was_set_back(tmp_path: Path) -> None:
    options = ("--durability", "process", "--state", str(tmp_path / "state"))
    address = f"ipc://{tmp_path}/run/q.sock"
    server = serve(address, 0, *options)
    with tq.connect(address, timeout_s=20) as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        thread, errors = waiting(table)
        end(server, signal.SIGKILL)
        server = serve(address, -HOUR_NS, *options)
        try:
            table.put(x=[1])
            thread.join(timeout=20)
            assert not thread.is_alive()
            assert not errors
        finally:
            queue.close()
            end(server, signal.SIGTERM)
