"""Scenario: a thousand sessions that work, all after the same few rows. Is everyone served, how soon, in what memory?

    python -m bench.sessions --clients 1000 --rate 500 --seconds 60 --out FILE

Rows come at a fixed rate, well under what the server carries, one at a time to whoever waits longest: so every session is
parked at the server nearly always, and what is measured is the waking, not a queue in front of it. Each row carries the moment
of its put. Measured: put to delivered; how many rows each session got (and Jain's index of that: 1 is all alike); the server's
own memory through the run, and its share of a core.

Estimate: FIFO waits give each session rate × seconds / clients rows, give or take one. Per row a lease, an ack and a notice,
300 µs of the server together; 1000 heartbeats a second at 20 µs: a sixth and a fiftieth of a core. Memory: what a session has
(calls, replies kept, leases) does not grow with the rows it did. But ZeroMQ's two queues of a connection are rings of chunks of
256 messages, 64 bytes each, whose pages are touched one after the other: 32 KiB a connection, reached after 256 messages each way.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
import psutil

import transferqueue as tq
from bench.harness import Result, percentile
from bench.memory import own_bytes
from bench.run_record import ByHand, by_hand_options
from bench.server import Server

SCENARIO = "sessions"
CONTENDER = "transferqueue"
CLIENTS_PER_PROCESS = 250
CONNECT_S = 120.0
TICK_S = 0.05
SAMPLES = 12
"""Times at which the server's memory is read, evenly through the run."""


async def _session(queue: tq.AsyncQueue, waits: list[float]) -> int:
    """Lease and ack single rows until there are no more; the number of rows."""
    table = await queue.table("rows", timeout_s=CONNECT_S)
    rows = 0
    while True:
        try:
            async with table.lease("train", rows=1, timeout_s=CONNECT_S) as batch:
                waits.append(time.monotonic() - float(batch["sent"].numpy()[0]))
                rows += 1
        except tq.EndOfTable:
            return rows


async def _serve(control: Connection, address: str, count: int) -> None:
    queues = [await tq.aconnect(address, timeout_s=CONNECT_S) for _ in range(count)]
    control.send(count)
    waits: list[float] = []
    rows = await asyncio.gather(*(_session(queue, waits) for queue in queues))
    control.send((rows, waits))
    await asyncio.gather(*(queue.close() for queue in queues))


def _process(control: Connection, address: str, count: int) -> None:
    asyncio.run(_serve(control, address, count))


def crowd(address: str, clients: int) -> list[Connection]:
    """Processes with all the sessions, connected."""
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    for start in range(0, clients, CLIENTS_PER_PROCESS):
        here, there = multiprocessing.Pipe()
        count = min(CLIENTS_PER_PROCESS, clients - start)
        spawn.Process(target=_process, args=(there, address, count), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    return pipes


def offer(table: tq.Table, rate: int, seconds: float, pid: int) -> tuple[list[float], float]:
    """Put rows for so long; the server's memory through that time, and its share of a core."""
    server = psutil.Process(pid)
    times, began = server.cpu_times(), time.monotonic()
    memory: list[float] = []
    put = 0
    while (now := time.monotonic() - began) < seconds:
        due = int(now * rate) - put
        if due:
            table.put(sent=np.full(due, time.monotonic()))
            put += due
        if now >= (len(memory) + 1) * seconds / SAMPLES:
            memory.append(own_bytes(pid))
        time.sleep(TICK_S)
    after = server.cpu_times()
    busy = (after.user + after.system - times.user - times.system) / (time.monotonic() - began)
    return [*memory, own_bytes(pid)], busy


def jain(counts: list[int]) -> float:
    """Jain, Chiu, Hawe 1984: (Σx)² / (n Σx²)."""
    return sum(counts) ** 2 / (len(counts) * sum(one * one for one in counts))


def run(clients: int, rate: int, seconds: float, durability: str) -> list[Result]:
    server = Server(arena_bytes="1GiB", durability=durability)
    try:
        with tq.connect(server.address) as queue:
            before = own_bytes(server.pid)
            table = queue.create_table("rows", tasks=[tq.Task("train", needs=["sent"])])
            pipes = crowd(server.address, clients)
            connected = own_bytes(server.pid)
            memory, busy = offer(table, rate, seconds, server.pid)
            table.seal()
            told = [pipe.recv() for pipe in pipes]
            counts = queue.audit()["tables"]["rows"]
    finally:
        server.stop()
    rows = [one for per_process, _ in told for one in per_process]
    waits = [one for _, per_process in told for one in per_process]
    if not counts["balanced"] or sum(rows) != counts["rows_put"] or counts["rows_done"] != counts["rows_put"]:
        raise RuntimeError(f"rows were lost or done twice: {counts}, delivered {sum(rows)}")
    name = f"clients_{clients}_rate_{rate}_{durability}"
    steady = memory[len(memory) // 4 :]
    return [
        Result(SCENARIO, CONTENDER, name, "put_to_delivered_p50", "s", [percentile(waits, 0.5)], checked=True),
        Result(SCENARIO, CONTENDER, name, "put_to_delivered_p99", "s", [percentile(waits, 0.99)], checked=True),
        Result(SCENARIO, CONTENDER, name, "rows_each", "1/s", [one / seconds for one in rows]),
        Result(SCENARIO, CONTENDER, name, "fairness_jain", "ratio", [jain(rows)]),
        Result(SCENARIO, CONTENDER, name, "fewest_over_mean", "ratio", [min(rows) * len(rows) / sum(rows)]),
        Result(SCENARIO, CONTENDER, name, "most_over_mean", "ratio", [max(rows) * len(rows) / sum(rows)]),
        Result(SCENARIO, CONTENDER, name, "server_core_share", "ratio", [busy]),
        Result(SCENARIO, CONTENDER, name, "server_bytes", "bytes", memory),
        Result(SCENARIO, CONTENDER, name, "server_bytes_growth", "ratio", [steady[-1] / steady[0]]),
        Result(SCENARIO, CONTENDER, name, "server_bytes_per_client", "bytes", [(connected - before) / clients]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--durability", default="memory")
    by_hand_options(parser, required=True)
    chosen = parser.parse_args()
    run_by_hand = ByHand(SCENARIO)
    results = run(chosen.clients, chosen.rate, chosen.seconds, chosen.durability)
    run_by_hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
