"""Scenario: what a small request costs, beside Redis in the same run: CPU of the server, CPU of the client, and the
time of the call.

    python -m bench.requests [transferqueue] [redis] [--rows 1 64] [--calls 200] [--rounds 9] [--peers .venv-peers]
    [--out FILE]

Ours are `put`, `lease`, `ack` and a put in a pipeline, of rows of 64 bytes over a socket file; theirs XADD of one entry
with the bytes of all these rows, XREADGROUP of that entry, XACK. Each server is a process of its own. Rounds of the two
alternate, so what else the machine does meets both. CPU is what the kernel counts for all threads of the server's
process, so it holds also while the machine is busy; times of calls do not.

Which core a process is woken on decides more than anything else, and the kernel decides that from one moment to the
next: a `send` that wakes a process on an idle core costs 20 µs on a virtual machine, and 1 µs if that process is to run
on the core of the sender (an echo server in Python: 67 and 5 µs a call). So the servers are placed on one core and the
client on another, where there are two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.harness import PEERS, Result, add_peers, save_results

SCENARIO = "requests"
ROW_BYTES = 64
VERBS = ("put", "lease", "ack")


class Store(Protocol):
    """A queue whose three verbs are called one at a time."""

    name: str
    pid: int

    def begin(self, rows: int) -> dict[str, Callable[[], object]]:
        """The verbs, for batches of so many rows."""

    def settle(self) -> None:
        """Wait until the server has nothing left to do."""

    def stop(self) -> None:
        """End its server."""


class Ours:
    name = "transferqueue"

    def __init__(self) -> None:
        import transferqueue as tq
        from bench.server import Server

        self.tq, self.server = tq, Server()
        self.pid = self.server.pid
        self.queue = tq.connect(self.server.address)
        self.pipelines: list[Any] = []

    def begin(self, rows: int) -> dict[str, Callable[[], object]]:
        task = self.tq.Task("train", needs=["x"])
        table = self.queue.create_table(
            f"rows_{rows}", tasks=[task], limits=self.tq.Limits(rows=1 << 20), exist_ok=True
        )
        values, batches, pipeline = np.zeros((rows, ROW_BYTES), np.uint8), [], self._pipeline(rows)
        return {
            "put": lambda: table.put(x=values),
            "lease": lambda: batches.append(table.lease("train", rows=rows, timeout_s=30)),
            "ack": lambda: batches.pop(0).ack(),
            "pipelined_put": lambda: pipeline.put(x=values),
        }

    def _pipeline(self, rows: int) -> Any:
        """Into a table of its own, whose rows nobody leases."""
        table = self.queue.create_table(f"pipelined_{rows}", limits=self.tq.Limits(rows=1 << 20), exist_ok=True)
        self.pipelines.append(table.pipeline().__enter__())
        return self.pipelines[-1]

    def settle(self) -> None:
        for pipeline in self.pipelines:
            pipeline.drain()

    def stop(self) -> None:
        self.queue.close()
        self.server.stop()


class Redis:
    name = "redis"

    def __init__(self) -> None:
        from bench.contenders.redis_streams import GROUP, STREAM, RedisStreams

        self.stream, self.group, self.peer = STREAM, GROUP, RedisStreams()
        self.redis = self.peer.join(self.peer.start()).redis
        self.pid = self.peer.server.pid

    def begin(self, rows: int) -> dict[str, Callable[[], object]]:
        self.redis.delete(self.stream)
        self.redis.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        entry, read = {"x": bytes(rows * ROW_BYTES)}, []

        def take() -> None:
            [(_, [(number, _)])] = self.redis.xreadgroup(
                self.group, "reader", {self.stream: ">"}, count=1, block=30_000
            )
            read.append(number)

        return {
            "put": lambda: self.redis.xadd(self.stream, entry),
            "lease": take,
            "ack": lambda: self.redis.xack(self.stream, self.group, read.pop(0)),
        }

    def settle(self) -> None:
        pass  # every call has waited for its reply

    def stop(self) -> None:
        self.redis.close()
        self.peer.stop()


def cpu_ns(pid: int | str) -> int:
    """Nanoseconds for which the threads of a process that live now have run."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def place(pid: int | str, core: int) -> None:
    """Have all threads of a process, and those that they start, run on one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), {core})


def place_apart(stores: list[Any]) -> None:
    """Place the servers on one core and this process on another, if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    for store in stores:
        place(store.pid, cores[0])
    place("self", cores[:2][-1])


def one_round(store: Store, verbs: dict[str, Callable[[], object]], calls: int) -> dict[tuple[str, str], float]:
    """The cost of each verb in seconds: CPU of the server and of this process for a call, and the median time of a
    call."""
    costs: dict[tuple[str, str], float] = {}
    for verb, call in verbs.items():
        times, server, client = [], cpu_ns(store.pid), cpu_ns("self")
        for _ in range(calls):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        store.settle()  # else the next verb would meet a busy server, and the other queue a busy core
        costs[verb, "server_cpu"] = (cpu_ns(store.pid) - server) / 1e9 / calls
        costs[verb, "client_cpu"] = (cpu_ns("self") - client) / 1e9 / calls
        costs[verb, "call"] = statistics.median(times)
    return costs


def measure(stores: list[Store], rows: int, calls: int, rounds: int) -> list[Result]:
    """Rounds of all stores in turn; the first is not counted."""
    verbs: dict[str, Any] = {store.name: store.begin(rows) for store in stores}
    raw: dict[tuple[str, str, str], list[float]] = {}
    for number in range(rounds + 1):
        for store in stores:
            for (verb, metric), cost in one_round(store, verbs[store.name], calls).items():
                if number:
                    raw.setdefault((store.name, verb, metric), []).append(cost)
    return [
        Result(SCENARIO, name, f"rows_{rows}", f"{verb}_{metric}", "s", costs)
        for (name, verb, metric), costs in raw.items()
    ]


def show(results: list[Result]) -> None:
    """Print the medians, in microseconds."""
    for result in results:
        print(
            f"{result.workload:16} {result.contender:14} {result.metric:24} {statistics.median(result.raw) * 1e6:8.1f} "
            "µs"
        )


def run(names: list[str], levels: list[int], calls: int, rounds: int) -> list[Result]:
    with ExitStack() as stack:
        stores: list[Any] = []
        for name in names:
            stores.append({"transferqueue": Ours, "redis": Redis}[name]())
            stack.callback(stores[-1].stop)
        place_apart(stores)
        return [result for rows in levels for result in measure(stores, rows, calls, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contenders", nargs="*", default=["transferqueue", "redis"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", type=Path, default=PEERS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    add_peers(chosen.peers)
    results = run(chosen.contenders, chosen.rows, chosen.calls, chosen.rounds)
    show(results)
    if chosen.out:
        save_results(chosen.out, results)


if __name__ == "__main__":
    main()
