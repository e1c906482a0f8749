"""Scenario: what durability costs. Puts and acks of 64 rows, one client, under each level, in turns.

    python -m bench.durability --rounds 7 --out FILE

Estimate for `process`: beside the round trip of a put (some 200 µs of two processes) one record of 3 KB is encoded (5
µs) and one row inserted into SQLite without a sync (25 µs): 0.85 of the speed of `memory`. `disk` waits for the device
twice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import transferqueue as tq
from bench.harness import Result, save_results
from bench.server import Server

SCENARIO = "durability"
ROWS = 64
LEVELS = ("memory", "process", "disk")


class Contender:
    """A server of one level, and a client with a table."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.server = Server(arena_bytes="1GiB", durability=level)
        self.queue = tq.connect(self.server.address)
        self.table = self.queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=1 << 17))
        self.values = [np.arange(100 + row, dtype=np.int64) for row in range(ROWS)]
        self.puts: list[float] = []
        self.acks: list[float] = []

    def round(self, batches: int, *, counted: bool = True) -> None:
        """Put `batches` batches; then lease and ack them all."""
        began = time.perf_counter()
        for _ in range(batches):
            self.table.put(x=self.values, reward=np.zeros(ROWS), policy_version=1)
        put = time.perf_counter()
        for _ in range(batches):
            with self.table.lease("train", rows=ROWS):
                pass
        acked = time.perf_counter()
        if counted:
            self.puts.append(ROWS * batches / (put - began))
            self.acks.append(ROWS * batches / (acked - put))

    def stop(self) -> None:
        self.queue.close()
        self.server.stop()

    def results(self) -> list[Result]:
        return [
            Result(SCENARIO, f"transferqueue {self.level}", f"batches of {ROWS} rows", "put", "1/s", self.puts),
            Result(
                SCENARIO, f"transferqueue {self.level}", f"batches of {ROWS} rows", "lease and ack", "1/s", self.acks
            ),
        ]


def run(levels: list[str], rounds: int, batches: int) -> list[Result]:
    contenders = [Contender(level) for level in levels]
    try:
        for contender in contenders:
            contender.round(batches, counted=False)
        for _ in range(rounds):
            for contender in contenders:
                contender.round(batches)
    finally:
        for contender in contenders:
            contender.stop()
    _tell(contenders)
    return [result for contender in contenders for result in contender.results()]


def _tell(contenders: list[Contender]) -> None:
    """Ratios of rounds that followed each other: what else the machine did then was the same."""
    base = contenders[0]
    for one in contenders:
        puts = [mine / its for mine, its in zip(one.puts, base.puts, strict=True)]
        acks = [mine / its for mine, its in zip(one.acks, base.acks, strict=True)]
        print(
            f"{one.level:8} put {statistics.median(one.puts):9,.0f} rows/s ({statistics.median(puts):.2f} of "
            f"{base.level}, {min(puts):.2f} to {max(puts):.2f})   lease and ack {statistics.median(one.acks):9,.0f} "
            f"rows/s ({statistics.median(acks):.2f}, {min(acks):.2f} to {max(acks):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = run(options.levels, options.rounds, options.batches)
    if options.out:
        save_results(options.out, results)


if __name__ == "__main__":
    main()
