"""Trace replay: the published AsyncFlow trace through the real queue, in three modes.

Rules:

1. Server, leases, pacing and processes are those of production; only the engines are simulated (`engines`).
2. *serial*: reference waits for a whole iteration of rollout, and train for a whole iteration of reference. Rule reward
   and advantage need no accelerator and run beside: with that the published arithmetic (1743 s) comes out exactly.
   *streaming*: a row goes on as soon as it can; no row is made before the update it is bound to (staleness 0).
   *async*: the same with staleness and depth 1.
3. An iteration takes the time from the start to the last train service, over the number of iterations.
4. `ideal_s` computes the same run from the service times alone. What a run takes over that is the overhead of the queue,
   of timers and of the machine together; it is of real seconds, so it shrinks with the speed.
"""

from __future__ import annotations

import heapq
import subprocess
import sys
import threading
import time
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.errors import UsageError
from transferqueue.workflows.sim import asyncflow_trace as trace
from transferqueue.workflows.sim.engines import TABLE, WAIT_S, EngineSpec, ServiceRecord

Mode = Literal["serial", "streaming", "async"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
PULLED: Final = ("reference", "reward", "advantage", "train")
START_S: Final = 1.0
"""From "all are ready" to the start that all are told."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One replay. Seconds are published seconds (real ones times the speed)."""

    mode: Mode
    speed: float
    iteration_s: float
    ideal_iteration_s: float
    overhead: float
    spread: dict[str, float]
    rows: int
    timeline: dict[str, list[tuple[int, float, float]]]


def replay(mode: Mode, *, speed: float) -> Replayed:
    """Replay the trace ``speed`` times as fast as published. Blocks (three iterations: about 2,400 s / speed, serial twice).

    Raises `UsageError` for another mode or a speed that is not positive, before anything starts.
    """
    if mode not in MODES:
        raise UsageError(f'mode "{mode}" is not a replay; take one of {", ".join(MODES)}')
    if not 0 < speed < float("inf"):
        raise UsageError(f"speed={speed} is not a positive number of published seconds per second")
    with tq.connect("embedded", label="replay") as queue:
        table = _table(queue, mode)
        start, served = _run(queue.address, table, mode, speed)
    timeline = {
        stage: [(one.instance, (one.start - start) * speed, (one.end - start) * speed) for one in found]
        for stage, found in served.items()
    }
    took = max(end for _, _, end in timeline["train"]) / trace.ITERATIONS
    ideal = ideal_s(mode) / trace.ITERATIONS
    return Replayed(
        mode=mode,
        speed=speed,
        iteration_s=took,
        ideal_iteration_s=ideal,
        overhead=took / ideal - 1,
        spread={stage: spread(timeline[stage]) for stage in PULLED},
        rows=len(timeline["train"]),
        timeline=timeline,
    )


def spread(services: list[tuple[int, float, float]]) -> float:
    """Busy time of the instances of a stage: (max - min) / mean."""
    busy: dict[int, float] = {}
    for instance, start, end in services:
        busy[instance] = busy.get(instance, 0.0) + end - start
    return (max(busy.values()) - min(busy.values())) / (sum(busy.values()) / len(busy))


def tasks(mode: Mode) -> list[tq.Task]:
    """The stages, and in serial mode the two barriers; `clock` takes a whole iteration that is trained: it sets the pace."""
    serial = mode == "serial"
    barriers = [
        tq.Task("after_rollout", needs=["response"], gives=["reference_open"], lease_s=WAIT_S),
        tq.Task("after_reference", needs=["reference", "advantage"], gives=["train_open"], lease_s=WAIT_S),
    ]
    return [
        tq.Task("reference", needs=["response", "number"] + ["reference_open"] * serial, gives=["reference"]),
        tq.Task("reward", needs=["response", "number"], gives=["reward"]),
        tq.Task("advantage", needs=["reward", "number"], gives=["advantage"]),
        tq.Task("train", needs=["reference", "advantage", "number"] + ["train_open"] * serial, gives=["loss"]),
        tq.Task("clock", needs=["loss"], groups=tq.Complete(), lease_s=WAIT_S),
        *(barriers if serial else []),
    ]


def _table(queue: tq.Queue, mode: Mode) -> tq.Table:
    ahead = int(mode == "async")
    return queue.create_table(
        TABLE,
        tasks=tasks(mode),
        pacing=tq.Pacing("clock", batch_rows=trace.BATCH_ROWS, depth=ahead, max_staleness=ahead),
    )


def _run(address: str, table: tq.Table, mode: Mode, speed: float) -> tuple[float, dict[str, list[ServiceRecord]]]:
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for stage in trace.INSTANCES:
            orders = msgspec.json.encode(EngineSpec(stage=stage, address=address, speed=speed)).decode()
            command = [sys.executable, "-m", "transferqueue.workflows.sim.engines", orders]
            processes[stage] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for process in processes.values():
            _line(process)
        start = time.monotonic() + START_S
        for process in processes.values():
            if process.stdin is not None:
                process.stdin.write(f"{start!r}\n")
                process.stdin.flush()
        _drive(table, mode)
        served = {stage: msgspec.json.decode(_line(one), type=list[ServiceRecord]) for stage, one in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    return start, served


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise tq.errors.PeerError(
            f"an engine process ended with {process.wait()} before it had served; see its error above"
        )
    return line


def _drive(table: tq.Table, mode: Mode) -> None:
    """Advance the version when a whole iteration is trained, then let its ack admit the next; open the barriers of serial."""
    barriers = [threading.Thread(target=_open, args=(table, *names)) for names in _BARRIERS] if mode == "serial" else []
    for barrier in barriers:
        barrier.start()
    for version in range(1, trace.ITERATIONS + 1):
        batch = table.lease("clock", groups=1, timeout_s=WAIT_S)
        table.advance(version)
        batch.ack()
    for barrier in barriers:
        barrier.join()


_BARRIERS: Final = (("after_rollout", "reference_open"), ("after_reference", "train_open"))


def _open(table: tq.Table, task: str, field: str) -> None:
    for _ in range(trace.ITERATIONS):
        batch = table.lease(task, rows=trace.BATCH_ROWS, timeout_s=WAIT_S)
        given: dict[str, Any] = {field: [True] * trace.BATCH_ROWS}
        batch.ack(**given)


def ideal_s(mode: Mode) -> float:
    """Published seconds of the run from its service times alone: no queue, no timer, pulled in order of readiness."""
    free = {stage: [0.0] * trace.INSTANCES[stage] for stage in PULLED}
    begin = np.zeros(trace.INSTANCES["rollout"])
    trained = 0.0
    for iteration in range(trace.ITERATIONS):
        took = trace.services("rollout")[iteration]
        seen = (
            begin[None, :] + np.arange(1, trace.ROWS_PER_ROLLOUT + 1)[:, None] * took / trace.ROWS_PER_ROLLOUT
        ).ravel()
        seen += trace.LAG_S
        advantage = _pull(free, "advantage", iteration, _pull(free, "reward", iteration, seen))
        ready = np.full(seen.size, seen.max()) if mode == "serial" else seen
        ready = np.maximum(_pull(free, "reference", iteration, ready), advantage)
        ready = np.full(seen.size, ready.max()) if mode == "serial" else ready
        trained = float(_pull(free, "train", iteration, ready).max())
        begin = begin + took + trace.RESTART_S
        begin = begin if mode == "async" else np.maximum(begin, trained)
    return trained


def _pull(free: dict[str, list[float]], stage: str, iteration: int, ready: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each row of an iteration is through ``stage``, first ready first served."""
    done = np.empty_like(ready)
    instances = free[stage]
    heapq.heapify(instances)
    for row in np.argsort(ready, kind="stable"):
        end = max(heapq.heappop(instances), float(ready[row])) + float(trace.services(stage)[iteration, row])
        heapq.heappush(instances, end)
        done[row] = end
    return done
