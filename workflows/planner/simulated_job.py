"""A job in simulated time: generation, stages and a trainer around the production ledger.

1. The production `Ledger` admits rows (`Reserve` under the job's `Pacing`), chooses them (selectors, predicates) and
   decides which are ready. No policy is copied here; only time is simulated.
2. Engines generate as `engine_times` says. An instance of a stage takes `call_s`, plus `row_s` for each row that it
   leased. The trainer is one instance.
3. An iteration is admitted whole. Step k of the trainer takes the rows of iteration k only, as its `BatchFeed` says.
4. `update_s` after the last row of a step is trained, the weights are published: the clock advances and all rows of the
   step are acked. The trainer continues at once, if there are rows.
5. With `elastic`, the production controller is asked after each step, as in a live job. An instance that is added
   generates after `start_s`; one that is removed takes no new row and finishes those that it has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from transferqueue.errors import DeadlineExceeded, Full, UsageError
from transferqueue.ledger import Ledger
from transferqueue.policies import Compare, Fifo, LongestFirst, Pacing, Predicate, Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.workflows.elastic.controller import Change, ElasticController, ElasticTerms, StepTimes
from transferqueue.workflows.planner.engine_times import (
    Generation,
    Lane,
    LaneEngine,
    Lengths,
    SimulatedEngine,
    check_engines,
)

SESSION: Final = 1
TABLE: Final = "job"
TRAIN: Final = "train"
GENERATE: Final = "generate"
_LEASE_S: Final = 1e9


class SimStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage between generation and training, or the trainer (its name is ``train``; instances 1). Seconds."""

    name: str
    row_s: float
    call_s: float = 0.0
    instances: int = 1
    rows: int = 1

    def __post_init__(self) -> None:
        if self.instances < 1 or self.rows < 1 or not self.row_s >= 0 or not self.call_s >= 0:
            raise UsageError(
                f'stage "{self.name}": instances={self.instances}, rows={self.rows}, row_s={self.row_s}, '
                f"call_s={self.call_s}; give at least one instance and one row, and no negative time"
            )


class BatchFeed(msgspec.Struct, frozen=True, kw_only=True):
    """How a step of the trainer gets rows: at least `rows` at a time."""

    rows: int


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate: lengths and their predictions ``[iterations, batch]``, engines, stages in order, pacing.

    longest_first: the order of rows by their predictions, or as they were put. cut: predicted tokens from which a row
    is of the tail. elastic: bounds of the number of engines (None: those of `engines`); start_s: until an added one,
    which is like the last, generates. step_s: after the last row of a step, in which the trainer is busy.
    """

    lengths: Lengths
    predicted: Lengths
    engines: tuple[LaneEngine, ...]
    stages: tuple[SimStage, ...]
    train: SimStage
    feed: BatchFeed
    depth: int
    longest_first: bool = True
    cut: int = 0
    update_s: float = 0.0
    step_s: float = 0.0
    elastic: ElasticTerms | None = None
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if self.lengths.ndim != 2 or self.lengths.shape != self.predicted.shape or not self.lengths.size:
            raise UsageError(
                f"lengths {self.lengths.shape} and predicted {self.predicted.shape} are not [iterations, batch]"
            )
        if self.lengths.min() < 1:
            raise UsageError(f"length {self.lengths.min()} is not a positive number of tokens")
        check_engines(self.engines)
        if not 1 <= self.feed.rows <= self.lengths.shape[1]:
            raise UsageError(
                f"a feed of {self.feed.rows} rows does not fit a batch of {self.lengths.shape[1]}; give 1 to a batch"
            )


class Worked(msgspec.Struct, frozen=True):
    """One service of an instance, in simulated seconds."""

    stage: str
    instance: int
    start: float
    end: float
    rows: int


class Simulated(msgspec.Struct, frozen=True):
    """Result: the end of the run, when each step was trained and published, every service, and each change of the
    number of engines, with its step.
    """

    total_s: float
    steps: list[float]
    worked: list[Worked]
    changes: list[tuple[int, Change]] = []

    def idle(self, instances: dict[str, int]) -> dict[str, float]:
        """Share of the run in which the instances of each stage had no rows."""
        return {name: 1 - _busy_s(self.worked, name) / (self.total_s * count) for name, count in instances.items()}


def _busy_s(worked: list[Worked], stage: str) -> float:
    """Return busy seconds, summed over instances; overlapping services of an instance (slots) count once."""
    busy, until = 0.0, dict[int, float]()
    for service in sorted((service for service in worked if service.stage == stage), key=lambda service: service.start):
        begin = max(service.start, until.get(service.instance, 0.0))
        busy += max(0.0, service.end - begin)
        until[service.instance] = max(service.end, until.get(service.instance, 0.0))
    return busy


def simulate(job: SimulatedJob) -> Simulated:
    """Run `job` to its last step. Deterministic; takes about 0.2 ms a row and stage."""
    return _Simulation(job).run()


class _Scaling:
    """The production controller of generators, and its changes."""

    def __init__(self, terms: ElasticTerms | None) -> None:
        self._controller = None if terms is None else ElasticController(terms)
        self.is_starting = False
        self.changes: list[tuple[int, Change]] = []

    def step(self, step: int, times: StepTimes) -> Change | None:
        """Return the change after a step, if any. While an instance starts, steps decide nothing."""
        if self._controller is None or self.is_starting:
            return None
        change = self._controller.step(times)
        if change is not None:
            self.is_starting = change.by > 0
            self.changes.append((step, change))
        return change


class _Simulation:
    def __init__(self, job: SimulatedJob) -> None:
        self._job, self._ledger, self._calls, self.now = job, Ledger(), 0, 0.0
        self._iterations, self._batch = job.lengths.shape
        self._admitted, self._begun, self._step, self._trained = 0, 0, 0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._held: list[m.Leased] = []
        self._worked: list[Worked] = []
        self._steps: list[float] = []
        self._generation = Generation[m.Leased](job.engines, self._take)
        self._scaling = _Scaling(job.elastic)
        self._trainer_since, self._trainer_wait_s = 0.0, 0.0
        self._free = {stage.name: list(range(stage.instances)) for stage in (*job.stages, job.train)}
        self._open()

    def _open(self) -> None:
        self._ledger.open_session(SESSION, b"simulated-job-01", 0.0)
        names = [GENERATE, *(stage.name for stage in self._job.stages)]
        selector = LongestFirst() if self._job.longest_first else Fifo()
        tasks = [Task(GENERATE, gives=[f"{GENERATE}_out"], selector=selector, lease_s=_LEASE_S)]
        for before, stage in zip(names, (*self._job.stages, self._job.train), strict=True):
            tasks.append(Task(stage.name, needs=[f"{before}_out"], lease_s=_LEASE_S))
        depth = self._job.depth
        pacing = Pacing(TRAIN, batch_rows=self._batch, depth=depth, max_staleness=depth)
        self._apply(
            m.CreateTable(TABLE, fields=[Field(f"{name}_out", "uint8") for name in names], tasks=tasks, pacing=pacing)
        )

    def _apply(self, request: m.Request) -> object:
        self._calls += 1
        reply = self._ledger.apply(request, session=SESSION, call=self._calls, now=self.now)
        self._ledger.forget_replies(SESSION, self._calls)
        self._ledger.take_effects()
        return reply

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, act))

    def run(self) -> Simulated:
        self._react()
        while (now := self._next_s()) < math.inf:
            self.now = now
            for ended in self._generation.ended(now):
                self._done(GENERATE, ended.engine, ended.start, ended.row)
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
            self._react()
        return Simulated(self.now, self._steps, self._worked, self._scaling.changes)

    def _next_s(self) -> float:
        """Return when something happens next."""
        return min(self._generation.next_s(), self._events[0][0] if self._events else math.inf)

    def _react(self) -> None:
        """Give work to every free instance, from the first stage to the last."""
        self._admit()
        self._generation.fill(self.now)
        for stage in self._job.stages:
            while self._free[stage.name] and self._serve(stage, stage.rows, 1, []):
                pass
        self._train()

    def _admit(self) -> None:
        while self._admitted < self._iterations:
            try:
                reserved = self._apply(m.Reserve(TABLE, self._batch))
            except Full:  # the pacing says: not yet
                return
            if isinstance(reserved, m.Reserved):
                self._put(reserved)

    def _put(self, reserved: m.Reserved) -> None:
        batch, at = self._batch, self._admitted
        facts = m.RowFacts(
            tokens=self._job.predicted[at].astype("<i8").tobytes(),
            ordinal=(np.arange(batch) + at * batch).astype("<i8").tobytes(),
            policy_version=np.full(batch, reserved.version, "<i8").tobytes(),
        )
        self._apply(m.PutRequest(TABLE, batch, m.Columns(facts=facts), reservation=reserved.reservation))
        self._admitted += 1

    def _lease(self, task: str, rows: int, at_least: int, where: list[Predicate]) -> m.Leased | None:
        try:
            leased = self._apply(m.LeaseRequest(TABLE, task, rows=rows, at_least=at_least, where=where))
        except DeadlineExceeded:  # not enough is ready
            return None
        return leased if isinstance(leased, m.Leased) else None

    def _take(self, lane: Lane) -> tuple[int, m.Leased] | None:
        """Lease the next row of the current iteration for an engine: one of its class, or of the other one."""
        end = Compare("ordinal", "<", self._generation_end())
        classes: dict[Lane, list[Predicate]] = {
            "any": [],
            "tail": [Compare("tokens", ">=", self._job.cut)],
            "regular": [Compare("tokens", "<", self._job.cut)],
        }
        leased = self._lease(GENERATE, 1, 1, [end, *classes[lane]])
        if leased is None and lane != "any":
            leased = self._lease(GENERATE, 1, 1, [end])
        if leased is None:
            return None
        self._begun += 1
        row = int(np.frombuffer(leased.content.ordinal, "<i8")[0])
        return int(self._job.lengths.flat[row]), leased

    def _generation_end(self) -> int:
        """Return the first ordinal after the current iteration: long rows of the next one wait for the short ones of
        this one.
        """
        return int((self._begun // self._batch + 1) * self._batch)

    def _done(self, task: str, instance: int, start: float, leased: m.Leased) -> None:
        rows = len(leased.content.rows) // 8
        self._worked.append(Worked(task, instance, start, self.now, rows))
        columns = m.Columns(inline=[m.Inline(f"{task}_out", bytes(rows))])
        self._apply(m.Ack(TABLE, leased.lease, leased.token, columns=columns))

    def _serve(self, stage: SimStage, rows: int, at_least: int, where: list[Predicate]) -> bool:
        leased = self._lease(stage.name, rows, at_least, where)
        if leased is None:
            return False
        instance, start = self._free[stage.name].pop(), self.now

        def end() -> None:
            self._free[stage.name].append(instance)
            self._done(stage.name, instance, start, leased)

        self._at(start + stage.call_s + stage.row_s * (len(leased.content.rows) // 8), end)
        return True

    def _train(self) -> None:
        if not self._free[TRAIN] or self._step >= self._iterations:
            return
        leased = self._lease(TRAIN, *self._terms())
        if leased is None:
            return
        self._free[TRAIN].pop()
        self._trainer_wait_s += self.now - self._trainer_since
        start, step, rows = self.now, self._step, len(leased.content.rows) // 8
        self._trained += rows
        self._held.append(leased)
        last, of_step = self._trained == self._batch, self._held
        if last:
            self._step, self._trained, self._held = self._step + 1, 0, []

        def end() -> None:
            self._free[TRAIN].append(0)
            self._trainer_since = self.now
            self._worked.append(Worked(TRAIN, 0, start, self.now, rows))
            if last:
                self._at(self.now + self._job.update_s, publish)

        def publish() -> None:
            self._scale(step)
            self._steps.append(self.now)
            self._apply(m.AdvanceClock(TABLE, step + 1))
            for each in of_step:
                self._apply(m.Ack(TABLE, each.lease, each.token))

        step_s = self._job.step_s if last else 0.0
        self._at(start + self._job.train.call_s + self._job.train.row_s * rows + step_s, end)

    def _scale(self, step: int) -> None:
        """Ask the controller after a step."""
        generating = [engine for engine in self._generation.engines if engine.slots]
        waits = [engine.waited_s(self.now) for engine in generating]
        seconds = self.now - (self._steps[-1] if self._steps else 0.0)
        times = StepTimes(
            seconds=seconds,
            trainer_wait_s=min(self._trainer_wait_s, seconds),
            generator_wait_s=min(sum(waits) / max(1, len(waits)), seconds),
            generators=len(generating),
        )
        self._trainer_wait_s = 0.0
        change = self._scaling.step(step, times)
        if change is not None and change.by < 0:
            generating[-1].slots = 0  # it takes no further row
        elif change is not None:
            self._at(self.now + self._job.start_s, self._add_engine)

    def _add_engine(self) -> None:
        self._generation.engines.append(SimulatedEngine(self._job.engines[-1], self.now))
        self._scaling.is_starting = False

    def _terms(self) -> tuple[int, int, list[Predicate]]:
        """Return rows, at least, and a filter: the rows of this step."""
        end = (self._step + 1) * self._batch
        left = self._batch - self._trained
        return (
            left,
            min(left, self._job.feed.rows),
            [Compare("ordinal", ">=", end - self._batch), Compare("ordinal", "<", end)],
        )
