"""Scenario: a thousand sessions that work, all after the same few rows. Is everyone served, how soon, in what memory?

    python -m bench.sessions --clients 1000 --rate 500 --seconds 200 --echo-seconds 20 --record --out FILE

Rows come at a fixed rate, well under what the server carries, a few each 50 ms, one at a time to whoever waits longest:
so every session is parked at the server nearly always, and what is measured is the waking, not a queue in front of it.
Each row carries the moment of its put. Measured: put to delivered, and to the answer of the ack, for each window of the
run, so that growth with time is seen; how many rows each session got (and Jain's index of that: 1 is all alike); the
server's own memory through the run, its share of a core, and its longest turns. Before and after, `echo.py` does the
same over bare sockets: that much is the machine's.

Estimate: FIFO waits give each session rate × seconds / clients rows, give or take one. Per row a lease, an ack and a
notice, 300 µs of the server together, for the 25 rows of a put 8 ms; a session that works sends no heartbeat. Memory:
what a session has (calls, replies kept, leases) does not grow with the rows it did.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

import transferqueue as tq
from bench import echo
from bench.crowd import Crowd, Samples, Windows, late, offer
from bench.harness import Result
from bench.run_record import ByHand, by_hand_options
from bench.server import Server, own_bytes

SCENARIO = "sessions"
CONTENDER = "transferqueue"
CONNECT_S = 120.0
SAMPLES = 12
"""Times at which the server's memory is read, evenly through the run."""


async def _session(queue: tq.AsyncQueue, samples: Samples) -> int:
    """Lease and ack single rows until there are no more; the number of rows."""
    table = await queue.table("rows", timeout_s=CONNECT_S)
    rows = 0
    while True:
        try:
            async with table.lease("train", rows=1, timeout_s=CONNECT_S) as batch:
                delivered = time.monotonic()
                put = float(batch["sent"].numpy()[0])
        except tq.EndOfTable:
            return rows
        samples.add(put, delivered, time.monotonic())
        rows += 1


async def _serve(control: Connection, address: str, count: int) -> None:
    queues = [await tq.aconnect(address, timeout_s=CONNECT_S) for _ in range(count)]
    control.send(count)
    samples = Samples(control)
    telling = asyncio.create_task(samples.tell_always())
    rows = await asyncio.gather(*(_session(queue, samples) for queue in queues))
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling
    samples.tell()
    control.send(list(rows))
    await asyncio.gather(*(queue.close() for queue in queues))


def _process(control: Connection, address: str, count: int) -> None:
    asyncio.run(_serve(control, address, count))


class Used:
    """The server's memory through a run of so many seconds, and its share of a core."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._server, self._pid, self._seconds = psutil.Process(pid), pid, seconds
        self._began, self._busy_s = time.monotonic(), self._processor()
        self.memory: list[float] = []

    def _processor(self) -> float:
        times = self._server.cpu_times()
        return float(times.user + times.system)

    def tick(self, now: float) -> None:
        if now >= (len(self.memory) + 1) * self._seconds / SAMPLES:
            self.memory.append(own_bytes(self._pid))

    def share(self) -> float:
        """Of one core, since the beginning."""
        return (self._processor() - self._busy_s) / (time.monotonic() - self._began)


def jain(counts: list[int]) -> float:
    """Jain, Chiu, Hawe 1984: (Σx)² / (n Σx²)."""
    return sum(counts) ** 2 / (len(counts) * sum(one * one for one in counts))


def _measure(server: Server, clients: int, rate: int, seconds: float, window_s: float) -> dict[str, Any]:
    with tq.connect(server.address) as queue:
        before = own_bytes(server.pid)
        table = queue.create_table("rows", tasks=[tq.Task("train", needs=["sent"])])
        crowd = Crowd(_process, server.address, clients)
        try:
            connected = own_bytes(server.pid)
            windows, used = Windows("queue", crowd, window_s), Used(server.pid, seconds)
            put = offer(
                lambda due: table.put(sent=np.full(due, time.monotonic())), rate, seconds, [windows.tick, used.tick]
            )
            share, turns = used.share(), queue.stats().server.turns
            table.seal()
            rows, counts = crowd.rows(), queue.audit().tables["rows"]
        finally:
            crowd.stop()
        if not counts.balanced or not put == sum(rows) == counts.rows_put == counts.rows_done:
            raise RuntimeError(f"rows were lost or done twice: {counts}, put {put}, delivered {sum(rows)}")
        return {
            "rows": rows,
            "windows": windows.finish(seconds),
            "all": late(crowd.measured()),
            "memory": [*used.memory, own_bytes(server.pid)],
            "share": share,
            "turns": turns,
            "each": (connected - before) / clients,
        }


def run(
    clients: int, rate: int, seconds: float, durability: str, *, window_s: float, echo_seconds: float
) -> list[Result]:
    bare = echo.run(clients, rate, echo_seconds, echo_seconds) if echo_seconds else []
    server = Server(arena_bytes="1GiB", durability=durability)
    try:
        found = _measure(server, clients, rate, seconds, window_s)
    finally:
        server.stop()
    bare += echo.run(clients, rate, echo_seconds, echo_seconds) if echo_seconds else []
    name = f"clients_{clients}_rate_{rate}_{durability}"
    results = _delays(name, found, bare)
    rows, memory = found["rows"], found["memory"]
    steady = memory[len(memory) // 4 :]

    def result(metric: str, unit: Any, raw: list[float]) -> None:
        results.append(Result(SCENARIO, CONTENDER, name, metric, unit, raw))

    result("rows_each", "1/s", [one / seconds for one in rows])
    result("fairness_jain", "ratio", [jain(rows)])
    result("fewest_over_mean", "ratio", [min(rows) * len(rows) / sum(rows)])
    result("most_over_mean", "ratio", [max(rows) * len(rows) / sum(rows)])
    result("server_core_share", "ratio", [found["share"]])
    for kind, turns in found["turns"].items():
        result(f"server_{kind}_longest", "s", [turns.longest_s])
        result(f"server_{kind}_busiest", "s", [turns.busiest_s])
    result("server_bytes", "bytes", memory)
    result("server_bytes_growth", "ratio", [steady[-1] / steady[0]])
    result("server_bytes_per_client", "bytes", [found["each"]])
    return results


def _delays(name: str, found: dict[str, Any], bare: list[dict[str, float]]) -> list[Result]:
    """Of the whole run, of each window (in order, as samples), and of the bare sockets before and after."""
    results = []
    for key, value in found["all"].items():
        each = [window[key] for window in found["windows"] if window]
        results.append(Result(SCENARIO, CONTENDER, name, f"put_to_{key}", "s", [value], checked=True))
        results.append(Result(SCENARIO, CONTENDER, name, f"put_to_{key}_by_window", "s", each))
        if bare:
            results.append(Result(SCENARIO, "echo", name, f"put_to_{key}", "s", [window[key] for window in bare]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--window-s", type=float, default=20.0, help="percentiles are of windows of this length")
    parser.add_argument("--echo-seconds", type=float, default=20.0, help="of bare sockets before and after; 0: none")
    parser.add_argument("--durability", default="memory")
    by_hand_options(parser, required=True)
    chosen = parser.parse_args()
    run_by_hand = ByHand(SCENARIO)
    results = run(
        chosen.clients,
        chosen.rate,
        chosen.seconds,
        chosen.durability,
        window_s=chosen.window_s,
        echo_seconds=chosen.echo_seconds,
    )
    run_by_hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
