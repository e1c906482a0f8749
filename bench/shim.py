"""One program written for ``transfer_queue``, run with the original and, after ``activate()``, with the drop-in; and
the same work by this package's own calls.

    .venv-shim/bin/python -m bench.shim [--out RECORD.json]

`program` below is the user's: it knows nothing of us. It is started twice, each time in a process with a Ray of its
own; `native` does the same with tables. The three take turns, workload by workload and round by round, so that they
meet the same machine. Seconds a repetition:

- `put`: ``client.put`` of a TensorDict; `get`: ``client.get_meta`` for the rows and ``client.get_data`` of them;
- `kv_put`, `kv_get`: ``kv_batch_put`` and ``kv_batch_get`` of the same batch by key;
- `two`: ``client.get_data`` over the metadata of two partitions, each with the batch;
- `beside`: ``client.async_put`` of the batch while twelve ``async_get_meta`` wait for samples. The original is not
  asked: its `get_meta` gives up after a second.

What was got is compared byte for byte with what was put after the clock stopped. The ratios are the original's median
over ours, and ours over the native one.
"""

from __future__ import annotations

import argparse
import asyncio
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

import numpy as np
import torch

import transferqueue as tables
from bench.contenders.tensors import flat_bytes, tensor
from bench.harness import Result
from bench.run_record import RECORDS, ByHand, stamped
from bench.server import Server
from bench.workloads import WORKLOADS, Workload, columns, same

SCENARIO = "shim"
NAMES = ("dense_1", "dense_8", "dense_32", "ragged_1", "ragged_8", "ragged_32")
METRICS = ("put", "get", "kv_put", "kv_get", "two", "beside")
WAITING = 12
RUNS = ("original", "ours", "native")
REQUIRED = 5.0
NATIVE_MOST = 2.0
ROUNDS = 4
REPETITIONS = 3
TASK = "train"


# ---------------------------------------------------------------- the user's program


def program(*, activated: bool) -> None:
    """Serve orders on standard input: the name of a workload, or nothing more. One line of JSON answers each."""
    import ray
    import transfer_queue as tq

    logging.disable(logging.INFO)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
    tq.init({"controller": {"polling_mode": not activated}, "backend": {"storage_backend": "SimpleStorage"}})
    serve(tq.__file__, lambda workload, number: exchange(tq, workload, number, waits=activated))
    tq.close()
    ray.shutdown()


def serve(ready: str, exchanged: Callable[[Workload, int], dict[str, float]]) -> None:
    """Carry out the orders on standard input, and answer each."""
    say({"ready": ready})
    number = 0
    for line in sys.stdin:
        times: dict[str, list[float]] = {}
        for repetition in range(1 + REPETITIONS):
            number += 1
            for metric, took in exchanged(WORKLOADS[line.strip()], number).items():
                if repetition:  # the first is not counted
                    times.setdefault(metric, []).append(took)
        say(times)


def exchange(tq: Any, workload: Workload, number: int, *, waits: bool) -> dict[str, float]:
    """Put one batch and get it back, by metadata and by key; seconds of each. waits: also beside calls that wait."""
    from tensordict import TensorDict

    made = columns(workload, number % 2)
    batch = TensorDict({name: tensor(flat) for name, flat in made.items()}, batch_size=workload.rows)
    client, partition, keys = tq.get_client(), f"{workload.name}_{number}", [str(row) for row in range(workload.rows)]
    other = f"{partition}_b"
    times: dict[str, float] = {}

    def chosen(name: str, task: str = TASK) -> Any:
        return client.get_meta(
            data_fields=workload.names, batch_size=workload.rows, partition_id=name, mode="fetch", task_name=task
        )

    timed(times, "put", lambda: client.put(batch, partition_id=partition))
    check(workload, made, timed(times, "get", lambda: client.get_data(chosen(partition))))
    client.put(batch, partition_id=other)
    both = tq.BatchMeta.concat([chosen(partition, "two"), chosen(other, "two")])
    check(workload, made, timed(times, "two", lambda: client.get_data(both)), copies=2)
    if waits:
        times["beside"] = asyncio.run(beside(client, batch, f"{partition}_c"))
        client.clear_partition(f"{partition}_c")
    client.clear_partition(partition)
    client.clear_partition(other)
    timed(times, "kv_put", lambda: tq.kv_batch_put(keys, f"kv_{partition}", batch))
    check(workload, made, timed(times, "kv_get", lambda: tq.kv_batch_get(keys, f"kv_{partition}")))
    tq.kv_clear(keys, f"kv_{partition}")
    return times


async def beside(client: Any, batch: Any, partition: str) -> float:
    """Seconds of a put while calls wait for samples of another field, which come afterwards."""
    from tensordict import TensorDict

    asked = [client.async_get_meta(["late"], 1, partition, task_name=f"waits_{place}") for place in range(WAITING)]
    waiting = [asyncio.create_task(each) for each in asked]
    await asyncio.sleep(0.05)  # they are at the controller
    began = time.perf_counter()
    metadata = await client.async_put(batch, partition_id=partition)
    took = time.perf_counter() - began
    await client.async_put(TensorDict({"late": torch.zeros(len(metadata))}, batch_size=len(metadata)), metadata)
    await asyncio.gather(*waiting)
    return took


# ---------------------------------------------------------------- the same, by tables


def native() -> None:
    """Serve the same orders with a server in a process of its own, as the drop-in has it."""
    server = Server()
    with tables.connect(server.address) as queue:
        serve("native", lambda workload, number: exchange_rows(queue, server.address, workload, number))
    server.stop()


def exchange_rows(queue: Any, address: str, workload: Workload, number: int) -> dict[str, float]:
    """Put one batch and get it back, by lease and by key; seconds of each."""
    made = columns(workload, number % 2)
    batch, keys = {name: tensor(flat) for name, flat in made.items()}, [str(row) for row in range(workload.rows)]
    times: dict[str, float] = {}

    def table_of(name: str, *needs: str) -> Any:
        task = tables.Task(TASK, needs=needs or workload.names)
        return queue.create_table(f"{workload.name}_{number}_{name}", tasks=[task], retention=tables.Manual())

    def columns_of(read: Any) -> dict[str, Any]:
        ragged = workload.kind == "ragged"
        return {name: read[name].nested() if ragged else read[name].torch() for name in workload.names}

    def leased(table: Any) -> Any:
        with table.lease(TASK, rows=workload.rows, timeout_s=60) as rows:
            return columns_of(rows)

    def two() -> Any:
        parts = [columns_of(each.read(rows)) for each, rows in ((first, rows_a), (second, rows_b))]
        return {name: joined(parts[0][name], parts[1][name]) for name in workload.names}

    first, second, keyed = (table_of(name) for name in ("a", "b", "kv"))
    rows_a = timed(times, "put", lambda: first.put(**batch))
    check(workload, made, timed(times, "get", lambda: leased(first)))
    rows_b = second.put(**batch)
    check(workload, made, timed(times, "two", two), copies=2)
    times["beside"] = asyncio.run(beside_leases(address, f"{workload.name}_{number}_c", batch))
    timed(times, "kv_put", lambda: keyed.put(key=keys, **batch))
    check(workload, made, timed(times, "kv_get", lambda: columns_of(keyed.read(keyed.find(keys)))))
    for table in (first, second, keyed):
        queue.drop_table(table.name)
    return times


def joined(one: Any, other: Any) -> Any:
    if not one.is_nested:
        return torch.cat([one, other])
    values = torch.cat([one.values(), other.values()])
    return torch.nested.nested_tensor_from_jagged(
        values, torch.cat([one.offsets(), other.offsets()[1:] + len(one.values())])
    )


async def beside_leases(address: str, name: str, batch: Any) -> float:
    """Seconds of a put while leases wait for rows."""
    async with await tables.aconnect(address) as queue:
        tasks = [tables.Task(f"waits_{place}", needs=["late"]) for place in range(WAITING)]
        table = await queue.create_table(name, tasks=tasks, retention=tables.Manual())
        waiting = [asyncio.create_task(table.lease(task.name, rows=1, timeout_s=60)) for task in tasks]
        await asyncio.sleep(0.05)  # they are at the server
        began = time.perf_counter()
        rows = await table.put(**batch)
        took = time.perf_counter() - began
        await table.update(rows, late=torch.zeros(len(rows)))
        for lease in await asyncio.gather(*waiting):
            await lease.ack()
        await queue.drop_table(name)
    return took


def timed(times: dict[str, float], metric: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    done = work()
    times[metric] = time.perf_counter() - began
    return done


def check(workload: Workload, made: Any, got: Any, copies: int = 1) -> None:
    """Compare what was got with what was put. copies: how often each row is in it, one whole batch after another."""
    for name in workload.names:
        values, counts = flat_bytes(got[name])
        parts = zip(np.split(values, copies), np.split(counts, copies), strict=True)
        if not all(same(made[name], *part) for part in parts):
            raise ValueError(f"{workload.name}: {name} did not come back as it was put")


def say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------- the three runs of it


class Run:
    """The program in a process of its own."""

    def __init__(self, who: str) -> None:
        command = [sys.executable, "-m", "bench.shim", "--program", who]
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
    """Seconds of each run by workload and metric, and the ratios of their medians."""
    raw: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        runs = {who: stack.enter_context(Run(who)) for who in RUNS}
        print({who: run.module for who, run in runs.items()})
        for _ in range(rounds):
            for name in names:
                for who, run in runs.items():
                    for metric, times in run.measure(name).items():
                        raw.setdefault((name, metric, who), []).extend(times)
    return [result for name in names for metric in METRICS for result in _compared(name, metric, raw)]


def _compared(name: str, metric: str, raw: dict[tuple[str, str, str], list[float]]) -> list[Result]:
    measured = {who: raw[name, metric, who] for who in RUNS if (name, metric, who) in raw}
    results = [Result(SCENARIO, who, name, metric, "s", times, checked=True) for who, times in measured.items()]
    for over, under in (("original", "ours"), ("ours", "native")):
        if over in measured:
            ratio = statistics.median(measured[over]) / statistics.median(measured[under])
            results.append(Result(SCENARIO, f"{over}_over_{under}", name, metric, "ratio", [ratio]))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="The drop-in beside the original and the native calls, one program.")
    parser.add_argument("--program", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=list(NAMES), help="workloads")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.program:
        return run(chosen.program)
    by_hand = ByHand(SCENARIO)
    results = compare(chosen.only, chosen.rounds)
    path = chosen.out or RECORDS / f"{stamped('shim', by_hand.began)}.json"
    by_hand.tell(results, path, whole=True)
    worst = min(result.raw[0] for result in results if result.contender == "original_over_ours")
    most = max(result.raw[0] for result in results if result.contender == "ours_over_native")
    print(f"worst {worst:.1f} x the original, required {REQUIRED:g}; most {most:.1f} x native: {path}")
    return 0 if worst >= REQUIRED and most <= NATIVE_MOST else 1


def run(who: str) -> int:
    """Be one of the three."""
    if who == "ours":
        from transferqueue.adapters.transfer_queue_hook import activate

        activate()
    if who == "native":
        native()
    else:
        program(activated=who == "ours")
    return 0


if __name__ == "__main__":
    sys.exit(main())
