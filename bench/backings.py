"""Rows in another store than an arena: put and get of a client that maps nothing, by where the shard's bytes lie, by
turns in one run.

    python -m bench.backings --store mooncake://127.0.0.1:50051 --store file:///var/tmp/rows [--out RECORD]

- `arena`: a remote shard with an arena of its own, which sends from there; any other: one with its bytes in that store.
- `put`, `get`: 33.5 MB of one dense field, each get of rows that nobody has read before, compared with what was put;
  `put_of_arena`, `get_of_arena`: the arena's seconds of the same turn over theirs.
- `small_put`, `small_get`: one row of 1 KiB, the latter by its lease.
- `store_put`, `store_get`: the same 33.5 MB straight into the store and back by its own client, in the objects that a
  shard makes.

A store costs the shard one copy more in either direction, by its own client, one after the other with ours: what
arrived is put when an object is full, and nothing is sent before all objects of a block have come. Estimate for put: a
store of 0.7 GB/s beside a line of 1.6 makes 1 / (1/0.7 + 1/1.6) = 0.49 GB/s, 0.3 of the arena's; get at 1.3 and 1.8:
0.75 GB/s, 0.4.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import transferqueue as tq
from bench.harness import ROOT, Result
from bench.run_record import ByHand
from bench.server import Server
from transferqueue.cluster.stores import open_store
from transferqueue.limits import OBJECT_BYTES

SCENARIO = "backings"
ARENA = "arena"
ROWS, WIDTH = 1024, 1 << 13
WARM = 2
START_S = 60.0


@contextmanager
def deployed(store: str) -> Iterator[tq.Queue]:
    """A server with one remote shard, and a client that maps nothing; store: "": the shard has an arena."""
    with ExitStack() as made:
        server = Server(tcp=True)
        made.callback(server.stop)
        words = ["--store", store] if store else []
        shard = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "transferqueue.cli",
                "shard",
                "--join",
                server.tcp_address,
                "--arena-bytes",
                "1GiB",
                *words,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "TRANSFERQUEUE_RUNTIME": str(server.folder)},
        )
        made.callback(shard.wait, START_S)
        made.callback(shard.terminate)
        if shard.stdout is None or not shard.stdout.readline().startswith(b"ready"):
            raise RuntimeError(f"the shard with store {store!r} did not start")
        made.callback(shard.stdout.close)
        yield made.enter_context(tq.connect(server.tcp_address, data="remote"))


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


class Turns:
    """What one deployment does again and again. times: by metric."""

    def __init__(self, queue: tq.Queue) -> None:
        tasks = [tq.Task("train", needs=["x"])]
        self.large, self.small = (queue.create_table(name, tasks=tasks) for name in ("large", "small"))
        self.times: dict[str, list[float]] = {"put": [], "get": [], "small_put": [], "small_get": []}

    def once(self, turn: int) -> None:
        """One of each."""
        x = np.random.default_rng(turn).standard_normal((ROWS, WIDTH), np.float32)
        put_s, rows = _seconds(lambda: self.large.put(x=x))
        get_s, found = _seconds(lambda: self.large.read(rows))
        if not np.array_equal(found["x"].numpy(), x):
            raise ValueError("rows did not come back as they were put")
        found.release()
        self.large.drop(rows, "read")
        small_put_s, _ = _seconds(lambda: self.small.put(x=x[:1, :256]))
        small_get_s, _ = _seconds(self._lease)
        if turn >= WARM:
            for name, seconds in zip(self.times, (put_s, get_s, small_put_s, small_get_s), strict=True):
                self.times[name].append(seconds)

    def _lease(self) -> None:
        with self.small.lease("train", rows=1, timeout_s=START_S) as batch:
            batch["x"].numpy()

    def results(self, name: str, arena: dict[str, list[float]]) -> list[Result]:
        """All of them; and as shares of the arena's."""
        size = 4 * ROWS * WIDTH
        found = [
            Result(
                SCENARIO, name, "dense" if size_ else "one_row", metric, "s", raw, size_ or 1024, checked=bool(size_)
            )
            for metric, raw in self.times.items()
            for size_ in [0 if metric.startswith("small") else size]
        ]
        for metric in ("put", "get"):
            ratios = [theirs / ours for theirs, ours in zip(arena[metric], self.times[metric], strict=True)]
            found.append(Result(SCENARIO, name, "dense", f"{metric}_of_arena", "ratio", ratios, size))
        return found


def straight(store: str, turns: int) -> list[Result]:
    """The store by its own client alone."""
    data = np.random.default_rng(0).standard_normal(ROWS * WIDTH, np.float32).view(np.uint8)
    objects = {f"bench-{at}": data[at : at + OBJECT_BYTES] for at in range(0, len(data), OBJECT_BYTES)}
    into = {key: np.zeros(len(piece), np.uint8) for key, piece in objects.items()}
    times: dict[str, list[float]] = {"store_put": [], "store_get": []}
    with closing(open_store(store)) as opened:
        for turn in range(WARM + turns):
            put_s, _ = _seconds(lambda: [opened.put(key, piece.data) for key, piece in objects.items()])
            get_s, _ = _seconds(lambda: opened.get([(key, memory.data) for key, memory in into.items()]))
            opened.remove(list(objects))
            if turn >= WARM:
                times["store_put"].append(put_s)
                times["store_get"].append(get_s)
    return [
        Result(SCENARIO, store.partition(":")[0], "dense", name, "s", raw, len(data)) for name, raw in times.items()
    ]


def run(stores: list[str], turns: int) -> list[Result]:
    """All deployments side by side, one turn of each after the other."""
    with ExitStack() as made:
        all_turns = {store: Turns(made.enter_context(deployed(store))) for store in ("", *stores)}
        for turn in range(WARM + turns):
            for one in all_turns.values():
                one.once(turn)
        arena = all_turns[""].times
        found = [
            one for store, each in all_turns.items() for one in each.results(store.partition(":")[0] or ARENA, arena)
        ]
    return [*found, *(one for store in stores for one in straight(store, turns))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--store", action="append", required=True, help="address of a store; several: one after the other"
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    run_by_hand = ByHand(SCENARIO)
    run_by_hand.tell(run(chosen.store, chosen.turns), chosen.out, whole=True)


if __name__ == "__main__":
    main()
