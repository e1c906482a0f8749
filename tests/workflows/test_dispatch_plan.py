"""Dispatch without I/O: decode curves, engines in simulated time against the production ledger, plans that never lose
in prediction, the dispatcher's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.given_lengths import PTL, length_of
from tests.scale import examples
from tests.workflows.one_batch import Site
from tests.workflows.one_batch import generation_s as by_the_ledger
from transferqueue.adapters.protocols import Completion, Pause, Prompt, Sampling
from transferqueue.errors import UsageError
from transferqueue.workflows.dispatch.decode import DecodeMeter, MeteredGenerator
from transferqueue.workflows.dispatch.dispatcher import LengthDispatcher, priorities
from transferqueue.workflows.planner.batch_plan import GAIN_MIN, EngineLane, EngineReport, Plan, plan_batch
from transferqueue.workflows.planner.engine_times import DecodeCurve, LaneEngine, generation_s

DRAWN = Sampling(tokens_max=16)
FLAT = DecodeCurve((1.0, 64.0), (10.0, 10.0))
STEEP = DecodeCurve((1.0, 8.0), (10.0, 40.0))
NONE = np.empty(0)


def engine(name: str, slots: int = 4, curve: DecodeCurve = STEEP, **said: str) -> EngineReport:
    return EngineReport(name=name, slots=slots, curve=curve, **said)


# ---------------------------------------------------------------- curves


def test_a_curve_refuses_what_is_none() -> None:
    for rows, ms in (((1.0,), ()), ((2.0, 1.0), (1.0, 1.0)), ((1.0,), (0.0,)), ((1.0,), (float("nan"),))):
        with pytest.raises(UsageError, match="as many positive numbers of each, ascending"):
            DecodeCurve(rows, ms)
    for refill_ms in (-1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="is no time; give 0 or more milliseconds"):
            DecodeCurve(refill_ms=refill_ms)
    with pytest.raises(UsageError, match="has no measurement"):
        DecodeCurve().token_ms(1)


def _replay(ptl_ms: DecodeCurve, lengths: Sequence[int], slots: int) -> DecodeMeter:
    """What a meter learns of an engine that follows a curve exactly."""
    meter, waiting, running, now = DecodeMeter(), list(enumerate(lengths)), {}, 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            row, length = waiting.pop(0)
            meter.began(row, now)
            running[row] = (length, float(length))
        step = min(left for _, left in running.values())
        now += step * ptl_ms.token_ms(len(running)) / 1000
        for row, (length, left) in list(running.items()):
            running[row] = (length, left - step)
            if left - step < 1e-9:
                meter.ended(row, length, now)
                del running[row]
    return meter


def test_a_meter_learns_the_curve_of_an_engine() -> None:
    curve = DecodeCurve((1.0, 32.0), (8.0, 39.0))
    lengths = np.random.default_rng(0).integers(5, 200, 300).tolist()
    meter = DecodeMeter()
    for slots in (1, 4, 32):
        learned = _replay(curve, lengths, slots).curve()
        assert learned.token_ms(slots) == pytest.approx(curve.token_ms(slots), rel=0.03)
    assert meter.curve() == DecodeCurve()


def test_pauses_and_aborted_completions_say_nothing() -> None:
    meter = DecodeMeter()
    meter.began("a", 0.0)
    meter.began("b", 0.0)
    meter.gave_up("b", 0.0)
    meter.gave_up("b", 0.0)
    meter.stopped(1.0)
    meter.went_on(9.0)
    meter.ended("a", 100, 10.0)
    assert meter.curve() == DecodeCurve((1.0,), (20.0,))


def test_a_meter_learns_how_long_a_slot_is_empty_and_what_an_engine_without_rows_waits_is_no_refill() -> None:
    meter = DecodeMeter()
    for batch in (0.0, 100.0):
        meter.began("long", batch)
        for row in range(8):
            meter.began("row", batch + row * 1.03)
            meter.ended("row", 10, batch + row * 1.03 + 1.0)
        meter.ended("long", 90, batch + 9.0)
    assert meter.curve().refill_ms == pytest.approx(30.0)


def test_of_rows_that_end_together_the_refill_is_that_of_one() -> None:
    meter = DecodeMeter()
    meter.began("stays", 0.0)
    for row in range(40):
        meter.began(row, 0.0)
    for row in range(40):
        meter.ended(row, 10, 1.0 + 0.01 * row)
        if row:
            meter.began(-row, 1.0 + 0.01 * row + 0.004)
    assert meter.curve().refill_ms == pytest.approx(4.0)


def test_a_bin_follows_an_engine_that_became_slower() -> None:
    meter, now = DecodeMeter(), 0.0
    for token_s in (0.001, 0.005):
        for row in range(100):
            meter.began(row, now)
            now += 400 * token_s
            meter.ended(row, 400, now)
    assert meter.curve().ms[0] > 4.0


class _Clocked:
    """An engine whose completions take a second each, one after another."""

    version = 3

    def __init__(self) -> None:
        self.now, self.calls = 0.0, []

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = 0.0
    ) -> Iterator[Completion]:
        def completions() -> Iterator[Completion]:
            for at in range(len(prompts)):
                self.now += 1.0
                ids = np.zeros(10, np.int32)
                yield Completion(prompt=at, sample=0, ids=ids, logprobs=ids, finish_reason="stop", spans=((3, 10),))

        return completions()

    def pause(self, mode: Pause, *, timeout_s: float = 0.0) -> None:
        self.calls.append(mode)
        self.now += 5.0

    def resume(self) -> None:
        self.calls.append("resume")

    def update_weights(self, source: object, version: int, *, timeout_s: float = 0.0) -> None:
        self.now += 7.0

    def close(self) -> None:
        self.calls.append("close")


def test_a_metered_engine_is_the_engine_and_measures_it() -> None:
    told: list[DecodeCurve] = []
    inner = _Clocked()
    metered = MeteredGenerator(inner, told.append, now=lambda: inner.now)
    for _ in range(32):
        (done,) = metered.generate([Prompt.of([1])], DRAWN)
        assert len(done.ids) == 10
    assert told == [DecodeCurve((1.0,), (100.0,))]
    metered.pause(Pause.WAIT)
    metered.resume()
    metered.update_weights([], 4)
    metered.close()
    assert (metered.version, inner.calls) == (3, [Pause.WAIT, "resume", "close"])
    left = metered.generate([Prompt.of([1]), Prompt.of([2])], DRAWN)
    next(left)
    left.close()
    assert metered.curve().rows[0] < 1.1


# ---------------------------------------------------------------- the schedule


def test_bad_schedules_are_refused() -> None:
    rows = np.array([3, 4])
    with pytest.raises(UsageError, match="not positive tokens of the same rows"):
        generation_s(rows, rows[:1], [LaneEngine(1, FLAT)], longest_first=True)
    for engines in ([], [LaneEngine(0, FLAT)], [LaneEngine(1, DecodeCurve())]):
        with pytest.raises(UsageError, match="each with a slot and a measured curve"):
            generation_s(rows, rows, engines, longest_first=True)


@settings(deadline=None, max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=40),
    instances=st.integers(1, 5),
    slots=st.integers(1, 10),
    tail=st.integers(0, 4),
    tail_slots=st.integers(1, 10),
    order=st.sampled_from(["given", "longest"]),
)
def test_the_schedule_is_what_the_ledger_does(
    lengths: list[int], instances: int, slots: int, tail: int, tail_slots: int, order: str
) -> None:
    site, known = Site(instances, slots), np.array(lengths)
    lanes = {
        str(at): EngineLane("tail", min(slots, tail_slots)) if at < tail else EngineLane("regular", slots)
        for at in range(instances)
    }
    plan = Plan(order=order, cut=int(np.quantile(known, 0.7)), lanes=lanes if 0 < tail < instances else {})
    engines = [
        LaneEngine(lane.slots, PTL, lane.lane)
        for at in range(instances)
        for lane in [plan.lanes.get(str(at), EngineLane("any", slots))]
    ]
    ours = generation_s(known, known, engines, longest_first=order == "longest", cut=plan.cut)
    assert ours == by_the_ledger(known, known, site, plan)


def test_rows_that_end_together_wait_for_their_slots_one_after_another() -> None:
    slow = DecodeCurve((1.0, 4.0), (10.0, 10.0), 50.0)
    lengths = np.array([10, 10, 10, 10])
    assert generation_s(lengths[:2], lengths[:2], [LaneEngine(2, slow)], longest_first=False) == pytest.approx(0.1)
    assert generation_s(lengths, lengths, [LaneEngine(2, slow)], longest_first=False) == pytest.approx(0.1 + 0.1 + 0.1)
    apart = np.array([10, 20, 10, 10])
    assert generation_s(apart, apart, [LaneEngine(2, slow)], longest_first=False) == pytest.approx(0.1 + 0.05 + 0.2)


# ---------------------------------------------------------------- plans


def test_bad_batches_are_refused_and_what_is_not_measured_keeps_its_order() -> None:
    with pytest.raises(UsageError, match="one positive number of tokens a row"):
        plan_batch(np.array([0, 3]), [engine("a")], NONE)
    with pytest.raises(UsageError, match='engine "a" with 0 slots'):
        engine("a", slots=0)
    assert plan_batch(np.array([3]), [], NONE) == Plan(why="not measured yet: there is no engine")
    plan = plan_batch(np.array([3]), [engine("a"), engine("b", curve=DecodeCurve())], NONE)
    assert (plan.order, plan.why) == ("given", "not measured yet: b")


@settings(deadline=None, max_examples=examples(40))
@given(
    expected=st.lists(st.integers(1, 20_000), min_size=1, max_size=60),
    slots=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    errors=st.lists(st.floats(0.1, 10.0), max_size=20),
)
def test_no_plan_is_predicted_to_be_slower_than_the_given_order(
    expected: list[int], slots: list[int], errors: list[float]
) -> None:
    engines = [engine(str(at), each) for at, each in enumerate(slots)]
    plan = plan_batch(np.array(expected), engines, np.array(errors))
    assert plan.predicted_s <= plan.given_s
    assert plan.order == "given" or plan.predicted_s <= (1 - GAIN_MIN) * plan.given_s + 1e-3
    assert all(lane.slots <= slots[int(name)] for name, lane in plan.lanes.items())


def test_a_long_tail_is_generated_first() -> None:
    rng = np.random.default_rng(0)
    expected = rng.permutation(np.concatenate([rng.integers(80, 121, 230), rng.integers(3000, 5000, 26)]))
    curve = DecodeCurve((1.0, 16.0), (10.0, 15.0))
    plan = plan_batch(expected, [engine("a", 16, curve), engine("b", 16, curve)], NONE)
    assert plan.order == "longest"
    assert plan.predicted_s < 0.9 * plan.given_s


def _batch(rows: int, skew: str, seed: int) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Prompts of published difficulty, and the lengths of their responses."""
    ids = np.random.default_rng((seed, rows)).integers(0, 256, (rows, 32)).tolist()
    prompts = [Prompt.of(each) for each in ids]
    return [prompt.ids for prompt in prompts], np.array([length_of(prompt, 320, skew) for prompt in prompts])


@cache
def _of_published_prompts(skew: str) -> LengthDispatcher:
    """A dispatcher that has seen prompts of this kind: it was judged on each lesson before it learned it."""
    dispatcher, lesson = LengthDispatcher(batch_rows=192), 256
    for part in range(10):
        ids, lengths = _batch(lesson, skew, 10_000 + part)
        expected = dispatcher.expect(ids).tokens
        dispatcher.learn(ids, (part * lesson + np.arange(lesson)).tolist(), expected, lengths)
        dispatcher.refit()
    return dispatcher


def _published(skew: str, seed: int, refill_ms: float) -> tuple[Plan, float, float]:
    """The plan for a batch of published lengths by the errors of a real ranker; and the seconds by its true lengths,
    under the plan and in the given order."""
    dispatcher = deepcopy(_of_published_prompts(skew))  # its draws do not depend on plans before
    ids, lengths = _batch(192, skew, seed)
    expected = dispatcher.expect(ids).tokens
    curve = DecodeCurve((4.0, 9.0, 15.0), (8.9, 9.2, 9.36), refill_ms)
    plan = dispatcher.plan(expected, [engine(name, 16, curve) for name in "ab"])
    lanes = [plan.lanes.get(name, EngineLane("any", 16)) for name in "ab"]
    planned = [LaneEngine(lane.slots, curve, lane.lane) for lane in lanes]
    longest_first = plan.order == "longest"
    seconds = generation_s(lengths, expected, planned, longest_first=longest_first, cut=plan.cut)
    given_s = generation_s(lengths, expected, [LaneEngine(16, curve)] * 2, longest_first=False)
    return plan, seconds, given_s


@pytest.mark.parametrize(
    ("skew", "refill_ms"), [("published", 0.0), ("published", 25.0), ("mild", 0.0), ("mild", 25.0), ("mild", 60.0)]
)
def test_no_batch_of_the_published_lengths_is_slower_than_in_the_given_order(skew: str, refill_ms: float) -> None:
    for seed in range(5):
        plan, seconds, given_s = _published(skew, seed, refill_ms)
        assert seconds <= 1.01 * given_s, (seed, plan)
    if refill_ms < 60.0:
        assert plan.order == "longest"
        assert plan.predicted_s < 0.95 * plan.given_s


def test_engines_that_refill_slowly_keep_the_given_order_which_spreads_the_short_rows() -> None:
    expected = np.random.default_rng(0).permutation(np.repeat([30, 60, 120], [96, 64, 32]))
    orders = [
        plan_batch(expected, [engine(name, 16, DecodeCurve((1.0, 16.0), (9.0, 9.4), refill_ms)) for name in "ab"], NONE)
        for refill_ms in (0.0, 200.0)
    ]
    assert [plan.order for plan in orders] == ["longest", "given"]
    assert "no plan is predicted to save" in orders[1].why


def test_a_plan_whose_gain_is_within_its_error_is_not_used() -> None:
    expected = np.random.default_rng(0).integers(90, 110, 64)
    ratios = np.array([0.1, 0.3, 1.0, 3.0, 10.0])  # what the ranker says has little to do with the lengths
    plans = [plan_batch(expected, [engine(name, 4, FLAT) for name in "ab"], ratios, seed=seed) for seed in range(20)]
    assert sum(plan.order == "longest" for plan in plans) <= 5  # by one draw it was 11


def test_a_large_batch_is_thinned_and_takes_about_as_long() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 8192)
    plan = plan_batch(lengths, [engine("a", 64, FLAT), engine("b", 64, FLAT)], NONE)
    whole = generation_s(lengths, lengths, [LaneEngine(64, FLAT)] * 2, longest_first=False)
    assert plan.given_s == pytest.approx(whole, rel=0.1)


def test_batches_that_overlap_fill_the_slots_of_a_tail_so_that_no_plan_makes_engines_generate_less() -> None:
    expected = np.random.default_rng(0).permutation(np.concatenate([np.full(230, 100), np.full(26, 4000)]))
    engines = [engine(name, 32, DecodeCurve((1.0, 32.0), (9.0, 10.0))) for name in "ab"]
    alone, overlapping = (plan_batch(expected, engines, NONE, overlapping=each) for each in (False, True))
    assert alone.order == "longest"
    assert overlapping.given_s < 0.8 * alone.given_s  # the next batch fills the tail
    lanes = [LaneEngine(overlapping.lanes.get(each.name, EngineLane("any", 32)).slots, each.curve) for each in engines]
    assert overlapping.order == "given" or min(lane.slots for lane in lanes) >= 16, overlapping
    assert overlapping.predicted_s <= overlapping.given_s


# ---------------------------------------------------------------- the dispatcher


def _taught(noise: float, batch_rows: int = 64) -> LengthDispatcher:
    """A dispatcher after eight batches of prompts whose one token says how long their answers are, up to noise."""
    rng = np.random.default_rng(0)
    dispatcher = LengthDispatcher(batch_rows=batch_rows)
    for batch in range(8):
        kinds = rng.integers(1, 9, batch_rows)
        prompts = [[int(kind)] * 4 for kind in kinds]
        lengths = (50 * kinds if noise < 1 else rng.permutation(50 * kinds)).astype(np.int64)
        expected = dispatcher.expect(prompts)
        dispatcher.learn(prompts, (batch * batch_rows + np.arange(batch_rows)).tolist(), expected.tokens, lengths)
        if dispatcher.refit_due:
            dispatcher.refit()
    return dispatcher


def test_it_plans_the_given_order_until_it_has_skill_and_says_so() -> None:
    engines = [engine("a"), engine("b")]
    dispatcher = LengthDispatcher(batch_rows=64)
    assert dispatcher.plan(np.zeros(3, np.int64), engines).why == "given order: 0 of 20 prompts seen"
    skilled = _taught(0.0)
    expected = skilled.expect([[kind] * 4 for kind in range(1, 9)] * 8)
    assert skilled.plan(expected.tokens, engines).order == "longest"
    figures = skilled.figures()
    assert figures["skilled"] is True
    assert figures["recall_20"] > 0.8
    assert (figures["order"], figures["ranker_version"]) == ("longest", 8)
    blind = _taught(1.0)
    plan = blind.plan(blind.expect([[1] * 4] * 8).tokens, engines)
    assert plan.order == "given"
    assert "no better than chance" in plan.why
    with pytest.raises(UsageError, match="give one a row"):
        blind.learn([[1]], [0], np.array([1, 2]), np.array([1]))


def test_each_refit_is_judged_by_the_rows_since_the_one_before() -> None:
    dispatcher = _taught(0.0)
    judged = [refit.judged_rows for refit in dispatcher.refits]
    assert judged == [0] + [64] * 7
    assert dispatcher.refits[0].recall == ()
    assert dispatcher.refits[-1].recall[0] > 0.8
    assert dispatcher.refits[-1].figures() == {
        "ranker_version": 8,
        "rows": 512,
        "judged_rows": 64,
        "recall_20": dispatcher.refits[-1].recall[0],
        "recall_10": dispatcher.refits[-1].recall[1],
        "recall_5": dispatcher.refits[-1].recall[2],
    }


def test_rows_without_tokens_teach_nothing_and_rows_without_expectation_are_not_judged() -> None:
    dispatcher = LengthDispatcher(batch_rows=4)
    dispatcher.learn([[1], [2]], [0, 1], np.array([0, 5]), np.array([3, 0]))
    assert (dispatcher.ranker.rows, dispatcher.accuracy().rows) == (1, 0)


def test_priority_is_the_step_first_and_then_the_length() -> None:
    steps, expected = np.array([1, 0, 0]), np.array([99, 5, 9])
    assert np.argsort(-priorities(steps, expected, Plan(order="longest"))).tolist() == [2, 1, 0]
    assert np.argsort(-priorities(steps, expected, Plan()), kind="stable").tolist() == [1, 2, 0]
