"""`multiprocessing.Queue`: what Python gives for free. A batch is pickled into a pipe and unpickled on the other
side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

from bench.contenders.arrays import Arrays, arrays, some_rows
from bench.workloads import Bytes, Counts, Flat, Workload


class MpQueueEndpoint:
    ordered = True

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def begin(self, workload: Workload) -> None:
        self.workload = workload

    def prepare(self, columns: Mapping[str, Flat]) -> Arrays:
        return arrays(columns)

    def put(self, prepared: Arrays) -> None:
        self.queue.put(prepared)

    def get(self, ticket: Any, rows: list[int] | None) -> Arrays:
        return some_rows(self.queue.get(timeout=60), self.workload.wanted, rows)

    def flat(self, got: Arrays, name: str) -> tuple[Bytes, Counts]:
        return got[name]

    def finish(self, ticket: Any, got: Arrays) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self.queue.close()


class MpQueue:
    name = "mp-queue"
    waits = True

    def start(self) -> Any:
        return multiprocessing.get_context("spawn").Queue()

    def join(self, address: Any) -> MpQueueEndpoint:
        return MpQueueEndpoint(address)

    def stop(self) -> None:
        """Nothing runs."""

    def unsupported(self, workload: Workload) -> str:
        return ""


def make(name: str) -> MpQueue:
    return MpQueue()
