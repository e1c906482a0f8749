"""Scenario: what a row's whole life costs a coordinator, by the way in which its late columns come.

    python -m bench.row_life [--clients 4] [--seconds 4] [--rounds 3] [--rows 1 8 64] [--record --out FILE]

A row has six columns and four tasks: it is put with `response_ids`, `rollout_logprobs` and `loss_mask`; tasks reward,
reference and old give one late column each; task train takes all six. Each client takes turns of 64 rows of 4,000
tokens, one call after the other, in one table. Workloads are ``PLACE_WAY_PACE``:

- mapped: clients over tcp that map the server's memory; remote: clients that map nothing, and two shards that have the
  bytes.
- updates: each row is put alone, and each late column of each row is an update of its own; tasks lease 64 rows and give
  nothing. acks_N: N rows are put at a time, and leased N at a time by the three tasks, which give their column with the
  ack; train leases 64.
- busy: as fast as clients can; sparse: calls are paced so that they would keep the server a quarter busy at the cost
  that busy ones have.

`server_cpu` is processor time of the server for one row, all its threads, as the kernel counts it: it holds also while
the machine is busy. `share` is how much of a core the server took. `requests` is how many a row takes, renewals, grants
and returned views not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

import transferqueue as tq
from bench.harness import Result
from bench.limits import child
from bench.requests import cpu_ns
from bench.run_record import ByHand, by_hand_options
from bench.server import Server
from bench.shards import shard

SCENARIO: Final = "row_life"
CONTENDER: Final = "transferqueue"
ROWS: Final = 64
"""Of a turn, and of the leases of the trainer."""
TOKENS: Final = 4_000
UPDATES: Final = "updates"
PLACES: Final = ("mapped", "remote")
BUSY: Final = 0.25
"""The share of a core that sparse calls would take of the server at the cost of busy ones."""
SHARDS: Final = 2
PATIENCE_S: Final = 60.0
LATE: Final = {"reward": "rewards", "reference": "ref_logprobs", "old": "old_logprobs"}
Call = Callable[[], object]


def way_of(rows: int) -> str:
    """The name of the way in which so many rows are acked at once."""
    return f"acks_{rows}"


def _table(queue: tq.Queue, way: str) -> tq.Table:
    put = ("response_ids", "rollout_logprobs", "loss_mask")
    tasks = [
        tq.Task(task, needs=("response_ids",), gives=() if way == UPDATES else (column,))
        for task, column in LATE.items()
    ]
    tasks.append(tq.Task("train", needs=(*put, *LATE.values())))
    return queue.create_table(f"rows_{way}", tasks=tasks, limits=tq.Limits(rows=1 << 14), exist_ok=True)


def _put(rows: int) -> dict[str, Any]:
    return {
        "response_ids": [np.zeros(TOKENS, np.int64)] * rows,
        "rollout_logprobs": [np.zeros(TOKENS, np.float32)] * rows,
        "loss_mask": [np.ones(TOKENS, bool)] * rows,
    }


def _late(column: str, rows: int) -> dict[str, Any]:
    return {column: np.zeros(rows, np.float32) if column == "rewards" else [np.zeros(TOKENS, np.float32)] * rows}


def _calls(table: tq.Table, way: str) -> Iterator[Call]:
    """The calls of one turn, one after the other."""
    at_once = 1 if way == UPDATES else int(way.removeprefix("acks_"))
    put = _put(at_once)
    rows: list[int] = []
    for _ in range(ROWS // at_once):
        yield lambda: rows.extend(table.put(**put, timeout_s=PATIENCE_S).tolist())
    for task, column in LATE.items():
        late = _late(column, at_once)
        if way == UPDATES:
            for row in rows:
                yield lambda row=row, late=late: table.update([row], **late)  # type: ignore[misc]
        yield from _leases(table, task, ROWS if way == UPDATES else at_once, {} if way == UPDATES else late)
    yield from _leases(table, "train", ROWS, {})


def _leases(table: tq.Table, task: str, at_once: int, gives: dict[str, Any]) -> Iterator[Call]:
    leased: list[tq.Batch] = []
    for _ in range(ROWS // at_once):
        yield lambda: leased.append(table.lease(task, rows=at_once, fields=(), timeout_s=PATIENCE_S))
        yield lambda: leased.pop().ack(**gives)


def requests_of(way: str) -> int:
    """Requests of one turn: puts, updates, leases and acks."""
    at_once = 1 if way == UPDATES else int(way.removeprefix("acks_"))
    late = ROWS * len(LATE) + 2 * len(LATE) if way == UPDATES else 2 * len(LATE) * ROWS // at_once
    return ROWS // at_once + late + 2


def _client(control: Connection, address: str, data: str) -> None:
    """Take turns for as long as the other end asks, a call every `pause_s` at most; answer with how many turns."""
    with tq.connect(address, data="remote" if data == "remote" else "auto") as queue:
        control.send(0)
        while (wanted := control.recv()) is not None:
            way, seconds, pause_s = wanted
            table = _table(queue, way)
            turns, due, until = 0, time.monotonic(), time.monotonic() + seconds
            while time.monotonic() < until:
                for call in _calls(table, way):
                    due = max(due + pause_s, time.monotonic() - pause_s)
                    time.sleep(max(0.0, due - time.monotonic()))
                    call()
                turns += 1
            control.send(turns)


def one_round(
    pid: int, controls: Sequence[Connection], way: str, seconds: float, pause_s: float
) -> tuple[float, float]:
    """Seconds of the server's processor for one row, and the share of a core that it took."""
    used, began = cpu_ns(pid), time.perf_counter()
    for control in controls:
        control.send((way, seconds, pause_s))
    rows = ROWS * sum(control.recv() for control in controls)
    spent, took = (cpu_ns(pid) - used) / 1e9, time.perf_counter() - began
    return spent / rows, spent / took


def _ways(pid: int, controls: Sequence[Connection], ways: Sequence[str], seconds: float) -> Iterator[tuple[str, float]]:
    """One round of each way and pace: (workload's end and metric, sample)."""
    for way in ways:
        cost, share = one_round(pid, controls, way, seconds, 0.0)
        yield f"{way}_busy/server_cpu", cost
        yield f"{way}_busy/share", share
        pause_s = len(controls) * cost * ROWS / requests_of(way) / BUSY
        cost, share = one_round(pid, controls, way, seconds, pause_s)
        yield f"{way}_sparse/server_cpu", cost
        yield f"{way}_sparse/share", share


def run(place: str, ways: Sequence[str], clients: int, seconds: float, rounds: int) -> list[Result]:
    """All ways and paces at one place, by turns; the first round is not counted."""
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        server = Server(arena_bytes="64MiB" if place == "remote" else "1GiB", tcp=True)
        stack.callback(server.stop)
        for _ in range(SHARDS if place == "remote" else 0):
            stack.enter_context(shard(server.tcp_address, "512MiB"))
        controls = [stack.enter_context(child(_client, server.tcp_address, place)) for _ in range(clients)]
        for control in controls:
            control.recv()
        for number in range(rounds + 1):
            for name, sample in _ways(server.pid, controls, ways, seconds if number else 0.1):
                if number:
                    samples.setdefault(name, []).append(sample)
        for control in controls:
            control.send(None)
    units: dict[str, Any] = {"server_cpu": "s", "share": "ratio"}
    return [
        Result(SCENARIO, CONTENDER, f"{place}_{workload}", metric, units[metric], raw)
        for (workload, _, metric), raw in ((name.partition("/"), raw) for name, raw in samples.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a row's whole life costs a coordinator.")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="rows of one put and of one ack")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    by_hand_options(parser)
    chosen = parser.parse_args()
    if any(ROWS % rows for rows in chosen.rows):
        parser.error(f"--rows {chosen.rows}: numbers that divide {ROWS}")
    hand, ways = ByHand(SCENARIO), [UPDATES, *map(way_of, chosen.rows)]
    results = [result for place in PLACES for result in run(place, ways, chosen.clients, chosen.seconds, chosen.rounds)]
    counts = [requests_of(way) / ROWS for way in ways]
    results += [
        Result(SCENARIO, CONTENDER, way, "requests", "ratio", [count]) for way, count in zip(ways, counts, strict=True)
    ]
    hand.tell(results, chosen.out, whole=chosen.record)


if __name__ == "__main__":
    main()
