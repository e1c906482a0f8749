"""Scenario: what it costs to be given 64 rows while many are resident and ready.

    python -m bench.lease_cost transferqueue --resident 1000 1000000 --out FILE

Ours: `table.lease("train", rows=64)` in a client of a served queue; the rows are released again, off the clock, so the
same number stays resident. The incumbent: `get_meta` of 64 samples in fetch mode; its rows stay consumed, which is
why each repetition asks under another task name. The drop-in: the same program after `activate()`. `first_64` is the
first request of all at a level, which the others do not contain.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.harness import Result, save_results

SCENARIO = "lease_cost"
ROWS = 64
WARM = 5
CHUNK = 4096


class Resident(Protocol):
    """A store that is filled with small rows and asked for 64 of them."""

    def fill(self, rows: int) -> None:
        """Put so many more rows."""

    def ask(self, turn: int) -> float:
        """Seconds to be given 64 rows; they are put back."""

    def stop(self) -> None:
        """End it."""


class Ours:
    def __init__(self) -> None:
        import transferqueue as tq
        from bench.server import Server

        self.server = Server()
        self.queue = tq.connect(self.server.address)
        self.table = self.queue.create_table(
            "resident", tasks=[tq.Task("train", needs=["x"])], limits=tq.Limits(rows=1 << 25)
        )

    def fill(self, rows: int) -> None:
        for start in range(0, rows, CHUNK):
            self.table.put(x=np.zeros((min(CHUNK, rows - start), 2), np.float32), timeout_s=10)

    def ask(self, turn: int) -> float:
        began = time.perf_counter()
        batch = self.table.lease("train", rows=ROWS, timeout_s=10)
        took = time.perf_counter() - began
        if len(batch) != ROWS:
            raise ValueError(f"{len(batch)} rows came where {ROWS} were asked for")
        batch.release()
        return took

    def own(self) -> float:
        """Bytes of the server's own memory, without the arena."""
        from bench.server import own_bytes

        return float(own_bytes(self.server.pid))

    def stop(self) -> None:
        self.queue.close()
        self.server.stop()


class Incumbent:
    def __init__(self) -> None:
        from bench.contenders import contender

        self.peer = contender("incumbent")
        self.client = self.peer.join(self.peer.start()).client  # type: ignore[attr-defined]

    def fill(self, rows: int) -> None:
        import torch
        from tensordict import TensorDict

        for start in range(0, rows, CHUNK):
            size = min(CHUNK, rows - start)
            self.client.put(TensorDict({"x": torch.zeros(size, 2)}, batch_size=size), partition_id="resident")

    def ask(self, turn: int) -> float:
        began = time.perf_counter()
        found = self.client.get_meta(
            data_fields=["x"], batch_size=ROWS, partition_id="resident", mode="fetch", task_name=f"train_{turn}"
        )
        took = time.perf_counter() - began
        if found.size != ROWS:
            raise ValueError(f"{found.size} rows came where {ROWS} were asked for")
        return took

    def stop(self) -> None:
        self.peer.stop()


class DropIn(Incumbent):
    def __init__(self) -> None:
        from transferqueue.adapters.transfer_queue_hook import activate

        activate()
        super().__init__()


STORES: dict[str, Any] = {"transferqueue": Ours, "incumbent": Incumbent, "drop-in": DropIn}


def run(name: str, levels: list[int], repetitions: int) -> list[Result]:
    store: Resident = STORES[name]()
    results, resident = [], 0
    try:
        for level in sorted(levels):
            store.fill(level - resident)
            resident = level
            first, *raw = [store.ask(turn) for turn in range(WARM + repetitions)]
            results.append(Result(SCENARIO, name, f"resident_{level}", "first_64", "s", [first]))
            results.append(Result(SCENARIO, name, f"resident_{level}", "lease_64", "s", raw[WARM - 1 :]))
            if isinstance(store, Ours):
                results.append(Result(SCENARIO, name, f"resident_{level}", "server_own", "bytes", [store.own()]))
    finally:
        store.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=sorted(STORES))
    parser.add_argument("--resident", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    save_results(chosen.out, run(chosen.contender, chosen.resident, chosen.repetitions))


if __name__ == "__main__":
    main()
