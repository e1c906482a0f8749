"""StreamRL's ways of overlapping generation and training, live and by turns: ``python -m bench.stream_modes``.

A trainer and two engines around one generation service (`workflows.service`). The engines take the published times of a
7B model and the trainer a given time for each row: for a batch `--share` of what its generation takes in the given
order (1: StreamRL's balance; 0.6: generation is the bottleneck), so the figures are about what waits for what and not
about cores. Each mode adds to the one before:

- *serial*: the trainer waits for the whole batch, and generation for the update;
- *mini-batch*: a step is four requests of fixed prompts; the trainer takes each as soon as it is whole;
- *+ dynamic batch*: one request; the trainer takes what is finished, a sixteenth of a batch or more;
- *+ asynchronous*: the next batch is generated while this one is trained on, a version behind;
- *+ dispatch*: prompts go to engines by expected length (`LengthRequests`), with a ranker that has seen 2,048 others.

Expected, written before the first run, in balance: 1.00, 1.2 to 1.4, 1.4 to 1.7, 1.6 to 1.95, 1.6 to 2: dispatch
shortens a side that async already hides in part. At 0.6, before its first run: 1.00, 1.1 to 1.3, 1.3 to 1.5, 1.5 to
1.6, 1.7 to 1.9. Takes about five minutes; needs no core to itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from bench.dispatch_live import Batch, engines, taught
from bench.published.dispatch import PTL, ptl_s
from bench.run_record import RECORDS, save_record
from transferqueue.adapters.protocols import Prompt
from transferqueue.observe.measurement_record import Measurement, single
from transferqueue.workflows.dispatch.channels import plan_channel, publish
from transferqueue.workflows.planner.batch_plan import Plan
from transferqueue.workflows.planner.engine_times import LaneEngine, generation_s
from transferqueue.workflows.service import CompletionStream, LengthRequests, Service, stream_engines

MODES: Final = ("serial", "mini-batch", "+ dynamic batch", "+ asynchronous", "+ dispatch")
PUBLISHED: Final = {
    "serial": "1.00 (colocated)",
    "+ dispatch": "1.08 alone; 1.23 with disaggregated streaming; 1.48 with asynchronous too",
}
MINIS: Final = 4
PARTS: Final = 16
Request = Callable[[Sequence[Prompt]], CompletionStream]


class Trainer:
    """Trains by waiting: `row_s` for each row."""

    def __init__(self, service: Service, row_s: float, learn: Callable[[tq.Batch], None] | None) -> None:
        self._service, self._row_s, self._learn = service, row_s, learn
        self.idle_s = 0.0

    def train(self, streams: Sequence[CompletionStream], rows: int, at_least: int) -> None:
        """Take the streams one after the other, in batches of `at_least` to `rows`, and then update the weights."""
        for stream in streams:
            for batch in self._timed(stream.batches(rows, at_least=at_least)):
                if self._learn is not None:
                    self._learn(batch)
                time.sleep(self._row_s * len(batch))
                batch.ack()
        self._service.update({"none": np.zeros(1, np.float32)})

    def _timed(self, batches: Iterator[tq.Batch]) -> Iterator[tq.Batch]:
        while True:
            waited = time.monotonic()
            batch = next(batches, None)
            self.idle_s += time.monotonic() - waited
            if batch is None:
                return
            yield batch


def run(mode: str, service: Service, request: Request, trainer: Trainer, batches: Sequence[Batch]) -> float:
    """Train on all batches in one mode; return the seconds of all but the first."""
    rows = len(batches[0].prompts)
    at_least = {"serial": rows, "mini-batch": rows // MINIS}.get(mode, rows // PARTS)
    ahead = mode in ("+ asynchronous", "+ dispatch")
    parts = MINIS if mode == "mini-batch" else 1

    def requested(batch: Batch) -> list[CompletionStream]:
        size = rows // parts
        return [request(batch.prompts[at : at + size]) for at in range(0, rows, size)]

    started, pending = 0.0, requested(batches[0]) if ahead else None
    for number, batch in enumerate(batches):
        if number == 1:
            started, trainer.idle_s = time.monotonic(), 0.0
        streams = pending if pending is not None else requested(batch)
        if ahead:
            pending = requested(batches[number + 1]) if number + 1 < len(batches) else None
        trainer.train(streams, rows // parts, min(at_least, rows // parts))
    return time.monotonic() - started


def balanced_row_s(batches: Sequence[Batch], slots: int) -> float:
    """Seconds of training a row, such that a batch takes as long as its generation in the given order."""
    lanes = [LaneEngine(slots, PTL), LaneEngine(slots, PTL)]
    seconds = [generation_s(batch.lengths, batch.lengths, lanes, longest_first=False) for batch in batches]
    return float(np.mean(seconds)) / len(batches[0].prompts)


def measure(options: argparse.Namespace) -> None:
    """Run every mode on the same batches at each share, print the tables, and write a record."""
    measurement, results = Measurement(), list[Any]()
    batches = [Batch(options.rows, 1.0, seed) for seed in range(options.steps + 1)]
    balanced_s = balanced_row_s(batches, options.slots)
    with tempfile.TemporaryDirectory(prefix="transferqueue-modes-") as directory, tq.connect(label="trainer") as queue:
        lengths = Path(directory, "lengths")
        lengths.mkdir()
        for batch in batches:
            batch.write(lengths)
        service = Service.init_engines(queue, stream_engines(rows_max=1 << 14))
        service.update({"none": np.zeros(1, np.float32)})
        with engines(queue.address, Path(directory), lengths, options.slots, paced=True):
            for share in options.share:
                results += _table(share, queue, service, batches, share * balanced_s, options)
            service.seal()
    details = {"paced": True, "rows": options.rows, "slots": options.slots, "steps": options.steps, "token_s": ptl_s(1)}
    save_record(measurement, options.out, "stream-modes", results, details)


def _table(
    share: float,
    queue: tq.Queue,
    service: Service,
    batches: Sequence[Batch],
    row_s: float,
    options: argparse.Namespace,
) -> list[Any]:
    """Measure every mode; print a row of the table for each."""
    base_s, results = 0.0, list[Any]()
    print(
        f"training takes {share:g} of generation\n| mode | step | over serial | trainer idle | published "
        "|\n|---|---|---|---|---|"
    )
    for mode in MODES:
        seconds, idle = _one(mode, queue, service, batches, row_s, options)
        base_s = base_s or seconds
        published = PUBLISHED.get(mode, "none")
        print(f"| {mode} | {seconds:.2f} s | {base_s / seconds:.2f} | {idle:.0%} | {published} |", flush=True)
        results += [
            single(f"{share:g}/{mode}/step", "s", round(seconds, 3)),
            single(f"{share:g}/{mode}/over serial", "ratio", round(base_s / seconds, 3)),
            single(f"{share:g}/{mode}/trainer idle", "ratio", round(idle, 3)),
        ]
    return results


def _one(
    mode: str,
    queue: tq.Queue,
    service: Service,
    batches: Sequence[Batch],
    row_s: float,
    options: argparse.Namespace,
) -> tuple[float, float]:
    """Return seconds of a step, and the share in which the trainer waited."""
    if mode == "+ dispatch":
        with LengthRequests(
            queue, service, batch_rows=options.rows, overlapping=True, dispatcher=taught(1.0, options.rows)
        ) as requests:
            trainer = Trainer(service, row_s, requests.learn)
            seconds = run(mode, service, requests.generate, trainer, batches)
    else:
        publish(queue, plan_channel(service.table.name), Plan(why="given order"))
        trainer = Trainer(service, row_s, None)
        seconds = run(mode, service, service.generate, trainer, batches)
    return seconds / options.steps, trainer.idle_s / seconds


def main() -> None:
    """Measure."""
    options = argparse.ArgumentParser(prog="python -m bench.stream_modes", description=__doc__)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--rows", type=int, default=128)
    options.add_argument(
        "--share", type=float, nargs="+", default=[1.0, 0.6], help="seconds of training over those of generation"
    )
    options.add_argument("--slots", type=int, default=16)
    options.add_argument("--out", type=Path, default=RECORDS)
    measure(options.parse_args())


if __name__ == "__main__":
    main()
