"""StreamRL's figures in simulation: ``python -m bench.published.streamrl`` prints them and writes a record and a
picture.

Source: StreamRL, arXiv 2504.15930 v1. A published figure is a number that the paper states for the same quantity, with
the model it is of; where the paper states none, the column says so. Ours are simulated around the production ledger;
`ASSUMED` lists what the paper does not say.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.published import prompts
from bench.published.dispatch import PTL, RANDOM_FIFO, Site, choose, generation_s, published_lengths, ranked
from bench.run_record import RECORDS, stamped
from transferqueue.observe.measurement_record import MeasuredResult, Measurement, single
from transferqueue.workflows.dispatch.ranker_accuracy import recall
from transferqueue.workflows.elastic.controller import ElasticTerms
from transferqueue.workflows.planner.engine_times import LaneEngine, Lengths
from transferqueue.workflows.planner.simulated_job import TRAIN, BatchFeed, SimStage, SimulatedJob, simulate

NOISE: Final = 0.25
ROWS: Final = 512
SLOTS: Final = (16, 32, 64, 128)
INSTANCES: Final = 4
SEEDS: Final = 3
ITERATIONS: Final = 4
MINIS: Final = 4
GROWTH: Final = 1.15
ELASTIC_STEPS: Final = 8
ASSUMED: Final = (
    "from the paper: output lengths (digitised from figure 7), time per token of a 7B by batch; prompts cost nothing",
    (
        f"{INSTANCES} generation instances, a batch of {ROWS} (published: 1024); memory for 16 to 128 samples an "
        "instance, a row each"
    ),
    (
        "prompts are made up: difficulty is what their tokens weigh, an answer's length the digitised quantile at "
        "difficulty and luck"
    ),
    (
        "the ranker is a small model trained on 4096 such prompts with an answer each; the history has seen each "
        "prompt 4 times"
    ),
    f"pipelining: predictions are the true order with log-normal noise {NOISE}, which has about the published recall",
    (
        "pipelining: training takes as long as our generation (their balance), in proportion to rows; weights move in "
        "no time"
    ),
    (
        f"mini-batch: {MINIS} fixed parts of the prompts, trained in their order; dynamic-batch: from a sixteenth of a "
        "batch on"
    ),
    (
        f"elasticity: lengths grow by {GROWTH} a step for {ELASTIC_STEPS} asynchronous steps, training stays as it is; "
        f"the live controller decides after each step, from {INSTANCES} instances on"
    ),
)


NONE: Final = "none"
PUBLISHED_DISPATCH: Final = {
    "random-FIFO": "1",
    "ranker": "0.901 / 0.819 / 0.787 (7B / 32B / 72B)",
    "oracle": "0.816 / 0.672 / 0.693 (7B / 32B / 72B)",
}
PUBLISHED_RECALL: Final = {("ranker", 0.2): "0.87 (7B)", ("ranker", 0.1): "0.82 (7B)", ("ranker", 0.05): "0.76 (7B)"}


class FigureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: a figure in a setting, as the paper states it and as simulated (a ratio)."""

    figure: str
    setting: str
    published: str
    ours: float


def table() -> list[FigureRow]:
    """Simulate every figure. Takes about two minutes."""
    return [*dispatch(), *pipelining(), *elasticity()]


def dispatch(*, rows: int = ROWS, seeds: int = SEEDS, slots: Sequence[int] = SLOTS) -> list[FigureRow]:
    """Return generation time over that of random-FIFO, by memory, for each way to predict lengths; and the recall of
    each."""
    batches = [predicted_batch(rows, seed) for seed in range(seeds)]
    rows_of_table = []
    for slots_each in slots:
        ratios = [dispatch_ratios(batch, Site(INSTANCES, slots_each)) for batch in batches]
        rows_of_table += [
            FigureRow(
                figure="generation / random-FIFO",
                setting=f"{name}, {slots_each} slots",
                published=PUBLISHED_DISPATCH.get(name, NONE),
                ours=float(np.mean([by_name[name] for by_name in ratios])),
            )
            for name in ratios[0]
        ]
    return rows_of_table + [
        FigureRow(
            figure=f"recall of the {name}",
            setting=f"top {share:.0%}",
            published=PUBLISHED_RECALL.get((name, share), NONE),
            ours=float(np.mean([recall(batch["oracle"], batch[name], share) for batch in batches])),
        )
        for name in ("ranker", "history")
        for share in (0.2, 0.1, 0.05)
    ]


def predicted_batch(rows: int, seed: int) -> dict[str, Lengths]:
    """Draw a batch; return its lengths as predicted by the ranker, the history, and the oracle (the true lengths)."""
    rng = np.random.default_rng(seed)
    batch = prompts.draw_prompts(rows, rng)
    lengths = batch.answers(rng)
    return {
        "ranker": prompts.by_ranker(prompts.trained_ranker(seed), batch, lengths),
        "history": prompts.by_history(batch, lengths, rng),
        "oracle": lengths,
    }


def dispatch_ratios(batch: Mapping[str, Lengths], site: Site) -> dict[str, float]:
    """Return generation time of our dispatch with each prediction, over that of random-FIFO (which is 1 by
    definition)."""
    lengths = batch["oracle"]
    fifo = generation_s(lengths, lengths, site, RANDOM_FIFO)
    ours = {
        name: generation_s(lengths, predicted, site, choose(predicted, site)) / fifo
        for name, predicted in batch.items()
    }
    return {"random-FIFO": 1.0, **ours}


def pipelining(*, rows: int = ROWS, iterations: int = ITERATIONS) -> list[FigureRow]:
    """Return the steps a second of mini-batch, dynamic-batch and asynchronous pipelining, over those of serial."""
    rng = np.random.default_rng(1)
    lengths = np.stack([published_lengths(rows, rng) for _ in range(iterations)])
    predicted = np.stack([ranked(batch, NOISE, rng) for batch in lengths])
    site = Site(INSTANCES, 32)
    generation = float(
        np.mean([generation_s(a, b, site, choose(b, site)) for a, b in zip(lengths, predicted, strict=True)])
    )
    train = SimStage(name=TRAIN, row_s=generation / rows)
    modes = (
        ("mini-batch", BatchFeed(rows=rows // MINIS, fixed=True), 0),
        ("dynamic-batch", BatchFeed(rows=rows // 16), 0),
        ("asynchronous", BatchFeed(rows=rows // 16), 1),
    )

    def total_s(feed: BatchFeed, depth: int) -> float:
        job = SimulatedJob(
            lengths=lengths,
            predicted=predicted,
            engines=(LaneEngine(site.slots, PTL),) * site.instances,
            stages=(),
            train=train,
            feed=feed,
            depth=depth,
        )
        return simulate(job).total_s

    serial = total_s(BatchFeed(rows=rows), 0)
    return [
        FigureRow(figure="speed / serial", setting=name, published=NONE, ours=serial / total_s(feed, depth))
        for name, feed, depth in modes
    ]


def elasticity(*, rows: int = ROWS, slots: int = 32) -> list[FigureRow]:
    """Return the time of all steps with a fixed number of instances over that where the live controller adds one when
    δ ≥ δ' (section 4.2), asynchronous.
    """
    rng = np.random.default_rng(2)
    lengths = np.stack(
        [(published_lengths(rows, rng) * GROWTH**step).astype(np.int64) for step in range(ELASTIC_STEPS)]
    )
    site = Site(INSTANCES, slots)
    train_s = generation_s(lengths[0], lengths[0], site, choose(lengths[0], site))
    fixed = SimulatedJob(
        lengths=lengths,
        predicted=lengths,
        engines=(LaneEngine(site.slots, PTL),) * site.instances,
        stages=(),
        train=SimStage(name=TRAIN, row_s=train_s / rows),
        feed=BatchFeed(rows=rows // 16),
        depth=1,
    )
    terms = ElasticTerms(min=INSTANCES, max=4 * INSTANCES, patience=1)
    elastic = simulate(msgspec.structs.replace(fixed, elastic=terms))
    instances = INSTANCES + sum(change.by for _, change in elastic.changes)
    return [
        FigureRow(
            figure="speed, elastic / fixed",
            setting=f"{INSTANCES} to {instances} instances",
            published=NONE,
            ours=simulate(fixed).total_s / elastic.total_s,
        )
    ]


def results(lines: Sequence[FigureRow]) -> list[MeasuredResult]:
    """Return our figures."""
    return [single(_name(line), "ratio", line.ours) for line in lines]


def details(lines: Sequence[FigureRow]) -> dict[str, Any]:
    """Return what the paper states of each figure, and the assumptions of the simulation."""
    return {"simulated": True, "published": {_name(line): line.published for line in lines}, "assumed": list(ASSUMED)}


def _name(line: FigureRow) -> str:
    return f"{line.figure}: {line.setting}"


def draw(path: Path, lines: list[FigureRow]) -> None:
    """Draw one bar a row; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.34 * len(lines) + 1), layout="constrained")
    axes.barh(range(len(lines)), [line.ours for line in lines], color="#0b6e4f")
    axes.set_yticks(
        range(len(lines)), [f"{line.figure}, {line.setting} (published {line.published})" for line in lines], fontsize=7
    )
    axes.axvline(1.0, color="#8d99ae", lw=1)
    axes.set(xlabel="simulated ratio", title="StreamRL in simulation")
    axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Simulate the figures, write a record and a picture, and print published and simulated figures. About two
    minutes."""
    options = argparse.ArgumentParser(prog="python -m bench.published.streamrl", description=main.__doc__)
    options.add_argument("--out", type=Path, default=RECORDS, help="folder of record and picture")
    chosen = options.parse_args()
    measurement = Measurement()
    lines = table()
    name = stamped("streamrl", measurement)
    measurement.record("streamrl", results(lines), details=details(lines)).save(chosen.out / f"{name}.json")
    draw(chosen.out / f"{name}.png", lines)
    for line in lines:
        print(f"{line.figure:26} {line.setting:22} published {line.published:42} ours {line.ours:.3f}")
    for assumption in ASSUMED:
        print(f"assumed: {assumption}")
    print(f"wrote {chosen.out / name}.json and .png")


if __name__ == "__main__":
    main()
