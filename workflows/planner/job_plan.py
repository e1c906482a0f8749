"""The planner: from a profile and a device budget to instances of every stage, slots, micro-batch, depth and mode.

1. Generation takes devices of one kind, training and the stages that need devices take one kind: the same, or another,
   perhaps at another site. Every number of instances that the devices allow is a candidate, with every depth,
   micro-batch and number of slots. On one site this is Algorithm 1 of StreamRL (arXiv 2504.15930); on two, Algorithm 1
   takes all devices of both kinds and then instances away from the faster side (`algorithm_1`): its answer is a
   candidate, and is simulated first.
2. An analytical bound prunes. In rows a second, a stage serves at most ``instances / row time``; a synchronous step
   takes at least as long as the longest row of its generation. The bound of a plan is its slowest part; no order of
   rows is faster.
3. The discrete-event simulation (`simulated_job`) decides, through the production ledger, selectors and pacing.
   Candidates are simulated in the order of their bounds, until the next bound is above the best that was simulated (and
   its tie). No other plan could be better.
4. Stages that need no device get enough instances that they are not the bottleneck.
5. The objective is the time of a step (`speed`), or its product with the price of the devices (`money`): samples a
   second, or samples for the money. Among plans within `TIE` of the best, the cheaper one wins, then fewer devices,
   then the smaller depth, since staleness has a cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Final, Literal

import msgspec
import numpy as np

from transferqueue.workflows.planner.engine_times import DecodeCurve, LaneEngine, Lengths
from transferqueue.workflows.planner.profile import (
    DeviceKind,
    GenerationProfile,
    Profile,
    StageProfile,
    check,
    least_devices,
)
from transferqueue.workflows.planner.simulated_job import (
    GENERATE,
    TRAIN,
    BatchFeed,
    SimStage,
    Simulated,
    SimulatedJob,
    simulate,
)

TIE: Final = 0.01
ITERATIONS: Final = 4
FEEDS: Final = (1, 4, 16)
"""Micro-batches to try, as fractions of a batch: 1 trains when all rows are there."""
SEED: Final = 0
Objective = Literal["speed", "money"]


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a job.

    Args:
        instances: by stage; of ``train``: units that share a batch.
        micro_rows: the trainer's `at_least`.
        depth: batches that may be outstanding beyond the current one.
        devices: all devices.
        slots: rows that an instance generates at once.
        generates_on: name of the kind of devices that generate; default "".
        trains_on: name of the kind of devices that train; default "".
        price: of all devices for an hour; default 0.0.
    """

    instances: dict[str, int]
    micro_rows: int
    depth: int
    devices: int
    slots: int
    generates_on: str = ""
    trains_on: str = ""
    price: float = 0.0

    @property
    def mode(self) -> str:
        """The mode's name in the literature."""
        return f"asynchronous, staleness {self.depth}" if self.depth else "synchronous, streaming"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its bound and its simulation.

    Args:
        plan: the plan.
        bound_s: lower bound of a step in seconds, the first one's wait included.
        step_s: simulated seconds of a step, the first one's wait included.
        cost: price of a step's devices.
        idle: idle share by stage.
        simulated: the simulation.
    """

    plan: DevicePlan
    bound_s: float
    step_s: float
    cost: float
    idle: dict[str, float]
    simulated: Simulated

    @property
    def later_step_s(self) -> float:
        """Median seconds from one step to the next: the time of a step in a long run."""
        return float(np.median(np.diff(self.simulated.steps))) if len(self.simulated.steps) > 1 else self.step_s

    def objective(self, objective: Objective) -> float:
        """Return the figure to minimise.

        Args:
            objective: ``"money"``: the cost; ``"speed"``: the seconds of a step.
        """
        return self.cost if objective == "money" else self.step_s


def plan(profile: Profile, objective: Objective = "speed") -> list[Planned]:
    """Return the plans that were simulated, best first.

    Args:
        profile: costs and budget of the job.
        objective: ``"speed"`` (default) or ``"money"``.

    Raises:
        UsageError: a profile without a possible plan.
    """
    check(profile)
    lengths, simulated = draw_lengths(profile), list[Planned]()
    first = algorithm_1(profile)
    if first is not None:
        simulated.append(predict(profile, first, bound_s(profile, first, lengths), lengths))
    best = min((planned.objective(objective) for planned in simulated), default=math.inf)
    for bound, candidate in _in_order(profile, lengths, objective):
        if _objective(bound, candidate, objective) > best * (1 + TIE):
            break
        if candidate != first:
            simulated.append(predict(profile, candidate, bound, lengths))
            best = min(best, simulated[-1].objective(objective))
    return sorted(simulated, key=lambda planned: _rank(planned, best, objective))


def _in_order(profile: Profile, lengths: Lengths, objective: Objective) -> list[tuple[float, DevicePlan]]:
    """Every candidate with its bound, by the objective."""
    bounded = [(bound_s(profile, candidate, lengths), candidate) for candidate in plans(profile)]
    return sorted(bounded, key=lambda pair: (_objective(pair[0], pair[1], objective), pair[1].price, pair[1].devices))


def _objective(seconds: float, candidate: DevicePlan, objective: Objective) -> float:
    return seconds * candidate.price / 3600 if objective == "money" else seconds


def _rank(planned: Planned, best: float, objective: Objective) -> tuple[float, ...]:
    found = planned.objective(objective)
    if found <= best * (1 + TIE):
        return (0.0, planned.plan.price, planned.plan.devices, planned.plan.depth, found)
    return (1.0, found)


# ---------------------------------------------------------------- candidates


def plans(profile: Profile) -> Iterator[DevicePlan]:
    """Yield every candidate (rule 1)."""
    for generates, trains in product(profile.all_kinds, repeat=2):
        for instances, devices, price in _splits(profile, generates, trains):
            for depth, part, slots in product(profile.depths, _feeds(profile), _generation(generates).slots_tried):
                yield DevicePlan(
                    instances=instances,
                    micro_rows=max(1, profile.batch_rows // part),
                    depth=depth,
                    devices=devices,
                    slots=slots,
                    generates_on=generates.name,
                    trains_on=trains.name,
                    price=price,
                )


def _feeds(profile: Profile) -> Sequence[int]:
    return FEEDS if profile.streams else FEEDS[:1]


def _splits(profile: Profile, generates: DeviceKind, trains: DeviceKind) -> Iterator[tuple[dict[str, int], int, float]]:
    """Yield the instances of each stage, their devices, and the price of these."""
    paid = [stage for stage in profile.stages if stage.devices]
    if least_devices(generates, trains, sum(stage.devices for stage in paid)) > 0:
        return
    generation, train = _generation(generates), _train(trains)
    for generators, trainers, *others in product(*_counts(generates, trains, paid)):
        there = trainers * train.devices
        there += sum(count * stage.devices for count, stage in zip(others, paid, strict=True))
        here = generators * generation.devices
        if here > generates.devices or there > trains.devices:
            continue
        if generates.name == trains.name and here + there > trains.devices:
            continue
        instances = {GENERATE: generators, TRAIN: trainers}
        instances |= {stage.name: count for stage, count in zip(paid, others, strict=True)}
        instances |= {stage.name: _enough(trains, stage) for stage in profile.stages if not stage.devices}
        yield instances, here + there, here * generates.price + there * trains.price


def _counts(generates: DeviceKind, trains: DeviceKind, paid: list[StageProfile]) -> list[range]:
    """How many instances each stage may have, if the others have one."""
    generation, train = _generation(generates), _train(trains)
    least = [train.devices, *(stage.devices for stage in paid)]
    other = generation.devices if generates.name == trains.name else 0
    counts = [range(1, (generates.devices - (sum(least) if other else 0)) // generation.devices + 1)]
    left = trains.devices - other - sum(least)
    counts += [range(1, (left + devices) // devices + 1) for devices in least]
    most = train.instances_max or len(counts[1])
    return [counts[0], counts[1][:most], *counts[2:]]


def _enough(trains: DeviceKind, work: StageProfile) -> int:
    """Return the number of instances of a stage without devices that keeps the fastest possible trainer from waiting
    for it.
    """
    train = _train(trains)
    units = min(trains.devices // train.devices, train.instances_max or trains.devices)
    return max(1, math.ceil((work.row_s + work.call_s) * units / train.row_s))


def algorithm_1(profile: Profile) -> DevicePlan | None:
    """Return StreamRL's allocation: on one site the split with the least bound; on two all devices of both kinds, less
    the instances that the faster side can spare.

    The micro-batch is the smallest, the depth the largest, and the slots the most that are tried. None if the devices
    are of more than two kinds.
    """
    kinds = profile.all_kinds
    lengths = draw_lengths(profile)
    most = [
        candidate
        for candidate in plans(profile)
        if candidate.depth == max(profile.depths)
        and candidate.micro_rows == max(1, profile.batch_rows // _feeds(profile)[-1])
        and candidate.slots == max(_generation(_kind(profile, candidate.generates_on)).slots_tried)
        and (len(kinds) == 1 or candidate.generates_on != candidate.trains_on)
    ]
    if len(kinds) > 2 or not most:
        return None
    bounds = {id(candidate): bound_s(profile, candidate, lengths) for candidate in most}
    least = min(bounds.values())
    return min(
        (candidate for candidate in most if bounds[id(candidate)] <= least * (1 + 1e-9)),
        key=lambda candidate: (candidate.price, candidate.devices),
    )


# ---------------------------------------------------------------- bounds


def bound_s(profile: Profile, candidate: DevicePlan, lengths: Lengths) -> float:
    """Return a lower bound of a step, in seconds: the slowest stage.

    When synchronous, also the longest row, and one row trained after it.
    """
    generation, train = _costs(profile, candidate)
    rows, generators = profile.batch_rows, candidate.instances[GENERATE]
    share = -(-rows * (candidate.depth + 1) // generators)
    tokens_s = float(lengths.sum(axis=1).mean()) * _token_s_least(generation.curve, min(candidate.slots, share))
    generate = (tokens_s + rows * generation.prompt_ms / 1000) / generators
    row_s = train.row_s / candidate.instances[TRAIN]
    others = [rows * (stage.row_s + stage.call_s) / candidate.instances[stage.name] for stage in profile.stages]
    sides = max(generate, rows * row_s + train.call_s + train.step_s, *others, 0.0)
    if candidate.depth:
        return sides
    longest = (float(lengths.max(axis=1).mean()) * generation.curve.token_ms(1) + generation.prompt_ms) / 1000
    after = row_s + train.call_s + train.step_s + _update_s(profile, candidate)
    return max(sides, max(generate, longest) + after)


@lru_cache(maxsize=4096)
def _token_s_least(curve: DecodeCurve, rows_max: int) -> float:
    """Return the smallest time per token that an instance can reach with at most `rows_max` rows at once.

    Between two points of the curve, a line over its abscissa has no minimum inside, so the ends suffice.
    """
    widths = {1, rows_max, *(int(rows) for rows in curve.rows if rows <= rows_max)}
    return min(curve.token_ms(width) / (1000 * width) for width in widths)


def draw_lengths(profile: Profile, iterations: int = ITERATIONS) -> Lengths:
    """Draw the lengths of the rows of some steps from the observed ones, int64 ``[iterations, batch_rows]``; always the
    same.
    """
    drawn = np.random.default_rng(SEED).choice(profile.generation.lengths, (iterations, profile.batch_rows))
    return drawn.astype(np.int64)


# ---------------------------------------------------------------- simulation


def predict(profile: Profile, candidate: DevicePlan, bound: float, lengths: Lengths) -> Planned:
    """Simulate a candidate. lengths: of its rows, ``[iterations, batch_rows]``."""
    generation, train = _costs(profile, candidate)
    engine = LaneEngine(candidate.slots, generation.curve, prompt_s=generation.prompt_ms / 1000)
    stages = tuple(
        SimStage(name=stage.name, row_s=stage.row_s, call_s=stage.call_s, instances=candidate.instances[stage.name])
        for stage in profile.stages
    )
    job = SimulatedJob(
        lengths=lengths,
        predicted=lengths,
        engines=(engine,) * candidate.instances[GENERATE],
        stages=stages,
        train=SimStage(name=TRAIN, row_s=train.row_s / candidate.instances[TRAIN], call_s=train.call_s),
        feed=BatchFeed(rows=candidate.micro_rows),
        longest_first=profile.by_length,
        depth=candidate.depth,
        update_s=_update_s(profile, candidate),
        step_s=train.step_s,
    )
    simulated = simulate(job)
    step_s = simulated.total_s / len(lengths)
    return Planned(
        plan=candidate,
        bound_s=bound,
        step_s=step_s,
        cost=step_s * candidate.price / 3600,
        idle=simulated.idle(candidate.instances | {TRAIN: 1}),
        simulated=simulated,
    )


def _update_s(profile: Profile, candidate: DevicePlan) -> float:
    here, there = _kind(profile, candidate.generates_on), _kind(profile, candidate.trains_on)
    return _costs(profile, candidate)[1].update_s + (profile.link_s if here.site != there.site else 0.0)


def _costs(profile: Profile, candidate: DevicePlan) -> tuple[GenerationProfile, StageProfile]:
    """The costs of generation and training in the whole job."""
    factors = profile.factors(candidate.depth)
    generation, train = _kind(profile, candidate.generates_on), _kind(profile, candidate.trains_on)
    return factors.generating(_generation(generation)), factors.training(_train(train))


def _kind(profile: Profile, name: str) -> DeviceKind:
    return next(kind for kind in profile.all_kinds if kind.name == name)


def _generation(kind: DeviceKind) -> GenerationProfile:
    if kind.generation is None:
        raise LookupError(f"kind {kind.name} has no costs of generation; take it from Profile.all_kinds")
    return kind.generation


def _train(kind: DeviceKind) -> StageProfile:
    if kind.train is None:
        raise LookupError(f"kind {kind.name} has no costs of training; take it from Profile.all_kinds")
    return kind.train


def assumed(profile: Profile) -> list[str]:
    """Return the assumptions of a plan of `profile`, to be shown with it."""
    known = "which the dispatch knows (an oracle)" if profile.by_length else "and rows are taken as they were put"
    return [
        f"lengths are drawn from the {len(profile.generation.lengths)} observed ones, {known}",
        "other plans cost as much more than their parts alone as the trial runs did"
        if profile.trials
        else "transfers and the queue itself take no time; processes do not disturb each other: no trial was run",
        "units of the trainer share a batch evenly; the time of a micro-batch beside its rows does not shrink then",
        f"{ITERATIONS} steps from an empty table: the first has nothing to overlap with",
        "stages without devices have as many instances as keep the trainer from waiting for them",
    ]
