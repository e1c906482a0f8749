"""Scenario: put to delivered, back to back, as a ZeroMQ round trip is measured: two processes answer each other.

    python -m bench.ping_pong --out FILE

One puts a row into table `ping`; the other, which waits in a lease there, puts one into `pong` as soon as the lease
returns. Half of the time from the first put until the second lease returns is one put to delivered. Nothing sleeps
between two exchanges, and no clock is shared. Both compare the bytes of each row, off the clock.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import transferqueue as tq
from bench.harness import Result, percentile, save_results
from bench.latency import PATTERN
from bench.limits import child
from bench.server import Server

SCENARIO = "ping_pong"
EXCHANGES = 600
WARM = 100
ROW = PATTERN[None]


def _tables(queue: tq.Queue) -> tuple[tq.Table, tq.Table]:
    task = tq.Task("train", needs=["x"])
    ping, pong = (queue.create_table(name, tasks=[task], exist_ok=True) for name in ("ping", "pong"))
    return ping, pong


def take(table: tq.Table) -> tq.Batch:
    """The next row, waiting for it."""
    return table.lease("train", rows=1, timeout_s=30)


def finish(batch: tq.Batch) -> None:
    """Compare the row's bytes and be done with it."""
    if not np.array_equal(batch["x"].numpy(), ROW):
        raise ValueError("a row of other bytes was delivered")
    batch.ack()


def _answer(control: Connection, address: str) -> None:
    with tq.connect(address) as queue:
        ping, pong = _tables(queue)
        control.send("ready")
        for _ in range(WARM + EXCHANGES):
            batch = take(ping)
            pong.put(x=ROW)
            finish(batch)
        control.send("done")
        control.recv()


def _exchange(ping: tq.Table, pong: tq.Table) -> float:
    began = time.perf_counter()
    ping.put(x=ROW)
    batch = take(pong)
    took = time.perf_counter() - began
    finish(batch)
    return took / 2


def run() -> list[Result]:
    server = Server()
    try:
        with tq.connect(server.address) as queue, child(_answer, server.address) as control:
            control.recv()
            ping, pong = _tables(queue)
            times = [_exchange(ping, pong) for _ in range(WARM + EXCHANGES)][WARM:]
            control.recv()
    finally:
        server.stop()
    return [Result(SCENARIO, "transferqueue", "one_row", "put_to_delivered", "s", times, ROW.nbytes, checked=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    results = run()
    for result in results:
        print(
            f"{result.contender:14} p50 {percentile(result.raw, 0.5) * 1e6:7.1f} µs   p90 "
            f"{percentile(result.raw, 0.9) * 1e6:7.1f} µs"
        )
    save_results(parser.parse_args().out, results)


if __name__ == "__main__":
    main()
