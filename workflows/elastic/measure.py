"""The times of a trainer's steps and of the generators in them, from the events of a flow. Pure.

A step ends with the trainer's report. A process reports its work a little later, so a step is measured when the next
one ends.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from transferqueue.workflows.elastic.controller import StepTimes
from transferqueue.workflows.flow.events import WORK, Figures, TimeSpan
from transferqueue.workflows.flow.reports.loggers import STEP

_SPANS_MAX: Final = 4096
"""Spans kept for each generator; further ones of a step count as waiting."""


class MeasuredStep(NamedTuple):
    """A step with its number in the run."""

    step: int
    times: StepTimes


class _Ended(NamedTuple):
    step: int
    at: float
    idle_s: float


class StepMeter:
    """Collects events; `step` returns the step before the latest reported one.

    A generator counts from its first span until its removal starts (`left`).
    """

    def __init__(self) -> None:
        self._spans: dict[str, deque[TimeSpan]] = {}
        self._since: dict[str, float] = {}
        self._changed_at = 0.0
        self._ended: deque[_Ended] = deque(maxlen=3)

    @property
    def generators(self) -> list[str]:
        """Labels of the generators that have reported and are not being removed."""
        return list(self._since)

    def span(self, label: str, span: TimeSpan) -> None:
        """A generator reported a span."""
        if label not in self._since:
            self._since[label] = self._changed_at = span.start
        self._spans.setdefault(label, deque(maxlen=_SPANS_MAX)).append(span)

    def left(self, label: str, at: float) -> None:
        """A generator takes no more rows, from `at` on."""
        self._since.pop(label, None)
        self._spans.pop(label, None)
        self._changed_at = at

    def step(self, figures: Figures) -> MeasuredStep | None:
        """The trainer reported a step. Returns the one before it, if the generators were the same from its beginning to
        its end.
        """
        if figures.kind != STEP:
            return None
        self._ended.append(_Ended(int(figures.values["step"]), figures.at, float(figures.values.get("idle_s", 0.0))))
        if len(self._ended) < 3 or not self._since:
            return None
        before, ended, _ = self._ended
        if self._changed_at > before.at or ended.at <= before.at:
            return None
        seconds = ended.at - before.at
        waits = [seconds - self._worked_s(label, before.at, ended.at) for label in self._since]
        return MeasuredStep(
            ended.step,
            StepTimes(
                seconds=seconds,
                trainer_wait_s=min(ended.idle_s, seconds),
                generator_wait_s=sum(waits) / len(waits),
                generators=len(waits),
            ),
        )

    def _worked_s(self, label: str, start: float, end: float) -> float:
        spans = (span for span in self._spans.get(label, ()) if span.name == WORK)
        worked = sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in spans)
        return min(worked, end - start)
