"""The generation of one batch in simulated time: a plan against the given order, by the production ledger.

The batch is a simulated job of one step without a trainer (`workflows.planner.simulated_job`). Engines decode with the
published times of a 7B model.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.given_lengths import PTL
from transferqueue.workflows.planner.batch_plan import EngineLane, EngineReport, Plan, plan_batch
from transferqueue.workflows.planner.engine_times import LaneEngine, Lengths
from transferqueue.workflows.planner.simulated_job import TRAIN, BatchFeed, SimStage, SimulatedJob, simulate

GIVEN_ORDER: Final = Plan()


class Site(NamedTuple):
    """Engines, and how many rows the memory of one holds at once."""

    instances: int
    slots: int


def choose(predicted: Lengths, site: Site) -> Plan:
    """Return the live dispatcher's plan for rows of the predicted lengths, which it takes at their word here."""
    engines = [EngineReport(name=str(at), slots=site.slots, curve=PTL) for at in range(site.instances)]
    return plan_batch(predicted, engines, np.empty(0))


def generation_s(lengths: Lengths, predicted: Lengths, site: Site, plan: Plan) -> float:
    """Return the simulated seconds until all rows are generated."""
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


def as_lengths(scores: NDArray[np.float64], lengths: Lengths) -> Lengths:
    """Turn scores into tokens: a row gets the quantile of the observed `lengths` at its rank."""
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    at = (ranks + 0.5) / len(scores)
    predicted: Lengths = np.quantile(lengths, at, method="nearest").astype(np.int64)
    return predicted
