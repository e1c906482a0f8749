"""One program written for ``transfer_queue``, run with the original and, after ``activate()``, with the drop-in.

    .venv-shim/bin/python -m bench.shim [--out RECORD.json]

`program` below is the user's: it knows nothing of us. It is started twice, each time in a process with a Ray of its
own, and the two take turns, workload by workload and round by round, so that both meet the same machine. Seconds a
repetition:

- `put`: ``client.put`` of a TensorDict; `get`: ``client.get_meta`` for the rows and ``client.get_data`` of them;
- `kv_put`, `kv_get`: ``kv_batch_put`` and ``kv_batch_get`` of the same batch by key.

What was got is compared byte for byte with what was put after the clock stopped. The ratio is the original's median
over ours.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from bench.contenders.tensors import flat_bytes, tensor
from bench.harness import Result
from bench.run_record import RECORDS, ByHand, stamped
from bench.workloads import WORKLOADS, Workload, columns, same

SCENARIO = "shim"
NAMES = ("dense_1", "dense_8", "dense_32", "ragged_1", "ragged_8", "ragged_32")
METRICS = ("put", "get", "kv_put", "kv_get")
REQUIRED = 5.0
ROUNDS = 4
REPETITIONS = 3
TASK = "train"


# ---------------------------------------------------------------- the user's program


def program() -> None:
    """Serve orders on standard input: the name of a workload, or nothing more. One line of JSON answers each."""
    import ray
    import transfer_queue as tq

    logging.disable(logging.INFO)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
    tq.init({"controller": {"polling_mode": True}, "backend": {"storage_backend": "SimpleStorage"}})
    say({"ready": tq.__file__})
    number = 0
    for line in sys.stdin:
        times: dict[str, list[float]] = {metric: [] for metric in METRICS}
        for _ in range(1 + REPETITIONS):  # the first is not counted
            number += 1
            for metric, took in exchange(tq, WORKLOADS[line.strip()], number).items():
                times[metric].append(took)
        say({metric: raw[1:] for metric, raw in times.items()})
    tq.close()
    ray.shutdown()


def exchange(tq: Any, workload: Workload, number: int) -> dict[str, float]:
    """Put one batch and get it back, by metadata and by key; seconds of each."""
    from tensordict import TensorDict

    made = columns(workload, number % 2)
    batch = TensorDict({name: tensor(flat) for name, flat in made.items()}, batch_size=workload.rows)
    client, partition, keys = tq.get_client(), f"{workload.name}_{number}", [str(row) for row in range(workload.rows)]
    times: dict[str, float] = {}

    def fetch() -> Any:
        found = client.get_meta(
            data_fields=workload.names, batch_size=workload.rows, partition_id=partition, mode="fetch", task_name=TASK
        )
        return client.get_data(found)

    timed(times, "put", lambda: client.put(batch, partition_id=partition))
    check(workload, made, timed(times, "get", fetch))
    client.clear_partition(partition)
    timed(times, "kv_put", lambda: tq.kv_batch_put(keys, f"kv_{partition}", batch))
    check(workload, made, timed(times, "kv_get", lambda: tq.kv_batch_get(keys, f"kv_{partition}")))
    tq.kv_clear(keys, f"kv_{partition}")
    return times


def timed(times: dict[str, float], metric: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    done = work()
    times[metric] = time.perf_counter() - began
    return done


def check(workload: Workload, made: Any, got: Any) -> None:
    for name in workload.names:
        values, counts = flat_bytes(got[name])
        if not same(made[name], values, counts):
            raise ValueError(f"{workload.name}: {name} did not come back as it was put")


def say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------- the two runs of it


class Run:
    """The program in a process of its own."""

    def __init__(self, *, activated: bool) -> None:
        command = [sys.executable, "-m", "bench.shim", "--program", *(["--activate"] if activated else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.module = self._line()["ready"]

    def measure(self, workload: str) -> dict[str, list[float]]:
        if self._process.stdin is not None:
            self._process.stdin.write(workload + "\n")
            self._process.stdin.flush()
        told: dict[str, list[float]] = self._line()
        return told

    def _line(self) -> Any:
        for line in self._process.stdout or ():
            if line.startswith("{"):  # Ray prints to standard output, too
                return json.loads(line)
        raise RuntimeError(f"the program ended with {self._process.wait()}; run it alone: {self._process.args!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


def compare(names: list[str], rounds: int) -> list[Result]:
    """Seconds of both by workload and metric, and the ratio of their medians."""
    raw: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        runs = {"original": stack.enter_context(Run(activated=False)), "ours": stack.enter_context(Run(activated=True))}
        print({who: run.module for who, run in runs.items()})
        for _ in range(rounds):
            for name in names:
                for who, run in runs.items():
                    for metric, times in run.measure(name).items():
                        raw.setdefault((name, metric, who), []).extend(times)
    return [result for name in names for metric in METRICS for result in _compared(name, metric, raw)]


def _compared(name: str, metric: str, raw: dict[tuple[str, str, str], list[float]]) -> list[Result]:
    original, ours = raw[name, metric, "original"], raw[name, metric, "ours"]
    ratio = statistics.median(original) / statistics.median(ours)
    return [
        Result(SCENARIO, "original", name, metric, "s", original, checked=True),
        Result(SCENARIO, "ours", name, metric, "s", ours, checked=True),
        Result(SCENARIO, "original_over_ours", name, metric, "ratio", [ratio]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="The drop-in beside the original, one program.")
    parser.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--activate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=list(NAMES), help="workloads")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.activate:
        from transferqueue.adapters.transfer_queue_hook import activate

        activate()
    if chosen.program:
        program()
        return 0
    by_hand = ByHand(SCENARIO)
    results = compare(chosen.only, chosen.rounds)
    path = chosen.out or RECORDS / f"{stamped('shim', by_hand.began)}.json"
    by_hand.tell(results, path, whole=True)
    worst = min(result.raw[0] for result in results if result.unit == "ratio")
    print(f"worst {worst:.1f} x, required {REQUIRED:g} x: {path}")
    return 0 if worst >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
