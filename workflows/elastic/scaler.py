"""Applies a controller's decisions to the generators of a running flow, on processes or on Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, Protocol

import msgspec

import transferqueue as tq
from transferqueue.errors import PeerError, UsageError
from transferqueue.workflows.elastic.controller import Change, ElasticController
from transferqueue.workflows.elastic.measure import MeasuredStep, StepMeter
from transferqueue.workflows.flow.draining import REMOVED, Removed
from transferqueue.workflows.flow.events import WAIT, WORK, Event, Figures, TimeSpan
from transferqueue.workflows.flow.processes.stage_process import StageJob

ELASTIC: Final = "elastic"
"""Kind of the event that reports a measured step (by: 0) or a change (by: 1 or −1). Its values: step, by, why,
generators (before the change), delta_s, bound_s, generation_s, training_s, seconds, patience; unknown numbers are
absent."""
LABEL: Final = "scaler"
DEADLINE_S: Final = 60.0
"""Seconds that a removed process has to give its rows back before it is killed."""
LOOK_S: Final = 2.0
"""Seconds between two reads of the table's counters, which generators report while there are any."""


class ChangingFlow(Protocol):
    """The calls of a flow that the scaler uses."""

    def add(self, job: StageJob) -> None:
        """Start one more process."""

    def remove(self, label: str, *, deadline_s: float = ...) -> Future[Removed]:
        """Drain a process."""


class Scaler:
    """Receives a flow's events and passes them on to `observe`; adds and removes processes like `template`.

    count: processes at the start, with instances 0 to count − 1. deadline_s: of a removal. The processes of `template`
    must be elastic. Safe from any thread.
    """

    def __init__(
        self,
        controller: ElasticController,
        template: StageJob,
        *,
        count: int,
        observe: Callable[[str, Event], None],
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller, self._template, self._observe = controller, template, observe
        self._deadline_s, self._clock = deadline_s, clock
        self._lock = threading.RLock()
        self._meter = StepMeter()
        self._wanted = {msgspec.structs.replace(template, instance=number).label: number for number in range(count)}
        """Processes that generate or will, by label; those that drain are not among them."""
        self._leaving: set[str] = set()
        self._flow: ChangingFlow | None = None
        self._step = 0

    def __call__(self, label: str, event: Event) -> None:
        """Hear an event of process `label`: the `observe` of the flow."""
        self._observe(label, event)
        with self._lock:
            if isinstance(event, TimeSpan):
                if label in self._wanted and event.name in (WAIT, WORK):
                    self._meter.span(label, event)
            elif isinstance(event, Figures):
                self._hear(label, event)

    @property
    def generators(self) -> int:
        """Processes that generate or are being started."""
        return len(self._wanted)

    @contextmanager
    def running(self, flow: ChangingFlow, table: tq.Table, task: str) -> Iterator[None]:
        """Change `flow` during the block. table, task: whose ready and held rows are looked at."""
        self._flow, over = flow, threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                try:
                    counts = table.stats().tasks[task]
                except PeerError:
                    continue  # the server is restarting, or the run is over
                self.look(counts.ready + counts.held)

        thread = threading.Thread(target=look, name="scaler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            with self._lock:
                self._flow = None
            thread.join()

    def look(self, rows: int) -> None:
        """Look at the number of rows that are ready for generation or being generated."""
        with self._lock:
            change = self._controller.look(self._clock(), rows=rows, generators=len(self._wanted))
            if change is not None and not self._leaving:
                self._change(change, {})

    def _hear(self, label: str, event: Figures) -> None:
        if event.kind == REMOVED and (label in self._wanted or label in self._leaving):
            self._leaving.discard(label)
            if self._wanted.pop(label, None) is not None:  # its host took it
                self._meter.left(label, event.at)
        measured = self._meter.step(event)
        if measured is not None and len(self._meter.generators) == len(self._wanted) and not self._leaving:
            self._decide(measured)

    def _decide(self, measured: MeasuredStep) -> None:
        self._step, times = measured
        figures = {
            "seconds": times.seconds,
            "generation_s": times.generation_s,
            "training_s": times.training_s,
            "delta_s": times.delta_s,
        }
        self._report({"by": 0, "why": "", "generators": len(self._wanted), **figures})
        change = self._controller.step(times)
        if change is not None:
            self._change(change, figures | {"bound_s": change.bound_s})

    def _change(self, change: Change, figures: dict[str, float]) -> None:
        if self._flow is None:
            return
        generators = len(self._wanted)
        try:
            if change.by > 0:
                self._add(self._flow)
            else:
                self._remove(self._flow)
        except UsageError:
            return  # the flow has ended
        self._report({"by": change.by, "why": change.why, "generators": generators, **figures})

    def _add(self, flow: ChangingFlow) -> None:
        taken = {*self._wanted.values(), *(int(label.rpartition("-")[2]) for label in self._leaving)}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        job = msgspec.structs.replace(self._template, instance=number)
        flow.add(job)
        self._wanted[job.label] = number

    def _remove(self, flow: ChangingFlow) -> None:
        label = max(self._wanted, key=lambda each: self._wanted[each])
        flow.remove(label, deadline_s=self._deadline_s)
        del self._wanted[label]
        self._leaving.add(label)
        self._meter.left(label, self._clock())

    def _report(self, values: dict[str, Any]) -> None:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
        figures = {"step": self._step, **rounded, "patience": self._controller.patience}
        self._observe(LABEL, Figures(kind=ELASTIC, at=self._clock(), values=figures))
