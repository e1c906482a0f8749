"""Scenario: small puts. One row is put by one of P producers; how long until it is in the hands of one of C consumers?

    python -m bench.latency CONTENDER --pairs 1 8 64 --out FILE

Producers are threads of this process, consumers threads of another, each with a connection of its own. Rows are
offered at a fixed total rate, well under what any contender here can carry, so that the time is the time of a delivery
and not of a queue in front of it. Each row carries the moment of its put; both processes read the same kernel clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.contenders import contender
from bench.contenders.base import Endpoint
from bench.harness import Result, percentile, save_results
from bench.limits import PACE
from bench.workloads import Flat, Workload

SCENARIO = "latency"
ONE_ROW = Workload("one_row", "dense", 1, 1, 64, "uint8")
RATE = PACE
"""Rows a second over all producers, unless asked otherwise: the incumbent cannot carry so many."""
WARM = 50
PATTERN = np.arange(56, dtype=np.uint8)


def row() -> Flat:
    """A row of 64 bytes: the moment of its put, then a pattern that the consumer checks."""
    values = np.concatenate([np.zeros(8, np.uint8), PATTERN])
    return Flat(values, np.array([64]), "uint8", "dense", (64,))


def arrival(endpoint: Endpoint, got: Any) -> float:
    """Seconds since the row was put. Raises ValueError if it is not the row."""
    now = time.perf_counter_ns()
    values, _ = endpoint.flat(got, "field_000")
    if not np.array_equal(values[8:], PATTERN):
        raise ValueError("a row of other bytes was delivered")
    return (now - int(values[:8].view("<i8")[0])) / 1e9


def _consume(endpoint: Endpoint, arrivals: queue.SimpleQueue[float | Exception]) -> None:
    try:
        while True:
            got = endpoint.get(None, None)
            arrivals.put(arrival(endpoint, got))
            endpoint.finish(None, got)
    except Exception as error:  # noqa: BLE001 — told to the process that counts
        arrivals.put(error)


def consumers(name: str, address: Any, count: int, rows: int, control: Connection) -> None:
    """The consuming process: `count` threads; sends the delays of `rows` deliveries, then ends."""
    arrivals: queue.SimpleQueue[float | Exception] = queue.SimpleQueue()
    peer = contender(name)
    for _ in range(count):
        endpoint = peer.join(address)
        endpoint.begin(ONE_ROW)
        threading.Thread(target=_consume, args=(endpoint, arrivals), daemon=True).start()
    control.send("ready")
    found = [arrivals.get(timeout=60) for _ in range(rows)]
    broken = [str(delay) for delay in found if isinstance(delay, Exception)]
    control.send(broken[0] if broken else found)
    control.recv()
    os._exit(0)


def _produce(endpoint: Endpoint, first: float, rows: int, interval_s: float) -> None:
    flat = row()
    prepared = endpoint.prepare({"field_000": flat})
    stamp = flat.values[:8].view("<i8")
    for turn in range(rows):
        time.sleep(max(0.0, first + turn * interval_s - time.perf_counter()))
        stamp[0] = time.perf_counter_ns()
        endpoint.put(prepared)


def offer(endpoints: list[Endpoint], rows_each: int, rate: float) -> None:
    """All producers put their rows, evenly spread in time."""
    interval_s = len(endpoints) / rate
    begin = time.perf_counter() + 0.1
    threads = [
        threading.Thread(target=_produce, args=(endpoint, begin + number / rate, rows_each, interval_s))
        for number, endpoint in enumerate(endpoints)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(name: str, address: Any, pairs: int, rows: int, rate: float) -> list[float]:
    """Delays of `rows` deliveries between `pairs` producers and as many consumers."""
    each = -(-(rows + WARM) // pairs)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=consumers, args=(name, address, pairs, each * pairs, there), daemon=True
    )
    process.start()
    peer = contender(name)
    endpoints = [peer.join(address) for _ in range(pairs)]
    for endpoint in endpoints:
        endpoint.begin(ONE_ROW)
    here.recv()
    offer(endpoints, each, rate)
    found = here.recv()
    here.send("thanks")
    process.join(20)
    if isinstance(found, str):
        raise RuntimeError(f"{name}: {found}")
    return found[WARM:]


def delivered(name: str, workload: str, delays: list[float]) -> list[Result]:
    """The delays, and the 99th percentile, which a record of medians does not have."""
    slow = percentile(delays, 0.99)
    return [
        Result(SCENARIO, name, workload, "put_to_delivered", "s", delays, 64, checked=True),
        Result(SCENARIO, name, workload, "put_to_delivered_p99", "s", [slow], 64, checked=True),
    ]


def run(name: str, counts: list[int], rows: int, rate: float) -> list[Result]:
    peer = contender(name)
    address = peer.start()
    try:
        return [
            result
            for pairs in counts
            for result in delivered(name, f"pairs_{pairs}", measure(name, address, pairs, rows, rate))
        ]
    finally:
        peer.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender")
    parser.add_argument("--pairs", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    save_results(chosen.out, run(chosen.contender, chosen.pairs, chosen.rows, chosen.rate))


if __name__ == "__main__":
    main()
