"""Scenario: many small rows through several shards, for long. How fast, and does memory stand still?

    python -m bench.shards --rows 10000000 --shards 4 --out FILE

Producers put batches of thousands of rows of 128 bytes; consumers lease, compare every row, and ack. The table holds so
many rows at most, so that producers wait. A shard is a process of its own; the coordinator keeps little memory for
itself, and lends from it too. Measured: rows a second; own memory of the coordinator and of the shards, and the pages
of all arenas, twelve times through the run; how evenly bytes went to the shards; and that in the end every row is done
and no byte is lent. remote: clients map nothing, so every byte crosses a shard's bulk endpoint twice.

Estimate: a batch of 4,096 rows is half a MiB, 0.1 ms to copy in and to gather out; its messages take 0.3 ms of the
coordinator at either end, and the ledger 10 ns a row for each task: 10⁷ rows are 2,400 batches, so some ten seconds on
two idle cores, most of them in numpy of producer and consumer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import numpy as np

import transferqueue as tq
from bench.harness import ROOT, Result
from bench.limits import child
from bench.run_record import ByHand, by_hand_options
from bench.server import Server, arena_bytes, own_bytes

SCENARIO = "shards"
CONTENDER = "transferqueue"
WIDTH = 16
"""Values of eight bytes in a row."""
PATIENCE_S = 120.0
SAMPLES = 12
BATCHES_AHEAD = 32
"""How many batches the table holds at most."""


@contextmanager
def shard(address: str, size: str) -> Iterator[subprocess.Popen[str]]:
    """A shard process that has joined."""
    command = [sys.executable, "-m", "transferqueue.cli", "shard", "--join", address, "--arena-bytes", size]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        if process.stdout is None or not process.stdout.readline().startswith("ready"):
            raise RuntimeError("a shard did not start")
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def _connect(address: str, data: str) -> tq.Queue:
    return tq.connect(address, data="remote" if data == "remote" else "auto")


def _produce(control: Connection, address: str, data: str, rows: int, batch: int) -> None:
    with _connect(address, data) as queue:
        table = queue.table("rows")
        x = np.empty((batch, WIDTH), np.int64)
        for first in range(0, rows, batch):
            count = min(batch, rows - first)
            ordinal = np.arange(first, first + count)
            x[:count] = ordinal[:, None] + np.arange(WIDTH)
            table.put(x=x[:count], ordinal=ordinal, timeout_s=PATIENCE_S)
        table.seal()
        control.send(rows)


def _consume(control: Connection, address: str, data: str, batch: int) -> None:
    rows = 0
    with _connect(address, data) as queue:
        table = queue.table("rows")
        try:
            while True:
                with table.lease("train", rows=batch, at_least=1, timeout_s=PATIENCE_S) as got:
                    expected = got.ordinal[:, None] + np.arange(WIDTH)
                    if not np.array_equal(got["x"].numpy(), expected):
                        raise RuntimeError("a row came back with other values than it was put with")
                    rows += len(got)
        except tq.EndOfTable:
            control.send(rows)


def _until_empty(queue: tq.Queue) -> None:
    """Views are returned soon after the last of them is gone."""
    deadline = time.monotonic() + PATIENCE_S
    while any(one.used_bytes for one in queue.stats().server.shards):
        if time.monotonic() > deadline:
            raise RuntimeError(f"bytes are lent, though every row is done: {queue.stats().server}")
        time.sleep(0.05)


class Watch:
    """Memory of all processes of the deployment, read as rows are done; and where bytes were lent."""

    def __init__(self, queue: tq.Queue, pids: list[int], rows: int) -> None:
        self.queue, self.pids, self.rows = queue, pids, rows
        self.own: list[float] = []
        self.arenas: list[float] = []
        self.lent: dict[int, int] = {}

    def until_done(self) -> None:
        """Returns when every row is done."""
        while (done := self.queue.audit().tables["rows"].rows_done) < self.rows:
            for one in self.queue.stats().server.shards:
                self.lent[one.shard] = self.lent.get(one.shard, 0) + one.used_bytes
            if done >= (len(self.own) + 1) * self.rows / SAMPLES:
                self.sample()
            time.sleep(0.02)
        self.sample()

    def sample(self) -> None:
        """Read it now."""
        self.own.append(float(sum(own_bytes(pid) for pid in self.pids)))
        self.arenas.append(float(sum(arena_bytes(pid) for pid in self.pids)))


def run(rows: int, shards: int, batch: int, size: str, data: str) -> list[Result]:
    with ExitStack() as opened:
        server = Server(arena_bytes="64MiB", tcp=True)
        opened.callback(server.stop)
        address = server.tcp_address if data == "remote" else server.address
        pids = [server.pid, *(opened.enter_context(shard(address, size)).pid for _ in range(shards))]
        queue = opened.enter_context(tq.connect(server.address))
        task = tq.Task("train", needs=["x"])
        queue.create_table("rows", tasks=[task], limits=tq.Limits(rows=BATCHES_AHEAD * batch))
        watch = Watch(queue, pids, rows)
        began = time.monotonic()
        consumer = opened.enter_context(child(_consume, address, data, batch))
        opened.enter_context(child(_produce, address, data, rows, batch))
        watch.until_done()
        took = time.monotonic() - began
        delivered = consumer.recv() if consumer.poll(PATIENCE_S) else 0
        counts = queue.audit().tables["rows"]
        _until_empty(queue)
    if not counts.balanced or counts.rows_done != rows or delivered != rows:
        raise RuntimeError(f"rows were lost or done twice: {counts}, delivered {delivered}")
    name = f"rows_{rows}_shards_{shards}_{data}"
    steady = watch.own[len(watch.own) // 4 :]
    lent = sorted(watch.lent.values())
    nbytes = rows * WIDTH * 8
    return [
        Result(SCENARIO, CONTENDER, name, "rows_per_s", "1/s", [rows / took], nbytes=nbytes, checked=True),
        Result(SCENARIO, CONTENDER, name, "own_bytes", "bytes", watch.own),
        Result(SCENARIO, CONTENDER, name, "own_bytes_growth", "ratio", [steady[-1] / steady[0]]),
        Result(SCENARIO, CONTENDER, name, "arena_bytes", "bytes", watch.arenas),
        Result(SCENARIO, CONTENDER, name, "arena_bytes_most", "bytes", [max(watch.arenas)]),
        Result(SCENARIO, CONTENDER, name, "least_lent_over_most", "ratio", [lent[0] / max(lent[-1], 1)]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--arena-bytes", default="512MiB", help="of each shard")
    parser.add_argument("--data", choices=("mapped", "remote"), default="mapped")
    by_hand_options(parser)
    chosen = parser.parse_args()
    run_by_hand = ByHand(SCENARIO)
    results = run(chosen.rows, chosen.shards, chosen.batch, chosen.arena_bytes, chosen.data)
    run_by_hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
