"""Strangers who open connections without end, at each door of a server that may open few descriptors: old sessions work
on, a new client comes in, nothing spins, and what the strangers took comes back."""

import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import transferqueue as tq

DESCRIPTORS = 160
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
GREETED = _GREETING + b"\x04" + bytes([len(_READY)]) + _READY
"""What a ZeroMQ client says before its first message: a stranger that knows the way, and then is silent."""


class Few:
    """A server that may open few descriptors."""

    def __init__(self, directory):
        directory.mkdir(mode=0o700)
        self.path = f"{directory}/q.sock"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "transferqueue.server", "--address", f"ipc://{self.path}"),
                *("--tcp", "127.0.0.1:0", "--arena-bytes", "64MiB"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
        _, self.ipc, self.tcp = self.process.stdout.readline().split()

    @property
    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu_s(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.terminate()
        assert self.process.wait(20) == 0
        self.process.stdout.close()


def knock(server, door, bulk_port):
    if door == "socket file":
        stranger, where = socket.socket(socket.AF_UNIX), server.path
    else:
        port = bulk_port if door == "bulk port" else int(server.tcp.rsplit(":", 1)[1])
        stranger, where = socket.socket(), ("127.0.0.1", port)
    stranger.settimeout(20)
    stranger.connect(where)
    if door == "tcp port, greeted":
        stranger.sendall(GREETED)
    return stranger


def until(true):
    by = time.monotonic() + 30
    while not true():
        assert time.monotonic() < by
        time.sleep(0.01)


@pytest.mark.slow
def test_strangers_at_every_door_cost_old_sessions_nothing(tmp_path):
    server = Few(tmp_path / "run")
    try:
        with tq.connect(server.ipc) as near, tq.connect(server.tcp, data="remote") as far:
            table = near.create_table("t", tasks=[tq.Task("train", needs=["x"])])

            def work():
                table.put(x=[[1, 2]])
                far.table("t").put(x=[[5, 6, 7]])
                for _ in range(2):
                    with far.table("t").lease("train", rows=1, timeout_s=20) as batch:
                        assert batch["x"].list()

            work()
            before, bulk_port = server.descriptors, near.stats().server.bulk_port
            for door in ("socket file", "bulk port", "tcp port", "tcp port, greeted"):
                with ExitStack() as strangers:
                    for _ in range(2 * DESCRIPTORS):
                        strangers.enter_context(knock(server, door, bulk_port))
                    work()
                    with tq.connect(server.ipc) as new:
                        assert new.tables() == ["t"]
                    with tq.connect(server.tcp) as new:
                        assert new.tables() == ["t"]
                    spent, began = server.cpu_s, time.monotonic()
                    time.sleep(0.3)  # what is measured: that nothing happens
                    assert server.cpu_s - spent < (time.monotonic() - began) / 3, door
                    assert server.descriptors < DESCRIPTORS - 40, door
                until(lambda: server.descriptors <= before + 8)
                work()
    finally:
        server.stop()
