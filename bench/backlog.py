"""Scenario: a backlog of rows that were put one by one: the longest calls while it grows, and the server's memory for
each row.

    python -m bench.backlog [--rows 250000] [--out FILE]

Rows of 64 bytes, one a put, over a socket file; nobody leases them. The memory is the server's own, without the arena.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import transferqueue as tq
from bench.harness import Result, percentile, save_results
from bench.server import Server, own_bytes

SCENARIO = "backlog"
WARM = 1000
LONG_S = 0.05


def run(rows: int) -> list[Result]:
    """Put so many rows, and measure each call."""
    server = Server()
    try:
        with tq.connect(server.address) as queue:
            table = queue.create_table("backlog", tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=1 << 24))
            row = np.zeros((1, 64), np.uint8)
            for _ in range(WARM):
                table.put(x=row)
            before, times = own_bytes(server.pid), []
            for _ in range(rows):
                began = time.perf_counter()
                table.put(x=row)
                times.append(time.perf_counter() - began)
            nbytes = (own_bytes(server.pid) - before) / rows
    finally:
        server.stop()
    return [
        Result(SCENARIO, "transferqueue", "one_row", "put_call", "s", times),
        Result(SCENARIO, "transferqueue", "one_row", "server_bytes_per_row", "bytes", [nbytes]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=250_000)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    results = calls, nbytes = run(chosen.rows)
    times = calls.raw
    long = [took for took in times if took > LONG_S]
    print(
        f"put of one row: p50 {percentile(times, 0.5) * 1e6:.0f} µs, p99.9 {percentile(times, 0.999) * 1e3:.1f} ms, "
        f"longest {max(times) * 1e3:.0f} ms; {len(long)} over {LONG_S * 1e3:.0f} ms, together {sum(long):.2f} s; "
        f"{nbytes.raw[0]:.0f} bytes of the server a row"
    )
    if chosen.out:
        save_results(chosen.out, results)


if __name__ == "__main__":
    main()
