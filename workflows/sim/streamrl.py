"""StreamRL's figures in simulation; `transferqueue streamrl` prints them and writes a record and a picture.

Source: StreamRL, arXiv 2504.15930. Published is what its text and plots say; ours is simulated around the production
ledger; what the paper does not say is in `ASSUMED`.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.workflows.sim.generation import (
    RANDOM_FIFO,
    Lengths,
    Site,
    choose,
    generation_s,
    published_lengths,
    ranked,
    recall,
)
from transferqueue.workflows.sim.virtual import TRAIN, Feed, Job, Stage, simulate

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
    "published: output lengths, time per token of a 7B by batch; prompts cost nothing",
    f"{INSTANCES} generation instances, a batch of {ROWS} (published: 1024); memory for 16 to 128 samples an instance, a row each",
    f"the ranker is the true order with log-normal noise {NOISE}, which has about the published recall (0.87 at the top fifth)",
    "pipelining: training takes as long as our generation (their balance), in proportion to rows; weights move in no time",
    f"mini-batch: {MINIS} fixed parts of the prompts, trained in their order; dynamic-batch: from a sixteenth of a batch on",
    f"elasticity: lengths grow by {GROWTH} a step for {ELASTIC_STEPS} steps, training stays as long as it is, from {INSTANCES} instances on",
)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Ratios have no unit."""

    figure: str
    setting: str
    published: str
    ours: float


def table() -> list[Line]:
    """Every figure, simulated. Takes about a minute."""
    return [*dispatch(), *pipelining(), *elasticity()]


def dispatch() -> list[Line]:
    """Generation time over that of random-FIFO, by memory, with the ranker and with an oracle."""
    found = []
    for slots in SLOTS:
        for name, noise, published in (("ranker", NOISE, "0.901 (7B)"), ("oracle", 0.0, "0.816 (7B)")):
            ratio = float(np.mean([_ratio(Site(INSTANCES, slots), noise, seed) for seed in range(SEEDS)]))
            found.append(
                Line(
                    figure="generation / random-FIFO", setting=f"{name}, {slots} slots", published=published, ours=ratio
                )
            )
    rng = np.random.default_rng(0)
    lengths = published_lengths(4096, rng)
    predicted = ranked(lengths, NOISE, rng)
    for share, published in ((0.2, "0.87"), (0.1, "0.82"), (0.05, "0.76")):
        got = recall(lengths, predicted, share)
        found.append(
            Line(figure="recall of the assumed ranker", setting=f"top {share:.0%}", published=published, ours=got)
        )
    return found


def _ratio(site: Site, noise: float, seed: int) -> float:
    rng = np.random.default_rng(seed)
    lengths = published_lengths(ROWS, rng)
    predicted = ranked(lengths, noise, rng)
    fifo = generation_s(lengths, predicted, site, RANDOM_FIFO)
    return generation_s(lengths, predicted, site, choose(predicted, site)) / fifo


def pipelining(*, rows: int = ROWS, iterations: int = ITERATIONS) -> list[Line]:
    """Steps a second over serial: mini-batch, dynamic-batch, asynchronous."""
    rng = np.random.default_rng(1)
    lengths = np.stack([published_lengths(rows, rng) for _ in range(iterations)])
    predicted = np.stack([ranked(one, NOISE, rng) for one in lengths])
    site = Site(INSTANCES, 32)
    generation = float(
        np.mean([generation_s(a, b, site, choose(b, site)) for a, b in zip(lengths, predicted, strict=True)])
    )
    train = Stage(name=TRAIN, row_s=generation / rows)
    modes = (
        ("mini-batch", Feed(rows=rows // MINIS, fixed=True), 0, "less than dynamic-batch"),
        ("dynamic-batch", Feed(rows=rows // 16), 0, "none (an earlier model: 1.57-1.64)"),
        ("asynchronous", Feed(rows=rows // 16), 1, "none (an earlier model: 1.95)"),
    )

    def total_s(feed: Feed, depth: int) -> float:
        job = Job(lengths=lengths, predicted=predicted, site=site, stages=(), train=train, feed=feed, depth=depth)
        return simulate(job).total_s

    serial = total_s(Feed(rows=rows), 0)
    return [
        Line(figure="speed / serial", setting=name, published=published, ours=serial / total_s(feed, depth))
        for name, feed, depth, published in modes
    ]


def elasticity() -> list[Line]:
    """Time of all steps with instances fixed over that with one more whenever δ ≥ δ'; a step takes its longer side."""
    rng = np.random.default_rng(2)
    batches = [(published_lengths(ROWS, rng) * GROWTH**step).astype(np.int64) for step in range(ELASTIC_STEPS)]
    train_s = _side_s(batches[0], INSTANCES)
    fixed, elastic, instances = 0.0, 0.0, INSTANCES
    for lengths in batches:
        fixed += max(_side_s(lengths, INSTANCES), train_s)
        took = _side_s(lengths, instances)
        elastic += max(took, train_s)
        instances += adds(took, train_s, took - _side_s(lengths, instances + 1))
    return [
        Line(
            figure="speed, elastic / fixed",
            setting=f"{INSTANCES} to {instances} instances",
            published="1.20-1.25",
            ours=fixed / elastic,
        )
    ]


def adds(generation_s: float, train_s: float, gain_s: float) -> bool:
    """Whether to add a generation instance: δ = T_gen - T_train is at least δ', the predicted gain of one more (section 4.2)."""
    return gain_s > 0 and generation_s - train_s >= gain_s


def _side_s(lengths: Lengths, instances: int) -> float:
    site = Site(instances, 32)
    return generation_s(lengths, lengths, site, choose(lengths, site))


def record(lines: list[Line], *, commit: str) -> dict[str, Any]:
    """The table as plain values."""
    return {
        "kind": "streamrl",
        "simulated": True,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "assumed": list(ASSUMED),
        "lines": [{**msgspec.to_builtins(line), "ours": round(line.ours, 3)} for line in lines],
    }


def draw(path: Path, lines: list[Line]) -> None:
    """Bars of every line; needs matplotlib."""
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
