"""Generation time of a batch with dispatch by length, on two real engines: ``python -m bench.dispatch_live``.

Two processes serve one generation service (`workflows.service.serve`), each with vLLM's CPU build on a core and a
thread of its own: a Qwen3 of eleven million random weights, whose responses have the lengths of StreamRL's figure 7
(`bench.given_lengths`). Per batch, by turns:

- *given*: rows in their order, any engine, as `serve` does without dispatch;
- *ranker*: `LengthRequests` with a ranker that has seen 2,048 other prompts of the same kind and their lengths, and was
  judged on 512 more;
- *oracle*: the same plan maker with the true lengths.

Beside each ratio stands what the plan maker's own schedule predicts for the same lengths, from the decode curves that
the engines measured. Expected, written before the first run: with 16 slots an engine and 192 rows (six rounds), ranker
0.80 to 0.95 and oracle 0.75 to 0.90 of the given order's time on *published*, less gain on *mild*; predicted ratios
within 0.05. Takes about as many minutes as `--seeds` plus two, on two idle cores.

    .venv-engines/bin/python -m bench.dispatch_live --seeds 5 --skew mild
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import numpy as np

import transferqueue as tq
from bench import given_lengths
from bench.given_lengths import SKEWS, length_of
from bench.published.prompts import draw_prompts
from bench.run_record import RECORDS, save_record
from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.observe.measurement_record import Measurement, single, summarize
from transferqueue.workflows.dispatch.channels import live_engines, plan_channel, publish
from transferqueue.workflows.dispatch.dispatcher import LengthDispatcher
from transferqueue.workflows.dispatch.ranker_accuracy import recall
from transferqueue.workflows.planner.batch_plan import EngineLane, EngineReport, Plan, plan_batch
from transferqueue.workflows.planner.engine_times import LaneEngine, generation_s
from transferqueue.workflows.service import LengthRequests, Service, serve, stream_engines

LONGEST: Final = 320
"""Tokens of the longest published length after scaling."""
ENGINES: Final = 2
SEEN, JUDGED, LESSON = 2048, 512, 256
ARMS: Final = ("given", "ranker", "oracle")
SIZE: Final = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Of the model: a token of sixteen rows takes a core several times as long as a token of one, as on an accelerator
whose batch is large."""
START_S: Final = 600.0
SETTLE_S: Final = 0.6
"""After a plan is published for an arm without a dispatcher of its own: an idle engine sees it within
`preference.LOOK_S`. The ranker's arm pays for this itself."""

Lengths = np.ndarray[Any, np.dtype[np.int64]]


# ---------------------------------------------------------------- an engine's process


def serve_engine(address: str, name: str, model: Path, skew: str, slots: int, *, paced: bool) -> None:
    """Serve the service until it is sealed."""
    open_engine = given_lengths.paced if paced else given_lengths.vllm
    engine = open_engine(str(model), slots=slots, longest=LONGEST, skew=skew, core=int(name))
    with closing(engine), tq.connect(address, label=f"engine-{name}") as queue:
        serve(
            queue,
            engine,
            Sampling(tokens_max=LONGEST),
            rows=max(1, slots // 4),
            slots=slots,
            dispatch=name,
            stall_s=START_S,
        )


@contextmanager
def engines(address: str, model: Path, skew: str, slots: int, *, paced: bool) -> Iterator[None]:
    """Start the processes of the engines; end them with the block."""
    command = [sys.executable, "-m", "bench.dispatch_live", "--engine"]
    arguments = ["--address", address, "--model", str(model), "--skew", skew, "--slots", str(slots)]
    arguments += ["--paced"] if paced else []
    started = [subprocess.Popen([*command, str(name), *arguments]) for name in range(ENGINES)]
    try:
        yield
        for process in started:
            process.wait(60)
    finally:
        for process in started:
            process.kill()
            process.wait()


# ---------------------------------------------------------------- batches


class Batch:
    """Prompts with the lengths of their answers."""

    def __init__(self, rows: int, skew: str, seed: int) -> None:
        drawn = draw_prompts(rows, np.random.default_rng((seed, rows)))
        self.prompts = [Prompt.of(ids) for ids in drawn.ids.tolist()]
        self.lengths: Lengths = np.array([length_of(prompt, LONGEST, skew) for prompt in self.prompts])


def taught(skew: str, rows: int) -> LengthDispatcher:
    """Return a dispatcher that has seen prompts of this kind, and was judged on others."""
    dispatcher = LengthDispatcher(batch_rows=rows)
    for part, count in enumerate([LESSON] * ((SEEN + JUDGED) // LESSON)):
        batch = Batch(count, skew, 10_000 + part)
        ids = [prompt.ids for prompt in batch.prompts]
        expected = dispatcher.expect(ids).tokens
        dispatcher.learn(ids, (part * LESSON + np.arange(count)).tolist(), expected, batch.lengths)
        dispatcher.refit()
    return dispatcher


# ---------------------------------------------------------------- runs


class Run:
    """One arm of one batch: seconds, the plan, and what the schedule predicts."""

    def __init__(self, queue: tq.Queue, service: Service) -> None:
        self._queue, self._service = queue, service

    def given(self, batch: Batch) -> tuple[Plan, Any, float]:
        publish(self._queue, plan_channel(self._service.table.name), Plan(why="given order"))
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        return (
            Plan(),
            np.ones(len(batch.prompts), np.int64),
            self._drained(self._service.generate(batch.prompts), started),
        )

    def ranker(self, batch: Batch, requests: LengthRequests, dispatcher: LengthDispatcher) -> tuple[Plan, Any, float]:
        expected = dispatcher.expect([prompt.ids for prompt in batch.prompts]).tokens
        started = time.perf_counter()
        stream = requests.generate(batch.prompts)
        return dispatcher.last, expected, self._drained(stream, started)

    def oracle(self, batch: Batch) -> tuple[Plan, Any, float]:
        plan = plan_batch(batch.lengths, self.reports(), np.empty(0))
        publish(self._queue, plan_channel(self._service.table.name), plan)
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        lengths = batch.lengths.tolist()
        scores = lengths if plan.order == "longest" else None
        stream = self._service.generate(batch.prompts, scores=scores, expected=lengths)
        return plan, batch.lengths, self._drained(stream, started)

    def reports(self) -> list[EngineReport]:
        return live_engines(self._queue, self._service.table.name)

    def predicted_s(self, plan: Plan, batch: Batch, expected: Any, reports: Sequence[EngineReport]) -> float:
        """Seconds of the schedule for this batch, by the curves that the engines have measured."""
        lanes = [(report, plan.lanes.get(report.name, EngineLane("any", report.slots))) for report in reports]
        chosen = [LaneEngine(lane.slots, report.curve, lane.lane) for report, lane in lanes]
        return generation_s(batch.lengths, expected, chosen, longest_first=plan.order == "longest", cut=plan.cut)

    def _drained(self, stream: Any, started: float) -> float:
        for rows in stream.batches(64):
            rows.ack()
        return time.perf_counter() - started


def measure(options: argparse.Namespace) -> None:
    """Run all arms of all batches, print them, and write a record."""
    from transferqueue.workflows.job.tiny_model.make import make

    measurement, lines = Measurement(), list[Any]()
    with (
        tempfile.TemporaryDirectory(prefix="transferqueue-dispatch-") as directory,
        tq.connect(label="caller") as queue,
    ):
        model = Path(directory, "model")
        if not options.paced:
            make(model, **SIZE)
        service = Service.init_engines(queue, stream_engines(rows_max=1 << 14))
        service.update({"none": np.zeros(1, np.float32)} if options.paced else _weights(model))
        with engines(queue.address, model, options.skew, options.slots, paced=options.paced):
            run = Run(queue, service)
            _warm_up(run, options)
            dispatcher = taught(options.skew, options.rows)
            with LengthRequests(queue, service, batch_rows=options.rows, dispatcher=dispatcher) as requests:
                seconds, predicted = _arms(run, requests, dispatcher, options, lines)
            results = _results(options.skew, seconds, predicted)
            curves = {report.name: [report.curve.rows, report.curve.ms] for report in run.reports()}
            service.seal()
    details = {
        "rows": options.rows,
        "slots": options.slots,
        "engines": ENGINES,
        "paced": options.paced,
        "longest": LONGEST,
        "curves": curves,
        "runs": lines,
    }
    for result in results:
        print(result)
    save_record(measurement, options.out, "dispatch-paced" if options.paced else "dispatch-live", results, details)


def _weights(model: Path) -> dict[str, Any]:
    """The weights that the engines started with, so that their first update changes nothing."""
    from safetensors.numpy import load_file

    return load_file(model / "model.safetensors")


def _warm_up(run: Run, options: argparse.Namespace) -> None:
    """Generate until both engines have measured themselves at large and at small batches."""
    for number in range(2):
        run.given(Batch(options.rows // 2, options.skew, 20_000 + number))
    for report in run.reports():
        print(f"engine {report.name}: rows {report.curve.rows}, ms a token {report.curve.ms}", flush=True)


def _arms(
    run: Run,
    requests: LengthRequests,
    dispatcher: LengthDispatcher,
    options: argparse.Namespace,
    lines: list[Any],
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    predicted: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in range(options.seeds):
        batch, plans = Batch(options.rows, options.skew, seed), {}
        for arm in ARMS[seed % 3 :] + ARMS[: seed % 3]:
            call = {
                "given": run.given,
                "oracle": run.oracle,
                "ranker": lambda each: run.ranker(each, requests, dispatcher),
            }[arm]
            plan, expected, taken = call(batch)
            plans[arm] = (plan, expected)
            seconds[arm].append(taken)
        reports = run.reports()
        for arm in ARMS:
            predicted[arm].append(run.predicted_s(plans[arm][0], batch, plans[arm][1], reports))
        recalled = [round(recall(batch.lengths, plans["ranker"][1], share), 2) for share in (0.2, 0.1, 0.05)]
        words = ", ".join(f"{arm} {seconds[arm][-1]:.2f} s (predicted {predicted[arm][-1]:.2f})" for arm in ARMS)
        print(f"{options.skew}, seed {seed}: {words}; recall {recalled}; {plans['ranker'][0].why}", flush=True)
        lines.append([options.skew, seed, *(round(seconds[arm][-1], 2) for arm in ARMS), *recalled])
    return seconds, predicted


def _results(skew: str, seconds: dict[str, list[float]], predicted: dict[str, list[float]]) -> list[Any]:
    results = [summarize(f"{skew}/{arm}", "s", seconds[arm]) for arm in ARMS]
    for arm in ARMS[1:]:
        ratios = [ours / given for ours, given in zip(seconds[arm], seconds["given"], strict=True)]
        by_schedule = [ours / given for ours, given in zip(predicted[arm], predicted["given"], strict=True)]
        results += [
            summarize(f"{skew}/{arm} over given", "ratio", ratios),
            single(f"{skew}/{arm} over given, worst seed", "ratio", round(max(ratios), 4)),
            summarize(f"{skew}/{arm} over given, predicted", "ratio", by_schedule),
        ]
    errors = [abs(p / s - 1) for arm in ARMS for s, p in zip(seconds[arm], predicted[arm], strict=True)]
    return [*results, summarize(f"{skew}/error of the predicted seconds", "ratio", errors)]


def main() -> None:
    """Measure, or serve as an engine."""
    options = argparse.ArgumentParser(prog="python -m bench.dispatch_live", description=__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rows", type=int, default=192)
    options.add_argument("--slots", type=int, default=16)
    options.add_argument("--skew", choices=tuple(SKEWS), default="published", help="of lengths (default: published)")
    options.add_argument("--out", type=Path, default=RECORDS)
    options.add_argument("--paced", action="store_true", help="engines that take the times of a 7B model and no core")
    for name in ("--engine", "--address", "--model"):
        options.add_argument(name, default="", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.engine:
        serve_engine(chosen.address, chosen.engine, Path(chosen.model), chosen.skew, chosen.slots, paced=chosen.paced)
    else:
        measure(chosen)


if __name__ == "__main__":
    main()
