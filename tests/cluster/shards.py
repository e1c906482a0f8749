"""Shards as processes, beside a server that is one too."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import AbstractContextManager

import transferqueue as tq
from transferqueue.wire.answers.stats import ShardStats

PATIENCE_S = 30.0


class ShardProcess(AbstractContextManager["ShardProcess"]):
    """`transferqueue shard` at an address, until it ends or is killed."""

    def __init__(self, address: str, *options: str, arena_bytes: str = "256MiB") -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "transferqueue.cli",
                "shard",
                "--join",
                address,
                "--arena-bytes",
                arena_bytes,
                *options,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready, self.endpoint = self.process.stdout.readline().split()
        assert ready == "ready"

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout=PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def shards(queue: tq.Queue) -> list[ShardStats]:
    """What the server says of its remote shards."""
    return queue.stats().server.shards


def await_shards(queue: tq.Queue, count: int) -> list[ShardStats]:
    """All of them, once there are `count`, each with pages to lend."""
    deadline = time.monotonic() + PATIENCE_S
    while not (len(found := shards(queue)) == count and all(one.backed_bytes for one in found)):
        assert time.monotonic() < deadline, found
    return found
