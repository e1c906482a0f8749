"""Devices and processes: several shards, readers that are killed or stopped while they hold pages, and a server that
starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import served
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards
from tests.devices.late import LateDevice
from transferqueue.limits import MIB

pytestmark = pytest.mark.long

READER = """
import sys, transferqueue as tq
from tests.devices.late import LateDevice
device = LateDevice(at_once=sys.argv[2] == "at once")
with tq.connect(sys.argv[1]) as queue:
    table = queue.table("t")
    with table.lease("train", rows=8, device=device) as batch:
        batch["x"].torch()
    del batch
    print(sum(device.regions.values()), flush=True)
    sys.stdin.read()
"""


@contextmanager
def reader(address: str, when: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has leased all rows to a device and acked them; its copies are made at once, or never."""
    command = [sys.executable, "-c", READER, address, when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) >= 32 * MIB
        try:
            yield process
        finally:
            process.kill()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows(value: int) -> np.ndarray:
    return np.arange(value, value + 4 * MIB, dtype=np.int64).reshape(8, -1)


@pytest.mark.parametrize("fate", ["stopped", "killed"])
def test_memory_under_a_copy_is_not_used_again_before_its_reader_is_dead(tmp_path: Path, fate: str) -> None:
    with served(tmp_path, "512MiB") as server, tq.connect(server.ipc) as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        used = lambda: queue.stats().server.used_bytes  # noqa: E731
        table.put(x=rows(1))
        with reader(server.ipc, "never") as process:
            assert used() >= 32 * MIB, "acked, and the device has not copied"
            os.kill(process.pid, signal.SIGSTOP)
            table.put(x=rows(2))
            assert used() >= 64 * MIB, "a stopped reader keeps its bytes, and holds up nobody"
            with table.lease("train", rows=8, device=LateDevice(at_once=True)) as batch:
                assert torch.equal(batch["x"].torch(), torch.from_numpy(rows(2)))
            del batch
            os.kill(process.pid, signal.SIGCONT if fate == "stopped" else signal.SIGKILL)
            if fate == "stopped":
                assert used() >= 32 * MIB
                process.kill()
            process.wait(30)
            until(lambda: used() == 0)


def test_a_lease_to_a_device_spans_shards(tmp_path: Path) -> None:
    device = LateDevice(at_once=True)
    with served(tmp_path, "64MiB") as server, ShardProcess(server.tcp), tq.connect(server.tcp) as queue:
        await_shards(queue, 1)
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        for number in range(6):
            table.put(x=np.full((4, MIB // 8), number))
        with table.lease("train", rows=24, timeout_s=PATIENCE_S, device=device) as batch:
            assert torch.equal(batch["x"].torch(), torch.from_numpy(batch["x"].numpy()))
        assert device.direct == 24 * MIB
        assert device.registered_ever >= 2, "pages of both arenas"
