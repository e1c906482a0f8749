"""What is measured of a step, and what the scaler does with it, with a flow that only notes what it is asked."""

from __future__ import annotations

from concurrent.futures import Future

from transferqueue.workflows.elastic.controller import ElasticController, ElasticTerms
from transferqueue.workflows.elastic.measure import StepMeter
from transferqueue.workflows.elastic.scaler import ELASTIC, Scaler
from transferqueue.workflows.flow.draining import REMOVED, Removed
from transferqueue.workflows.flow.events import WAIT, WORK, Event, Figures, TimeSpan
from transferqueue.workflows.flow.processes.stage_process import StageJob


def step(number: int, at: float, idle_s: float) -> Figures:
    return Figures(kind="step", at=at, values={"step": number, "idle_s": idle_s})


def worked(start: float, end: float) -> TimeSpan:
    return TimeSpan(name=WORK, start=start, end=end, rows=1)


def test_a_step_is_measured_when_the_next_one_ends() -> None:
    meter = StepMeter()
    meter.span("rollout-0", worked(0.0, 4.0))
    meter.span("rollout-1", worked(0.0, 2.0))
    assert meter.step(step(1, 10.0, 1.0)) is None
    assert meter.step(step(2, 20.0, 6.0)) is None
    meter.span("rollout-0", worked(11.0, 19.0))
    meter.span("rollout-1", worked(14.0, 24.0))
    measured = meter.step(step(3, 30.0, 0.0))
    assert measured is not None
    assert measured.step == 2
    times = measured.times
    assert (times.seconds, times.trainer_wait_s, times.generators) == (10.0, 6.0, 2)
    assert times.generator_wait_s == (2.0 + 4.0) / 2
    assert (times.generation_s, times.training_s, times.delta_s) == (7.0, 4.0, 3.0)


def test_a_step_in_which_a_generator_came_or_left_is_not_measured() -> None:
    meter = StepMeter()
    meter.span("rollout-0", worked(0.0, 4.0))
    for number in (1, 2):
        meter.step(step(number, 10.0 * number, 0.0))
    meter.span("rollout-1", TimeSpan(name=WAIT, start=15.0, end=16.0))
    assert meter.step(step(3, 30.0, 0.0)) is None
    measured = meter.step(step(4, 40.0, 0.0))
    assert measured is not None
    assert measured.times.generators == 2
    meter.left("rollout-1", 41.0)
    assert meter.step(step(5, 50.0, 0.0)) is None
    assert meter.step(step(6, 60.0, 0.0)) is None
    measured = meter.step(step(7, 70.0, 0.0))
    assert measured is not None
    assert measured.times.generators == 1


class NotingFlow:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def add(self, job: StageJob) -> None:
        self.asked.append(f"+{job.label}")

    def remove(self, label: str, *, deadline_s: float = 0.0) -> Future[Removed]:
        self.asked.append(f"-{label}")
        return Future()


class Table:
    """Of no rows."""

    def stats(self) -> dict[str, object]:
        return {"tasks": {"rollout": {"ready": 0, "held": 0}}}


NOW = [0.0]
TEMPLATE = StageJob(name="rollout", table="t", factory="m:f", elastic=True)


def scaler(count: int, told: list[Figures], **terms: float) -> Scaler:
    def observe(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == ELASTIC:
            told.append(event)

    controller = ElasticController(ElasticTerms(**terms))  # type: ignore[arg-type]
    return Scaler(controller, TEMPLATE, count=count, observe=observe, deadline_s=5.0, clock=lambda: NOW[0])


def play(heard: Scaler, first: int, last: int, busy_s: float, idle_s: float) -> None:
    """Steps of 10 s in which every generator worked `busy_s` and the trainer waited `idle_s`."""
    for number in range(first, last):
        for at in range(heard.generators):
            heard(f"rollout-{at}", worked(10.0 * number, 10.0 * number + busy_s))
        NOW[0] = 10.0 * (number + 1)
        heard("train-0", step(number, 10.0 * (number + 1), idle_s))


def test_a_slow_generation_gets_a_process_and_a_fast_one_loses_it() -> None:
    told: list[Figures] = []
    heard, flow = scaler(1, told, max=2), NotingFlow()
    with heard.running(flow, Table(), "rollout"):  # type: ignore[arg-type]
        play(heard, 0, 8, busy_s=10.0, idle_s=7.0)
        assert flow.asked == ["+rollout-1"]
        play(heard, 8, 16, busy_s=3.0, idle_s=0.0)
        assert flow.asked == ["+rollout-1", "-rollout-1"]
        assert heard.generators == 1
        play(heard, 16, 30, busy_s=10.0, idle_s=7.0)
        assert len(flow.asked) == 2, "rollout-1 still drains"
        heard("rollout-1", Figures(kind=REMOVED, at=301.0, values={}))
        play(heard, 31, 50, busy_s=10.0, idle_s=7.0)
        assert flow.asked[2:] == ["+rollout-1"]
    changes = [event.values for event in told if event.values["by"]]
    assert [change["by"] for change in changes] == [1, -1, 1]
    assert changes[0]["delta_s"] == 7.0
    assert changes[0]["bound_s"] == 5.0
    assert [event.values["delta_s"] for event in told][:2] == [7.0, 7.0]


def test_a_process_that_its_host_took_is_replaced_below_min() -> None:
    heard, flow = scaler(2, [], min=2, max=4), NotingFlow()
    with heard.running(flow, Table(), "rollout"):  # type: ignore[arg-type]
        heard("rollout-0", Figures(kind=REMOVED, at=1.0, values={"how": "preempted"}))
        assert heard.generators == 1
        heard.look(rows=3)
        heard.look(rows=3)
    assert flow.asked == ["+rollout-0"]
