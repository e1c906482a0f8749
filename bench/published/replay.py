"""Trace replay: the published AsyncFlow trace through the real queue, in three modes:
``python -m bench.published.replay``.

Rules:

1. Server, leases, pacing and processes are those of production; only the engines are simulated (`engines`).
2. *serial*: reference waits for a whole iteration of rollout, and train for a whole iteration of reference. Rule-based
   reward and advantage need no accelerator and run beside them: with this assumption the time computed from the
   digitised trace (1743 s) comes out within 1 %. *streaming*: each stage takes a row as soon as the row is ready; no
   row is made before the weights of its version (staleness 0). *async*: the same with staleness and depth 1.
3. The time of an iteration is the time from the start to the last train service, over the number of iterations.
4. `ideal_s` computes the same run from the service times alone. The time of a run above the ideal is the overhead of
   the queue, of timers and of the machine together. It is real time, so its share falls with a lower speed.
"""

from __future__ import annotations

import argparse
import heapq
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from bench.published import asyncflow_trace as trace
from bench.published.engines import TABLE, WAIT_S, EngineSpec, ServiceRecord
from transferqueue.errors import UsageError

Mode = Literal["serial", "streaming", "async"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
PULLED: Final = ("reference", "reward", "advantage", "train")
CHECKOUT: Final = Path(__file__).resolve().parents[2]
SPEED_DEFAULT: Final = 40.0
"""A micro-batch then takes 100 to 120 ms and a train step 60: much longer than a lease, also on a busy machine."""
START_S: Final = 1.0
"""Seconds between the last process being ready and the common start, which each process reads first."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One replay. Seconds are those of the trace (real ones times the speed)."""

    mode: Mode
    speed: float
    iteration_s: float
    ideal_iteration_s: float
    overhead: float
    spread: dict[str, float]
    rows: int
    timeline: dict[str, list[tuple[int, float, float]]]


def replay(mode: Mode, *, speed: float) -> Replayed:
    """Replay the trace `speed` times as fast as it was recorded. Blocks (three iterations: about 2,400 s / speed,
    serial twice that).

    Raises `UsageError` for another mode or a speed that is not positive, before anything starts.
    """
    if mode not in MODES:
        raise UsageError(f'mode "{mode}" is not a replay; take one of {", ".join(MODES)}')
    if not 0 < speed < float("inf"):
        raise UsageError(f"speed={speed} is not a positive number of seconds of the trace per second")
    with tq.connect("embedded", label="replay") as queue:
        table = _table(queue, mode)
        start, served = _run(queue.address, table, mode, speed)
    timeline = {
        stage: [(record.instance, (record.start - start) * speed, (record.end - start) * speed) for record in records]
        for stage, records in served.items()
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
    """Return (max - min) / mean of the busy times of a stage's instances."""
    busy: dict[int, float] = {}
    for instance, start, end in services:
        busy[instance] = busy.get(instance, 0.0) + end - start
    return (max(busy.values()) - min(busy.values())) / (sum(busy.values()) / len(busy))


def tasks(mode: Mode) -> list[tq.Task]:
    """Return the stages, in serial mode also the two barriers. The task `clock` takes whole trained iterations and
    paces the table."""
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
            spec = msgspec.json.encode(EngineSpec(stage=stage, address=address, speed=speed)).decode()
            command = [sys.executable, "-m", "bench.published.engines", spec]
            processes[stage] = subprocess.Popen(
                command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        for process in processes.values():
            _line(process)
        start = time.monotonic() + START_S
        for process in processes.values():
            if process.stdin is not None:
                process.stdin.write(f"{start!r}\n")
                process.stdin.flush()
        _drive(table, mode)
        served = {
            stage: msgspec.json.decode(_line(process), type=list[ServiceRecord]) for stage, process in processes.items()
        }
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
    """Advance the version after each trained iteration, then ack it, which admits the next. In serial mode, run the
    barriers too."""
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
        results: dict[str, Any] = {field: [True] * trace.BATCH_ROWS}
        batch.ack(**results)


def ideal_s(mode: Mode) -> float:
    """Compute the run's seconds from the service times of the trace alone: no queue, no timers, rows in order of
    readiness."""
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
    """Return when each row of an iteration leaves `stage`; the row that is ready first is served first."""
    done = np.empty_like(ready)
    instances = free[stage]
    heapq.heapify(instances)
    for row in np.argsort(ready, kind="stable"):
        end = max(heapq.heappop(instances), float(ready[row])) + float(trace.services(stage)[iteration, row])
        heapq.heappush(instances, end)
        done[row] = end
    return done


def main() -> None:
    """Replay the trace in every mode, write a record and a picture, and print the table. About eight minutes at the
    default speed."""
    from bench.published import replay_record
    from bench.run_record import RECORDS, stamped
    from transferqueue.observe.measurement_record import Measurement

    options = argparse.ArgumentParser(prog="python -m bench.published.replay", description=main.__doc__)
    options.add_argument("--speed", type=float, default=SPEED_DEFAULT, help="seconds of the trace per second")
    options.add_argument("--out", type=Path, default=RECORDS, help="folder of record and picture")
    chosen = options.parse_args()
    measurement = Measurement()
    runs = [replay(mode, speed=chosen.speed) for mode in MODES]
    name = stamped("replay", measurement)
    record = measurement.record("replay", replay_record.results(runs), details=replay_record.details(runs))
    record.save(chosen.out / f"{name}.json")
    replay_record.draw(chosen.out / f"{name}.png", runs)
    _show(runs, replay_record.speedups(runs))
    print(f"wrote {chosen.out / name}.json and .png")


def _show(runs: Sequence[Replayed], speedups: dict[str, dict[str, float]]) -> None:
    print(
        f"{'mode':10} {'iteration':>10} {'serial / it':>12} {'digitised':>10} {'ablation':>9} {'over ideal':>11} "
        f"{'spread':>8}"
    )
    for run in runs:
        ratio = speedups.get(run.mode, {"ours": 1.0, "computed": 1.0, "ablation": 1.0})
        print(
            f"{run.mode:10} {run.iteration_s:>8,.0f} s {ratio['ours']:>12.2f} {ratio['computed']:>10.2f} "
            f"{ratio['ablation']:>9.2f} {run.overhead:>11.1%} {max(run.spread.values()):>8.1%}"
        )
    print(
        "digitised: serial / it computed from service times digitised from figure 11 (32B); spread: the largest of a "
        "pulled stage"
    )
    print("ablation: what the paper states over serial, for a 7B on 512 NPUs: another model than the one replayed")


if __name__ == "__main__":
    main()
