"""Scenario: many small calls to one coordinator, and to two that are used as one. Do two carry more?

    python -m bench.coordinators --clients 4 --out FILE --record

Each client puts eight rows of one number into its table, leases and acks them, over and over: nothing but control
messages. Half of the clients work on one table, half on another, which lie at one coordinator or at two. Runs with one
and with two take turns. Measured: cycles a second; what share of a core the busiest coordinator used; its time for a
cycle, of which the inverse is what one core of a coordinator could carry.

Estimate: a cycle is a put, a lease, an ack and an unpin, 0.1 ms each of a coordinator that has a core and is kept busy,
so 2,500 a second for each coordinator; clients need about as much, so two cores are full with one coordinator and two
clients. What two coordinators add shows with more cores than that, and in the busiest one's share. (Measured: 0.6 to
0.7 ms a cycle, where every message wakes a coordinator that slept. The machine of the record had other work, where more
processes also get more of it: two carried 2.1 times as much as one with two clients, 1.5 with four.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import transferqueue as tq
from bench.harness import Result
from bench.limits import child
from bench.run_record import ByHand, by_hand_options
from bench.server import Server
from transferqueue.wire.home_coordinator import home_coordinator

SCENARIO = "coordinators"
CONTENDER = "transferqueue"
ROWS = 8
PATIENCE_S = 60.0
TABLES = [next(f"t{n}" for n in range(99) if home_coordinator(f"t{n}", 2) == seat) for seat in (1, 2)]


def _work(control: Connection, address: str, name: str, seconds: float) -> None:
    with tq.connect(address) as queue:
        table, x, cycles = queue.table(name), [1.0] * ROWS, 0
        control.send("ready")
        control.recv()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            table.put(x=x)
            with table.lease("train", rows=ROWS, timeout_s=PATIENCE_S):
                cycles += 1
        control.send(cycles)


def _cpu_s(pid: int) -> float:
    spent = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK")


def run(coordinators: int, clients: int, seconds: float) -> tuple[float, float, float]:
    """Cycles a second; share of a core of the busiest coordinator; seconds of coordinators for a cycle."""
    with ExitStack() as opened:
        servers = [
            Server(arena_bytes="256MiB", words=["--coordinator", f"{seat + 1}/{coordinators}"])
            for seat in range(coordinators)
        ]
        for one in servers:
            opened.callback(one.stop)
        queue = opened.enter_context(tq.connect([one.address for one in servers]))
        for name in TABLES:
            queue.create_table(name, fields=[tq.Field("x", "float64")], tasks=[tq.Task("train", needs=["x"])])
        workers = [
            opened.enter_context(child(_work, queue.address, TABLES[number % 2], seconds)) for number in range(clients)
        ]
        for one in workers:
            one.recv()
        before = [_cpu_s(one.pid) for one in servers]
        for one in workers:
            one.send("go")
        cycles = sum(one.recv() for one in workers)
        spent = [_cpu_s(one.pid) - first for one, first in zip(servers, before, strict=True)]
        rows = [one.rows_done for one in queue.audit().tables.values()]
    if sum(rows) != cycles * ROWS:
        raise RuntimeError(f"rows were lost or done twice: {rows} of {cycles} cycles of {ROWS}")
    return cycles / seconds, max(spent) / seconds, sum(spent) / cycles


def measure(clients: int, seconds: float, times: int) -> list[Result]:
    found: dict[int, list[tuple[float, float, float]]] = {1: [], 2: []}
    for _ in range(times):
        for coordinators, runs in found.items():
            runs.append(run(coordinators, clients, seconds))
    results = []
    for coordinators, runs in found.items():
        name = f"clients_{clients}_coordinators_{coordinators}"
        rates, shares, costs = (list(one) for one in zip(*runs, strict=True))
        results += [
            Result(SCENARIO, CONTENDER, name, "cycles_per_s", "1/s", rates),
            Result(SCENARIO, CONTENDER, name, "busiest_share", "ratio", shares),
            Result(SCENARIO, CONTENDER, name, "coordinator_s_per_cycle", "s", costs),
        ]
    gain = [two[0] / statistics.median(one[0] for one in found[1]) for two in found[2]]
    return [*results, Result(SCENARIO, CONTENDER, f"clients_{clients}", "two_over_one", "ratio", gain)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--times", type=int, default=3)
    by_hand_options(parser)
    chosen = parser.parse_args()
    run_by_hand = ByHand(SCENARIO)
    results = [one for clients in chosen.clients for one in measure(clients, chosen.seconds, chosen.times)]
    run_by_hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
