"""Scenario: one process puts a batch, another gets it. Every contender, every workload, the same clock.

    python -m bench.transfer CONTENDER WORKLOAD... --out FILE

Metrics of a workload, in seconds a repetition:

- `put`: from the user's tensors to "others can get it", in the producer;
- `get`: from asking to arrays or tensors ready for use, in the consumer, the batch being there;
- `get_read`: the same, and every byte read once: where `get` copies nothing, this is when the bytes are paid for;
- `through`: from the start of the put to ready for use in the consumer, which was waiting before the put began.

Two batches of different bytes take turns, so that stale memory cannot pass for a delivery, and each is compared byte
for byte after the clock stopped. The producer is this process; the consumer is a child of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.contenders import contender
from bench.contenders.base import Endpoint
from bench.harness import Result, save_results
from bench.workloads import WORKLOADS, Flat, Workload, columns, picked, same, same_rows

SCENARIO = "transfer"


class NotDelivered(Exception):
    """The consumer got an error, or other bytes than were put."""


ANSWER_S = 120.0
WARM = 2
"""Unmeasured repetitions: one for each of the two batches."""


@dataclass
class Times:
    """Seconds of each repetition, by metric."""

    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    get_read: list[float] = field(default_factory=list)
    through: list[float] = field(default_factory=list)


# ---------------------------------------------------------------- the consumer, a process of its own


def consume(name: str, address: Any, control: Connection) -> None:
    """Serve the producer's orders until it says stop."""
    endpoint = contender(name).join(address)
    control.send("ready")
    expected: list[dict[str, Flat]] = []
    workload = WORKLOADS["dense_1"]
    while (order := control.recv())[0] != "stop":
        if order[0] == "begin":
            workload = WORKLOADS[order[1]]
            expected = _expected(workload)
            endpoint.begin(workload)
            control.send("begun")
        else:
            control.send("asking")
            control.send(_outcome(endpoint, workload, expected, order[1], order[2]))
    endpoint.close()


def _expected(workload: Workload) -> list[dict[str, Flat]]:
    made = [columns(workload, seed) for seed in (0, 1)]
    if not workload.pick:
        return made
    rows = picked(workload, 0)
    return [{name: flat.pick(rows) for name, flat in batch.items()} for batch in made]


def _outcome(
    endpoint: Endpoint, workload: Workload, expected: list[dict[str, Flat]], ticket: Any, turn: int
) -> dict[str, float] | str:
    """Times of one delivery, or what went wrong: the producer decides what that means."""
    try:
        return _deliver(endpoint, workload, expected, ticket, turn)
    except Exception as error:  # noqa: BLE001 — whatever a contender raises is this run's finding
        return f"{type(error).__name__}: {error}"


def _deliver(
    endpoint: Endpoint, workload: Workload, expected: list[dict[str, Flat]], ticket: Any, turn: int
) -> dict[str, float]:
    rows = picked(workload, 0).tolist() if workload.pick else None
    began = time.perf_counter()
    got = endpoint.get(ticket, rows)
    ready = time.perf_counter()
    read = sum(_sum(endpoint, got, name) for name in workload.wanted)
    ended = time.perf_counter()
    for name in workload.wanted:
        if not _as_put(endpoint, got, name, expected[turn][name]):
            raise ValueError(f"{workload.name}: {name} was not delivered as it was put")
    endpoint.finish(ticket, got)
    return {"get": ready - began, "get_read": ended - began, "at": ready, "sum": float(read)}


def _as_put(endpoint: Endpoint, got: Any, name: str, expected: Flat) -> bool:
    values, counts = endpoint.flat(got, name)
    return same(expected, values, counts) or (not endpoint.ordered and same_rows(expected, values, counts))


def _sum(endpoint: Endpoint, got: Any, name: str) -> int:
    values, _ = endpoint.flat(got, name)
    words = values[: len(values) // 8 * 8]
    return int(words.view("<u8").max(initial=0)) if words.ctypes.data % 8 == 0 else int(values.max(initial=0))


# ---------------------------------------------------------------- the producer: this process


def measure(
    endpoint: Endpoint, control: Connection, workload: Workload, repetitions: int, budget_s: float, through: bool
) -> Times:
    """Times of one workload: first put and get one after the other, then, for `through`, both at once."""
    endpoint.begin(workload)
    ask(control, ("begin", workload.name))
    batches = [endpoint.prepare(columns(workload, seed)) for seed in (0, 1)]
    times = Times()
    _alternate(endpoint, control, batches, times, repetitions, budget_s)
    if through:
        _together(endpoint, control, batches, times, repetitions, budget_s / 2)
    return times


def _alternate(
    endpoint: Endpoint, control: Connection, batches: list[Any], times: Times, repetitions: int, budget_s: float
) -> None:
    until = time.perf_counter() + budget_s
    for turn in range(WARM + repetitions):
        began = time.perf_counter()
        ticket = endpoint.put(batches[turn % 2])
        took = time.perf_counter() - began
        control.send(("get", ticket, turn % 2))
        answer(control)
        got = answer(control)
        if turn >= WARM:
            times.put.append(took)
            times.get.append(got["get"])
            times.get_read.append(got["get_read"])
        if len(times.put) >= 3 and time.perf_counter() > until:
            break


def _together(
    endpoint: Endpoint, control: Connection, batches: list[Any], times: Times, repetitions: int, budget_s: float
) -> None:
    until = time.perf_counter() + budget_s
    for turn in range(repetitions):
        control.send(("get", None, turn % 2))
        answer(control)  # the consumer is about to ask
        began = time.perf_counter()
        endpoint.put(batches[turn % 2])
        got = answer(control)
        times.through.append(got["at"] - began)
        if len(times.through) >= 3 and time.perf_counter() > until:
            break


def ask(control: Connection, order: Any) -> Any:
    control.send(order)
    return answer(control)


def answer(control: Connection) -> Any:
    if not control.poll(ANSWER_S):
        raise TimeoutError(f"the consumer did not answer in {ANSWER_S:.0f} s")
    got = control.recv()
    if isinstance(got, str) and got not in ("ready", "begun", "asking"):
        raise NotDelivered(got)
    return got


def to_results(name: str, workload: Workload, times: Times) -> list[Result]:
    sizes = {"put": workload.nbytes, "get": workload.bytes_got}
    return [
        Result(SCENARIO, name, workload.name, metric, "s", raw, sizes.get(metric, workload.bytes_got), checked=True)
        for metric, raw in vars(times).items()
        if raw
    ]


def skipped(name: str, workload: Workload, why: str) -> Result:
    return Result(SCENARIO, name, workload.name, "put", "s", [], workload.nbytes, skipped=why)


def run(name: str, workloads: list[Workload], repetitions: int, budget_s: float, through: bool) -> list[Result]:
    """Start the contender, a consumer beside it, and measure each workload."""
    peer = contender(name)
    address = peer.start()
    try:
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        consumer = spawn.Process(target=consume, args=(name, address, there), daemon=True)
        consumer.start()
        there.close()
        answer(here)
        endpoint = peer.join(address)
        results = []
        for workload in workloads:
            if why := peer.unsupported(workload):
                results.append(skipped(name, workload, why))
                continue
            try:
                times = measure(endpoint, here, workload, repetitions, budget_s, through)
            except NotDelivered as error:
                results.append(skipped(name, workload, f"failed: {error}"))
            else:
                results += to_results(name, workload, times)
        here.send(("stop",))
        consumer.join(20)
        endpoint.close()
        return results
    finally:
        peer.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("contender")
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=4.0)
    parser.add_argument("--no-through", action="store_true", help="put and get only")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    workloads = [WORKLOADS[name] for name in chosen.workloads]
    through = not chosen.no_through
    save_results(chosen.out, run(chosen.contender, workloads, chosen.repetitions, chosen.budget_s, through))


if __name__ == "__main__":
    main()
