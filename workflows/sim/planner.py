"""The planner: a profile and a device budget to instances per stage, micro-batch, depth and mode.

Rules:

1. An analytical model prunes. In rows a second, a stage serves at most ``instances / row time``; a synchronous step takes at
   least generation's longest row. The bound of a plan is the slowest of its parts, which no order of rows can beat.
2. The discrete-event simulation decides among the `KEPT` best bounds: production ledger, selectors and pacing (`virtual`).
3. Stages that need no device get as many instances as keep them from being the bound; others share the budget with
   generation and training. Every split of the budget is bounded; there are few, since devices come in instances.
4. Of plans within `TIE` of the fastest the one with fewer devices wins, then the smaller depth: staleness is a price.
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
"""Micro-batches tried, as parts of a batch: 1 trains when all rows are there."""
SEED: Final = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the job. instances by stage (`train`: units that share a batch); micro_rows: the trainer's ``at_least``."""

    instances: dict[str, int]
    micro_rows: int
    depth: int
    devices: int

    @property
    def mode(self) -> str:
        """What the literature calls it."""
        return f"asynchronous, staleness {self.depth}" if self.depth else "synchronous, streaming"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its bound and its simulation. Seconds of a step; idle shares by stage."""

    plan: Plan
    bound_s: float
    step_s: float
    idle: dict[str, float]
    simulated: Simulated


def plan(profile: Profile) -> list[Planned]:
    """The plans that were simulated, best first; `UsageError` for a profile with which none exists."""
    check(profile)
    lengths = _lengths(profile)
    bounded = sorted(
        ((bound_s(profile, one, lengths), one) for one in plans(profile)), key=lambda pair: (pair[0], pair[1].devices)
    )
    found = [_simulated(profile, one, bound, lengths) for bound, one in _kept(bounded)]
    fastest = min(one.step_s for one in found)
    return sorted(found, key=lambda one: _rank(one, fastest))


def _rank(one: Planned, fastest: float) -> tuple[float, ...]:
    if one.step_s <= fastest * (1 + TIE):
        return (0.0, one.plan.devices, one.plan.depth, one.step_s)
    return (1.0, one.step_s)


def _kept(bounded: list[tuple[float, Plan]]) -> list[tuple[float, Plan]]:
    """The best splits of the budget by their bound, each with all its micro-batches."""
    splits: dict[tuple[object, ...], list[tuple[float, Plan]]] = {}
    for bound, one in bounded:
        splits.setdefault((one.depth, *one.instances.values()), []).append((bound, one))
    best = list(splits.values())[:KEPT]
    return [pair for split in best for pair in split]


def plans(profile: Profile) -> Iterator[Plan]:
    """Every split of the budget, depth and micro-batch that is worth a bound."""
    paid = [one for one in profile.stages if one.devices]
    for generators, trainers, *others in product(*_counts(profile, paid)):
        used = generators * profile.generation.devices + trainers * profile.train.devices
        used += sum(count * one.devices for count, one in zip(others, paid, strict=True))
        if used > profile.devices:
            continue
        instances = {GENERATE: generators, TRAIN: trainers}
        instances |= {one.name: count for one, count in zip(paid, others, strict=True)}
        instances |= {one.name: _enough(profile, one) for one in profile.stages if not one.devices}
        for depth, part in product(profile.depths, FEEDS):
            yield Plan(instances=instances, micro_rows=max(1, profile.batch_rows // part), depth=depth, devices=used)


def _counts(profile: Profile, paid: list[StageProfile]) -> list[range]:
    each = [profile.generation.devices, profile.train.devices, *(one.devices for one in paid)]
    return [range(1, (profile.devices - sum(each) + one) // one + 1) for one in each]


def _enough(profile: Profile, work: StageProfile) -> int:
    """Instances of a stage without devices, with which the fastest trainer of the budget would not wait for it."""
    fastest = profile.train.row_s / (profile.devices // profile.train.devices)
    return max(1, math.ceil((work.row_s + work.call_s) / fastest))


def bound_s(profile: Profile, one: Plan, lengths: Lengths) -> float:
    """Seconds that a step takes at least: of each side; synchronous, of the longest row and then one trained row."""
    rows, train = profile.batch_rows, profile.train
    generate = float(lengths.sum(axis=1).mean()) * _token_s_least(profile, one) / one.instances[GENERATE]
    row_s = train.row_s / one.instances[TRAIN]
    others = [rows * (stage.row_s + stage.call_s) / one.instances[stage.name] for stage in profile.stages]
    sides = max(generate, rows * row_s + train.call_s, *others, 0.0)
    if one.depth:
        return sides
    longest = float(lengths.max(axis=1).mean()) * profile.generation.token_s(1)
    return max(sides, max(generate, longest) + row_s + train.call_s + train.update_s)


def _token_s_least(profile: Profile, one: Plan) -> float:
    """Least seconds a token that an instance reaches with the rows it may hold at once."""
    share = -(-profile.batch_rows * (one.depth + 1) // one.instances[GENERATE])
    return min(
        profile.generation.token_s(width) / width for width in range(1, min(profile.generation.slots, share) + 1)
    )


def _lengths(profile: Profile) -> Lengths:
    drawn = np.random.default_rng(SEED).choice(profile.generation.lengths, (ITERATIONS, profile.batch_rows))
    return drawn.astype(np.int64)


def _simulated(profile: Profile, one: Plan, bound: float, lengths: Lengths) -> Planned:
    stages = tuple(
        SimStage(name=stage.name, row_s=stage.row_s, call_s=stage.call_s, instances=one.instances[stage.name])
        for stage in profile.stages
    )
    job = SimulatedJob(
        lengths=lengths,
        predicted=lengths,
        site=Site(one.instances[GENERATE], profile.generation.slots),
        stages=stages,
        train=SimStage(name=TRAIN, row_s=profile.train.row_s / one.instances[TRAIN], call_s=profile.train.call_s),
        feed=BatchFeed(rows=one.micro_rows),
        depth=one.depth,
        update_s=profile.train.update_s,
        token_s=profile.generation.token_s,
    )
    found = simulate(job)
    idle = found.idle(one.instances | {TRAIN: 1})
    return Planned(plan=one, bound_s=bound, step_s=found.total_s / ITERATIONS, idle=idle, simulated=found)


def assumed(profile: Profile) -> list[str]:
    """What a plan of ``profile`` takes for granted, to be said beside it."""
    return [
        f"lengths are drawn from the {len(profile.generation.lengths)} observed ones, and known to the dispatch (an oracle)",
        "prompts, transfers and the queue itself take no time",
        "units of the trainer share a batch evenly; the time of a micro-batch beside its rows does not shrink with them",
        f"{ITERATIONS} steps from an empty table: the first has nothing to overlap with",
        "stages without devices have as many instances as keep the trainer from waiting for them",
    ]
