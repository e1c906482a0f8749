"""Scenario: memory. What a live payload costs, and what an hour's traffic leaves behind.

    python -m bench.memory --out FILE

- `live/server_per_payload`: a table is filled with ragged rows and kept full; the server's own memory and the pages of
  its arena, over the bytes of the values.
- `churn/growth`: a million rows pass through a table limited to 4,096; memory of server, arena and client at the end
  over what it was after the first ten thousand.

A process's own memory is what the kernel counts as its resident anonymous and file pages; pages of the arena are
counted once, as the blocks that its file has.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

import transferqueue as tq
from bench.contenders.tensors import tensor
from bench.harness import Result, save_results
from bench.server import Server, arena_bytes, own_bytes
from bench.workloads import MIB, Workload, columns

SCENARIO = "memory"
LIVE = Workload("live", "ragged", 1024, 8, 32 * MIB)
LIVE_BATCHES = 16
CHURN_LIMIT = 4096
CHURN_BATCH = 512
CHURN_FIRST = 10_240


def live(server: Server, queue: tq.Queue) -> list[Result]:
    """Fill a table, and compare what the server takes with what was put."""
    before = own_bytes(server.pid) + arena_bytes(server.pid)
    table = queue.create_table("live", tasks=[tq.Task("train", needs=LIVE.names)])
    batch = {name: tensor(flat) for name, flat in columns(LIVE, 0).items()}
    for _ in range(LIVE_BATCHES):
        table.put(**batch)
    payload = LIVE_BATCHES * LIVE.nbytes
    taken = own_bytes(server.pid) + arena_bytes(server.pid)
    queue.drop_table("live")
    return [
        Result(SCENARIO, "transferqueue", "live", "resident", "bytes", [float(taken)], payload),
        Result(SCENARIO, "transferqueue", "live", "added", "bytes", [float(taken - before)], payload),
        Result(SCENARIO, "transferqueue", "live", "payload", "bytes", [float(payload)], payload),
        Result(SCENARIO, "transferqueue", "live", "server_per_payload", "ratio", [taken / payload], payload),
    ]


def _rows(turn: int) -> dict[str, Any]:
    """512 short ragged rows and a number each: what a step of an hour's traffic looks like."""
    rng = np.random.default_rng(turn)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 64, CHURN_BATCH))])
    values = torch.from_numpy(np.full(offsets[-1], turn, np.int64))
    ids = torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))
    return {"response_ids": ids, "rewards": np.full(CHURN_BATCH, turn, np.float32)}


def _pass(table: tq.Table, turn: int) -> None:
    put = _rows(turn)
    table.put(**put, timeout_s=10)
    with table.lease("train", rows=CHURN_BATCH, timeout_s=10) as batch:
        got = batch["response_ids"].nested()
        same = torch.equal(got.values(), put["response_ids"].values())
        if not same or not np.array_equal(batch["rewards"].numpy(), put["rewards"]):
            raise ValueError(f"turn {turn} did not come back as it was put")
        del got


def churn(server: Server, queue: tq.Queue, rows: int) -> list[Result]:
    """Pass rows through a bounded table; memory after the first ten thousand and at the end."""
    needs = ["response_ids", "rewards"]
    table = queue.create_table("churn", tasks=[tq.Task("train", needs=needs)], limits=tq.Limits(rows=CHURN_LIMIT))

    def taken() -> dict[str, int]:
        return {"server": own_bytes(server.pid), "arena": arena_bytes(server.pid), "client": own_bytes(os.getpid())}

    first: dict[str, int] = {}
    for turn in range(rows // CHURN_BATCH):
        _pass(table, turn)
        if (turn + 1) * CHURN_BATCH == CHURN_FIRST:
            first = taken()
    last = taken()
    growth = sum(last.values()) / sum(first.values())
    note = ", ".join(f"{name} {first[name] / MIB:.1f} -> {last[name] / MIB:.1f} MiB" for name in first)
    return [
        Result(SCENARIO, "transferqueue", "churn", "growth", "ratio", [growth], checked=True, note=note),
        Result(SCENARIO, "transferqueue", "churn", "server_growth", "ratio", [last["server"] / first["server"]]),
        Result(SCENARIO, "transferqueue", "churn", "client_growth", "ratio", [last["client"] / first["client"]]),
    ]


def run(rows: int) -> list[Result]:
    results = []
    for measure in (live, lambda server, queue: churn(server, queue, rows)):
        server = Server()
        try:
            with tq.connect(server.address) as queue:
                results += measure(server, queue)
        finally:
            server.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    save_results(chosen.out, run(chosen.rows))


if __name__ == "__main__":
    main()
