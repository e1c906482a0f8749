"""Which engine generates which rows of a batch: classes by expected length, and slots for each.

1. The *tail* is the rows with at least `cut` expected tokens. Engines of the tail may get fewer slots than they have: a
   token of a small batch takes less time, and a long answer is a long chain of tokens. All splits of engines, three
   cuts (StreamRL has one, the longest fifth) and three sizes of the tail's batch are considered.
2. StreamRL's estimate (PTL × P90 of the tail, PTL × P50 of the rest, times the rounds that slots force; the larger of
   the two) chooses `CANDIDATES` of them, which are simulated (`engine_times`), beside longest first without a split and
   the given order.
3. Lengths of a simulation are expected lengths times ratios from the ranker's earlier predictions, so its errors count
   against a plan. `CHOOSING` such draws choose the plan that is the fastest in the mean, and `JUDGING` others compare
   it with the given order: one draw for both would prefer the luckiest plan, and split a batch whose ranks are too
   poor.
4. A plan is used if its mean saving is at least `GAIN_MIN` of the given order's time, and at least the saving's
   standard deviation over the draws: its error for one batch. Else the given order stays, so no plan is predicted to be
   slower. By the same rule a split must save time over longest first without a split, which has less room for error.
5. Where batches overlap, a plan's time is the time that each of many such batches adds (`engine_times.period_s`): the
   next batch fills the slots that a tail leaves, so there is little to gain, and small batches for long rows cost more
   than they save. Ignoring this made a job 1.3 × slower than asynchronous without dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import UsageError
from transferqueue.workflows.planner.engine_times import (
    DecodeCurve,
    Lane,
    LaneEngine,
    Lengths,
    generation_s,
    period_s,
)

GAIN_MIN: Final = 0.02
"""Without this bound, a first sweep of the simulator lost up to 0.3 % in the mean where no gain was possible."""
CUTS: Final = (0.8, 0.7, 0.9)
TAIL_SLOTS: Final = (1.0, 0.5, 0.25)
CANDIDATES: Final = 6
CHOOSING, JUDGING = 2, 6
"""Draws of lengths. A batch waits for its plan, so each simulation delays it: of 192 rows a simulation takes 1.5 ms, a
plan 30 to 40 ms. With 8 and 8 draws a plan took 0.15 s, on busy cores 0.5 s.
"""
ROWS_MAX: Final = 1024
"""Rows of a simulation: of a larger batch every n-th, with an n-th of the slots."""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it reports itself.

    Args:
        name: unique among engines.
        slots: rows that it can generate at once, at least 1.
        curve: its time for a token; default: nothing was measured.

    Raises:
        UsageError: `slots` below 1.
    """

    name: str
    slots: int
    curve: DecodeCurve = DecodeCurve()

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise UsageError(f'engine "{self.name}" with {self.slots} slots generates nothing; give at least 1')


class EngineLane(msgspec.Struct, frozen=True):
    """The part of a plan that is for one engine.

    Args:
        lane: the class of rows that it prefers.
        slots: the rows that it runs at once.
    """

    lane: Lane
    slots: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for one batch.

    Args:
        order: ``"longest"``: the longest rows first; default ``"given"``: as given.
        cut: expected tokens from which a row is of the tail; default 0.
        lanes: by the name of the engine; one that is not named prefers no class. Default: none.
        predicted_s: simulated seconds of this plan; default 0.0: nothing was simulated.
        given_s: simulated seconds of the given order; default 0.0.
        why: the reason, in words.
    """

    order: Literal["given", "longest"] = "given"
    cut: int = 0
    lanes: dict[str, EngineLane] = {}
    predicted_s: float = 0.0
    given_s: float = 0.0
    why: str = ""

    @property
    def split(self) -> bool:
        """Whether engines prefer classes."""
        return any(lane.lane != "any" for lane in self.lanes.values())


def plan_batch(
    expected: Lengths,
    engines: Sequence[EngineReport],
    ratios: NDArray[np.float64],
    *,
    seed: int = 0,
    overlapping: bool = False,
) -> Plan:
    """Plan which engine generates which rows of a batch.

    Args:
        expected: expected tokens of each row, ``[rows]``, at least 1.
        engines: the engines.
        ratios: actual over expected lengths of earlier rows; empty: predictions are exact.
        seed: chooses which ratio each row gets; default 0.
        overlapping: the next batch may be generated before this one has ended; default False.

    Returns:
        The plan.

    Raises:
        UsageError: no rows, or lengths below 1.
    """
    if expected.ndim != 1 or not expected.size or expected.min() < 1:
        raise UsageError(f"expected {expected.shape}: give one positive number of tokens a row, for at least one row")
    unmeasured = [engine.name for engine in engines if not engine.curve.rows]
    if not engines or unmeasured:
        return Plan(why=f"not measured yet: {', '.join(unmeasured) or 'there is no engine'}")
    thin = -(-expected.size // (ROWS_MAX // 4 if overlapping else ROWS_MAX))
    rows = expected[::thin]
    draws = _draws(rows, ratios, seed)

    def seconds_of(plan: Plan, drawn: Sequence[Lengths]) -> NDArray[np.float64]:
        lanes = [_lane_of(plan, engine, thin) for engine in engines]
        simulate = period_s if overlapping else generation_s
        longest_first = plan.order == "longest"
        return np.array(
            [simulate(lengths, rows, lanes, longest_first=longest_first, cut=plan.cut) for lengths in drawn]
        )

    choosing, judging = draws[:CHOOSING], draws[-JUDGING:]
    whole, splits = _candidates(rows, engines)
    best = min([*splits, whole], key=lambda plan: float(seconds_of(plan, choosing).mean()))
    best_D = seconds_of(best, judging)
    if best.split:
        whole_D = seconds_of(whole, judging)
        best, best_D = (best, best_D) if _gain(best_D, whole_D).enough else (whole, whole_D)
    return _judged(best, best_D, seconds_of(Plan(), judging))


class _Gain(NamedTuple):
    """The share of another plan's time that a plan saves, and the saving that it needs to be used (rule 4)."""

    share: float
    wanted: float

    @property
    def enough(self) -> bool:
        return self.share >= self.wanted


def _gain(seconds_D: NDArray[np.float64], other_D: NDArray[np.float64]) -> _Gain:
    """Return the gain of a plan over another one, by the seconds of both ``[draws]``."""
    saved_D = (other_D - seconds_D) / other_D.mean()
    return _Gain(float(saved_D.mean()), max(GAIN_MIN, float(saved_D.std())))


def _judged(best: Plan, seconds_D: NDArray[np.float64], given_D: NDArray[np.float64]) -> Plan:
    """Return `best` with its prediction if it gains enough over the given order, else the given order."""
    seconds, given_s, gain = float(seconds_D.mean()), float(given_D.mean()), _gain(seconds_D, given_D)
    if gain.enough:
        return msgspec.structs.replace(best, predicted_s=round(seconds, 3), given_s=round(given_s, 3), why=_words(best))
    why = f"no plan is predicted to save {gain.wanted:.0%}; the best would take {seconds:.3g} s of {given_s:.3g} s"
    return Plan(predicted_s=round(given_s, 3), given_s=round(given_s, 3), why=why)


def _words(plan: Plan) -> str:
    if not plan.split:
        return "longest first"
    tail = [f"{name} ({lane.slots} slots)" for name, lane in plan.lanes.items() if lane.lane == "tail"]
    return f"longest first; rows of {plan.cut} or more expected tokens to {', '.join(tail)}"


def _draws(expected: Lengths, ratios: NDArray[np.float64], seed: int) -> list[Lengths]:
    """Return the lengths that the rows may turn out to have: `CHOOSING`, then `JUDGING`. Exact predictions are one draw
    for both.
    """
    if not ratios.size:
        return [expected]
    random = np.random.default_rng(seed)
    drawn = random.choice(ratios, (CHOOSING + JUDGING, expected.size))
    return list(np.maximum(1, expected * drawn).astype(np.int64))


def _lane_of(plan: Plan, engine: EngineReport, thin: int) -> LaneEngine:
    """The engine under a plan; of a batch that is thinned, with as many times fewer slots, whose tokens take as long as
    those of all.
    """
    lane = plan.lanes.get(engine.name, EngineLane("any", engine.slots))
    if thin == 1:
        return LaneEngine(lane.slots, engine.curve, lane.lane)
    curve = DecodeCurve(
        tuple(rows / thin for rows in engine.curve.rows), engine.curve.ms, engine.curve.refill_ms * thin
    )
    return LaneEngine(max(1, lane.slots // thin), curve, lane.lane)


# ---------------------------------------------------------------- candidates


def _candidates(expected: Lengths, engines: Sequence[EngineReport]) -> tuple[Plan, list[Plan]]:
    """Longest first without a split, and the best splits by StreamRL's estimate."""
    splits = sorted(_splits(expected, engines), key=lambda plan: _estimate_s(plan, expected, engines))
    whole = Plan(order="longest", lanes={engine.name: EngineLane("any", engine.slots) for engine in engines})
    return whole, splits[:CANDIDATES]


def _splits(expected: Lengths, engines: Sequence[EngineReport]) -> Iterator[Plan]:
    """Every split: the engines that are fastest with one row serve the tail first."""
    fastest = sorted(engines, key=lambda engine: engine.curve.token_ms(1))
    for count in range(1, len(engines)):
        tail = {engine.name for engine in fastest[:count]}
        for share in CUTS:
            cut = int(np.quantile(expected, share, method="higher"))
            if not 0 < np.count_nonzero(expected >= cut) < expected.size:
                continue
            for size in TAIL_SLOTS:
                yield Plan(order="longest", cut=cut, lanes=_lanes(engines, tail, size))


def _lanes(engines: Sequence[EngineReport], tail: set[str], size: float) -> dict[str, EngineLane]:
    return {
        engine.name: EngineLane("tail", max(1, int(engine.slots * size)))
        if engine.name in tail
        else EngineLane("regular", engine.slots)
        for engine in engines
    }


def _estimate_s(plan: Plan, expected: Lengths, engines: Sequence[EngineReport]) -> float:
    """StreamRL's estimate; the larger of the two classes (their sum, which the paper prints, can lose)."""
    is_tail = expected >= plan.cut
    tail = [engine for engine in engines if plan.lanes[engine.name].lane == "tail"]
    rest = [engine for engine in engines if plan.lanes[engine.name].lane != "tail"]
    return max(_class_s(plan, expected[is_tail], tail, 0.9), _class_s(plan, expected[~is_tail], rest, 0.5))


def _class_s(plan: Plan, expected: Lengths, engines: Sequence[EngineReport], quantile: float) -> float:
    slots = sum(plan.lanes[engine.name].slots for engine in engines)
    filled = min(1.0, expected.size / slots)
    token_s = max(engine.curve.token_ms(max(1.0, filled * plan.lanes[engine.name].slots)) for engine in engines) / 1000
    return -(-expected.size // slots) * token_s * float(np.quantile(expected, quantile))
