"""The planner: from a profile and a device budget to instances of every stage, micro-batch, depth and mode.

Rules:

1. An analytical bound prunes. In rows a second, a stage serves at most ``instances / row time``; a synchronous step takes at
   least as long as the longest row of its generation. The bound of a plan is its slowest part; no order of rows is faster.
2. The discrete-event simulation (`simulated_job`) compares the `KEPT` plans with the best bounds, through the
   production ledger, selectors and pacing.
3. Stages that need no device get enough instances not to be the bound. The others share the budget with
   generation and training. Every split of the budget is bounded; there are few, since an instance takes several devices.
4. Among plans within `TIE` of the fastest, the one with fewer devices wins, then the smaller depth, since staleness has a cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

import msgspec
import numpy as np

from transferqueue.workflows.sim.profile import Profile, StageProfile, check
from transferqueue.workflows.sim.simulated_job import (
    GENERATE,
    TRAIN,
    BatchFeed,
    Lengths,
    SimStage,
    Simulated,
    SimulatedJob,
    Site,
    simulate,
)

KEPT: Final = 6
TIE: Final = 0.01
ITERATIONS: Final = 4
FEEDS: Final = (1, 4, 16)
"""Micro-batches to try, as fractions of a batch: 1 trains when all rows are there."""
SEED: Final = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the job. instances: by stage (`train`: units that share a batch). micro_rows: the trainer's `at_least`."""

    instances: dict[str, int]
    micro_rows: int
    depth: int
    devices: int

    @property
    def mode(self) -> str:
        """The mode's name in the literature."""
        return f"asynchronous, staleness {self.depth}" if self.depth else "synchronous, streaming"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its bound and its simulation. bound_s, step_s: seconds of a step. idle: idle share by stage."""

    plan: Plan
    bound_s: float
    step_s: float
    idle: dict[str, float]
    simulated: Simulated


def plan(profile: Profile) -> list[Planned]:
    """Return the plans that were simulated, best first. Raises `UsageError` for a profile without a possible plan."""
    check(profile)
    lengths = _lengths(profile)
    bounded = sorted(
        ((bound_s(profile, candidate, lengths), candidate) for candidate in plans(profile)),
        key=lambda pair: (pair[0], pair[1].devices),
    )
    planned = [_simulated(profile, candidate, bound, lengths) for bound, candidate in _kept(bounded)]
    fastest = min(candidate.step_s for candidate in planned)
    return sorted(planned, key=lambda candidate: _rank(candidate, fastest))


def _rank(planned: Planned, fastest: float) -> tuple[float, ...]:
    if planned.step_s <= fastest * (1 + TIE):
        return (0.0, planned.plan.devices, planned.plan.depth, planned.step_s)
    return (1.0, planned.step_s)


def _kept(bounded: list[tuple[float, Plan]]) -> list[tuple[float, Plan]]:
    """Keep the splits of the budget with the best bounds, each with all its micro-batches."""
    splits: dict[tuple[object, ...], list[tuple[float, Plan]]] = {}
    for bound, candidate in bounded:
        splits.setdefault((candidate.depth, *candidate.instances.values()), []).append((bound, candidate))
    best = list(splits.values())[:KEPT]
    return [pair for split in best for pair in split]


def plans(profile: Profile) -> Iterator[Plan]:
    """Yield every split of the budget, with every depth and micro-batch."""
    paid = [stage for stage in profile.stages if stage.devices]
    for generators, trainers, *others in product(*_counts(profile, paid)):
        used = generators * profile.generation.devices + trainers * profile.train.devices
        used += sum(count * stage.devices for count, stage in zip(others, paid, strict=True))
        if used > profile.devices:
            continue
        instances = {GENERATE: generators, TRAIN: trainers}
        instances |= {stage.name: count for stage, count in zip(paid, others, strict=True)}
        instances |= {stage.name: _enough(profile, stage) for stage in profile.stages if not stage.devices}
        for depth, part in product(profile.depths, FEEDS):
            yield Plan(instances=instances, micro_rows=max(1, profile.batch_rows // part), depth=depth, devices=used)


def _counts(profile: Profile, paid: list[StageProfile]) -> list[range]:
    each = [profile.generation.devices, profile.train.devices, *(devices.devices for devices in paid)]
    return [range(1, (profile.devices - sum(each) + devices) // devices + 1) for devices in each]


def _enough(profile: Profile, work: StageProfile) -> int:
    """Return the number of instances of a stage without devices that keeps the fastest possible trainer from waiting for it."""
    fastest = profile.train.row_s / (profile.devices // profile.train.devices)
    return max(1, math.ceil((work.row_s + work.call_s) / fastest))


def bound_s(profile: Profile, candidate: Plan, lengths: Lengths) -> float:
    """Return a lower bound of a step, in seconds: the slowest stage.

    When synchronous, also the longest row, and one row trained after it.
    """
    rows, train = profile.batch_rows, profile.train
    generate = float(lengths.sum(axis=1).mean()) * _token_s_least(profile, candidate) / candidate.instances[GENERATE]
    row_s = train.row_s / candidate.instances[TRAIN]
    others = [rows * (stage.row_s + stage.call_s) / candidate.instances[stage.name] for stage in profile.stages]
    sides = max(generate, rows * row_s + train.call_s, *others, 0.0)
    if candidate.depth:
        return sides
    longest = float(lengths.max(axis=1).mean()) * profile.generation.token_s(1)
    return max(sides, max(generate, longest) + row_s + train.call_s + train.update_s)


def _token_s_least(profile: Profile, candidate: Plan) -> float:
    """Return the smallest time per token that an instance can reach with the rows that it may hold at once."""
    share = -(-profile.batch_rows * (candidate.depth + 1) // candidate.instances[GENERATE])
    return min(
        profile.generation.token_s(width) / width for width in range(1, min(profile.generation.slots, share) + 1)
    )


def _lengths(profile: Profile) -> Lengths:
    lengths = np.random.default_rng(SEED).choice(profile.generation.lengths, (ITERATIONS, profile.batch_rows))
    return lengths.astype(np.int64)


def _simulated(profile: Profile, candidate: Plan, bound: float, lengths: Lengths) -> Planned:
    stages = tuple(
        SimStage(name=stage.name, row_s=stage.row_s, call_s=stage.call_s, instances=candidate.instances[stage.name])
        for stage in profile.stages
    )
    job = SimulatedJob(
        lengths=lengths,
        predicted=lengths,
        site=Site(candidate.instances[GENERATE], profile.generation.slots),
        stages=stages,
        train=SimStage(name=TRAIN, row_s=profile.train.row_s / candidate.instances[TRAIN], call_s=profile.train.call_s),
        feed=BatchFeed(rows=candidate.micro_rows),
        depth=candidate.depth,
        update_s=profile.train.update_s,
        token_s=profile.generation.token_s,
    )
    simulated = simulate(job)
    idle = simulated.idle(candidate.instances | {TRAIN: 1})
    return Planned(plan=candidate, bound_s=bound, step_s=simulated.total_s / ITERATIONS, idle=idle, simulated=simulated)


def assumed(profile: Profile) -> list[str]:
    """Return the assumptions of a plan of `profile`, to be shown with it."""
    return [
        f"lengths are drawn from the {len(profile.generation.lengths)} observed ones, and known to the dispatch (an oracle)",
        "prompts, transfers and the queue itself take no time",
        "units of the trainer share a batch evenly; the time of a micro-batch beside its rows does not shrink with them",
        f"{ITERATIONS} steps from an empty table: the first has nothing to overlap with",
        "stages without devices have as many instances as keep the trainer from waiting for them",
    ]
