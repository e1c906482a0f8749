"""Generation of one batch in simulated time: skewness-aware dispatch of StreamRL (arXiv 2504.15930) against random
order.

Rules:

1. A batch is a simulated job of one step without a trainer (`workflows.planner.simulated_job`), so the production
   `Ledger` chooses each row: by `LongestFirst` or `Fifo`, of a class by a predicate on `tokens`, the predicted length.
2. An instance decodes up to `slots` samples at once. One token of n samples takes PTL(n) seconds (StreamRL section 5).
3. The plan is that of the live dispatcher (`workflows.planner.batch_plan`): which class of rows an instance prefers,
   its slots, and the order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from transferqueue.workflows.planner.batch_plan import EngineLane, EngineReport, Plan, plan_batch
from transferqueue.workflows.planner.engine_times import DecodeCurve, LaneEngine, Lengths
from transferqueue.workflows.planner.simulated_job import TRAIN, BatchFeed, SimStage, SimulatedJob, simulate

PTL_BATCH: Final = tuple(2**power for power in range(10))
PTL_MS: Final = (8.3, 8.8, 8.9, 9.0, 9.4, 10.2, 11.7, 15.2, 21.8, 36.9)
"""Published time per token of a 7B model, by batch size; interpolated between these sizes."""
PTL: Final = DecodeCurve(tuple(map(float, PTL_BATCH)), PTL_MS)
RANDOM_FIFO: Final = Plan()
"""Rows in the order in which they came."""


def ptl_s(batch: int) -> float:
    """Seconds that an instance takes to decode one token of each of `batch` samples."""
    return PTL.token_ms(batch) / 1000


class Site(NamedTuple):
    """Generation instances, and how many samples the memory of one holds at once."""

    instances: int
    slots: int


def published_lengths(rows: int, rng: np.random.Generator) -> Lengths:
    """Draw lengths from the histogram digitised from StreamRL's figure 7: ``[rows]``, tokens."""
    path = Path(__file__).parent / "data" / "streamrl_output_lengths.csv"
    low, high, share = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    share = np.maximum(share, 0)
    at = rng.choice(low.size, rows, p=share / share.sum())
    lengths: Lengths = rng.uniform(low[at], high[at]).astype(np.int64)
    return lengths


def ranked(lengths: Lengths, noise: float, rng: np.random.Generator) -> Lengths:
    """Return what a ranker would predict: the true lengths, in the order of log length plus normal noise (0: an
    oracle)."""
    score = np.log(lengths) + rng.normal(0, 1, lengths.size) * noise
    predicted = np.empty_like(lengths)
    predicted[np.argsort(score, kind="stable")] = np.sort(lengths)
    return predicted


def engines_of(site: Site) -> list[EngineReport]:
    """Return the instances of a site as engines whose curve is the published one."""
    return [EngineReport(name=str(at), slots=site.slots, curve=PTL) for at in range(site.instances)]


def choose(predicted: Lengths, site: Site) -> Plan:
    """Return the plan for rows of the predicted lengths: that of the live dispatcher, which takes the predictions at
    their word here."""
    return plan_batch(predicted, engines_of(site), np.empty(0))


def generation_s(lengths: Lengths, predicted: Lengths, site: Site, plan: Plan) -> float:
    """Return the simulated seconds until all rows are generated. lengths, predicted: ``[rows]`` positive tokens."""
    lanes = [plan.lanes.get(str(at), EngineLane("any", site.slots)) for at in range(site.instances)]
    job = SimulatedJob(
        lengths=lengths[None],
        predicted=predicted[None],
        engines=tuple(LaneEngine(lane.slots, PTL, lane.lane) for lane in lanes),
        longest_first=plan.order == "longest",
        cut=plan.cut,
        stages=(),
        train=SimStage(name=TRAIN, row_s=0.0),
        feed=BatchFeed(rows=lengths.size),
        depth=0,
    )
    return simulate(job).total_s
