"""Streaming steps against whole batches, with paced generation and paced training:
``python -m bench.streaming_trainer --into bench/records``.

Generation and training take given times (they sleep), so the figures are about what waits for what, not about the
machine's cores: the queue, the leases, the order and the acks are real. Responses have lognormal lengths. Expected,
written before the first run: in sync mode a whole batch takes ``t_B + Bc`` and a streaming step
``max_j [t_jm + (B/m - j + 1) mc]``; with generation and training about as long, and groups that end over all of the
generation, more than 1.25 times the samples a second. In async mode both take about ``max(t_B, Bc)``, so about the
same.
"""

from __future__ import annotations

import argparse
import heapq
import threading
import time
from contextlib import suppress
from typing import Final, Literal

import numpy as np

import transferqueue as tq
from bench.run_record import into_option, save_record, show
from transferqueue.errors import DeadlineExceeded, EndOfTable, FlowSignal, LeaseExpired, NotFound, Sealed, UsageError
from transferqueue.observe.measurement_record import MeasuredResult, Measurement, single, summarize
from transferqueue.workflows.job.training.gather import StepShape
from transferqueue.workflows.job.training.stream import RowStream, StreamTerms

Mode = Literal["sync", "async"]
PROMPTS, GROUP, SLOTS, STEPS = 16, 4, 16, 6
ROWS: Final = PROMPTS * GROUP
TOKEN_S: Final = 0.004
"""Time of a generated token, of every slot at once."""
TOKENS: Final = 90
"""Median length of a response."""
ROW_S: Final = 0.026
"""Time of a row's forward and backward pass: a batch is trained in about the time that it is generated in."""


def length(ordinal: int) -> int:
    """The length of a response: the same in every run."""
    return int(np.clip(np.random.default_rng(ordinal).lognormal(np.log(TOKENS), 0.4), 20, 4 * TOKENS))


class SlotEngine:
    """Generates with as many slots; a row ends when its tokens have been counted out."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        running: list[tuple[float, int, tq.Batch]] = []
        with tq.connect(self._address, label="engine") as queue:
            table = queue.table("rollouts")
            while True:
                try:
                    self._take(table, running)
                except (EndOfTable, Sealed):
                    if not running:
                        return
                if running:
                    ends, row, batch = running[0]
                    time.sleep(max(0.0, ends - time.monotonic()))
                    heapq.heappop(running)
                    with suppress(LeaseExpired):  # dropped at the end, as surplus
                        batch.ack([row], response=[0.0])

    def _take(self, table: tq.Table, running: list[tuple[float, int, tq.Batch]]) -> None:
        free = SLOTS - len(running)
        if not free:
            return
        try:
            batch = table.lease("rollout", rows=free, at_least=1, timeout_s=0.0 if running else 0.2)
        except DeadlineExceeded:
            return
        for row, ordinal in zip(batch.rows.tolist(), batch.ordinal.tolist(), strict=True):
            heapq.heappush(running, (time.monotonic() + TOKEN_S * length(ordinal), row, batch))


def prompts(address: str, stop: threading.Event) -> None:
    """Put prompts as fast as the pacing admits them."""
    with tq.connect(address, label="prompts") as queue:
        table, number = queue.table("rollouts"), 0
        while not stop.is_set():
            try:
                with table.reserve(GROUP, timeout_s=0.2) as reservation:
                    ordinals = [number * GROUP + sample for sample in range(GROUP)]
                    table.put(
                        prompt=ordinals, group_id=number, group_size=GROUP, ordinal=ordinals, reservation=reservation
                    )
                    number += 1
            except (EndOfTable, Sealed):
                return
            except FlowSignal:
                continue


def step_times(mode: Mode, *, stream: bool) -> tuple[list[float], list[float]]:
    """Seconds of each step but the first, and seconds in which the trainer waited for rows."""
    stop = threading.Event()
    with tq.connect("embedded") as queue:
        table = queue.create_table(
            "rollouts",
            tasks=[
                tq.Task("rollout", needs=["prompt"], gives=["response"]),
                tq.Task("train", needs=["response"], groups=tq.Complete()),
            ],
            pacing=tq.Pacing("train", batch_rows=ROWS, depth=0 if mode == "sync" else 1, max_staleness=1),
        )
        engine = SlotEngine(queue.address)
        source = threading.Thread(target=prompts, args=(queue.address, stop), daemon=True)
        source.start()
        terms = StreamTerms(
            task="train",
            shape=StepShape(units=PROMPTS, stream=stream, window=float("inf") if mode == "sync" else 1.0),
            whole=True,
            group_rows=GROUP,
            fields=("response",),
        )
        rows = RowStream(table, terms, emit=lambda _: None)
        ends, idle = [], []
        for step in range(STEPS):
            gathered = rows.step(lambda _, ids: time.sleep(ROW_S * len(ids)))
            if gathered is None:
                raise SystemExit("the table ended early")
            rows.finish()
            table.advance(step + 1)
            rows.ack(gathered, -1)
            ends.append(time.monotonic())
            idle.append(gathered.idle_s)
        stop.set()
        source.join()
        table.seal()
        with suppress(NotFound, UsageError):  # nothing is left
            table.drop(table.read(fields=[]).rows, "surplus")
        engine.join()
    return np.diff(ends).tolist(), idle[1:]


def ready_times(step: int) -> list[float]:
    """When each group of a synchronous step is ready, from its beginning: rows take the first free slot, in order."""
    slots = [0.0] * SLOTS
    ends = []
    for row in range(ROWS):
        begins = heapq.heappop(slots)
        ends.append(begins + TOKEN_S * length(step * ROWS + row))
        heapq.heappush(slots, ends[-1])
    return sorted(max(ends[first : first + GROUP]) for first in range(0, ROWS, GROUP))


def predicted(step: int, *, stream: bool) -> float:
    """Seconds of a synchronous step by the formula."""
    ready = ready_times(step)
    if not stream:
        return ready[-1] + ROWS * ROW_S
    left = len(ready)
    return max(time_s + (left - at) * GROUP * ROW_S for at, time_s in enumerate(ready))


def results(runs: int) -> list[MeasuredResult]:
    """Measure all four cases in turns."""
    found: dict[tuple[Mode, bool], list[float]] = {}
    idle: dict[tuple[Mode, bool], list[float]] = {}
    for _ in range(runs):
        for mode in ("sync", "async"):
            for stream in (False, True):
                times, waited = step_times(mode, stream=stream)  # type: ignore[arg-type]
                found.setdefault((mode, stream), []).extend(times)  # type: ignore[arg-type]
                idle.setdefault((mode, stream), []).extend(w / t for w, t in zip(waited, times, strict=True))  # type: ignore[arg-type]
    lines = []
    for (mode, stream), times in found.items():
        name = f"{mode}, {'streaming' if stream else 'whole batch'}"
        lines.append(summarize(f"{name}: samples a second", "1/s", [ROWS / time_s for time_s in times]))
        lines.append(summarize(f"{name}: trainer idle", "ratio", idle[mode, stream]))
        if mode == "sync":
            expected = np.mean([predicted(step, stream=stream) for step in range(1, STEPS)])
            lines.append(single(f"{name}: samples a second by the formula", "1/s", float(ROWS / expected)))
    for mode in ("sync", "async"):
        whole, streamed = (np.median(found[mode, stream]) for stream in (False, True))  # type: ignore[index]
        lines.append(single(f"{mode}: streaming against whole batches", "ratio", float(whole / streamed)))
    return lines


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2)
    into_option(parser)
    options = parser.parse_args()
    measurement = Measurement()
    lines = results(options.runs)
    show(lines)
    details = {"prompts": PROMPTS, "group": GROUP, "slots": SLOTS, "token_s": TOKEN_S, "row_s": ROW_S, "steps": STEPS}
    save_record(measurement, options.into, "streaming-trainer", lines, details)


if __name__ == "__main__":
    main()
