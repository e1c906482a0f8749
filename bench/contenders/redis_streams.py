"""Redis streams over a Unix socket: one entry a batch, one field a column, a consumer group that acknowledges."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import redis

from bench.contenders.arrays import Arrays, arrays, some_rows
from bench.workloads import Bytes, Counts, Flat, Workload

STREAM, GROUP = "batches", "train"


class RedisEndpoint:
    ordered = True

    def __init__(self, address: str) -> None:
        self.redis = redis.Redis(unix_socket_path=address)

    def begin(self, workload: Workload) -> None:
        self.workload = workload

    def prepare(self, columns: Mapping[str, Flat]) -> Arrays:
        return arrays(columns)

    def put(self, prepared: Arrays) -> None:
        entry: dict[str, Any] = {}
        for name, (values, counts) in prepared.items():
            entry[name], entry[f"{name}.counts"] = memoryview(values), memoryview(counts).cast("B")
        self.redis.xadd(STREAM, entry)

    def get(self, ticket: Any, rows: list[int] | None) -> Any:
        [(_, [(entry, found)])] = self.redis.xreadgroup(GROUP, "reader", {STREAM: ">"}, count=1, block=60_000)
        got = {name: self._column(found, name) for name in self.workload.names}
        return entry, some_rows(got, self.workload.wanted, rows)

    def _column(self, found: Mapping[bytes, bytes], name: str) -> tuple[Bytes, Counts]:
        values, counts = found[name.encode()], found[f"{name}.counts".encode()]
        return np.frombuffer(values, np.uint8), np.frombuffer(counts, np.int64)

    def flat(self, got: Any, name: str) -> tuple[Bytes, Counts]:
        return got[1][name]

    def finish(self, ticket: Any, got: Any) -> None:
        self.redis.xack(STREAM, GROUP, got[0])
        self.redis.xdel(STREAM, got[0])

    def close(self) -> None:
        self.redis.close()


class RedisStreams:
    name = "redis"
    waits = True

    def start(self) -> str:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-redis-"))
        socket = str(self.folder / "redis.sock")
        options = ["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        self.server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        self._ready(socket)
        return socket

    def _ready(self, socket: str) -> None:
        client, until = redis.Redis(unix_socket_path=socket), time.perf_counter() + 10
        while True:
            try:
                client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
            except redis.exceptions.ConnectionError:
                if time.perf_counter() > until:
                    raise
                time.sleep(0.02)
            else:
                return

    def join(self, address: str) -> RedisEndpoint:
        return RedisEndpoint(address)

    def stop(self) -> None:
        self.server.terminate()
        self.server.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def unsupported(self, workload: Workload) -> str:
        return "a value holds at most 512 MB" if workload.nbytes // workload.fields > 500 << 20 else ""


def make(name: str) -> RedisStreams:
    return RedisStreams()
