"""The figures of a run on the queue's page, while it runs: warnings, a curve for each figure, and what each means.

The supervisor publishes them on a channel of figures (`transferqueue.observe.figure_table`), at most once in
`PERIOD_S`, and spends at most one part in `SHARE` of its time on it: the curves of a long run take longer. A longer run
has fewer points than steps: each is the mean of neighbouring steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import transferqueue as tq
from transferqueue.observe.figure_table import (
    CHARS_MAX,
    CURVES_MAX,
    LINES_MAX,
    POINTS_MAX,
    Curve,
    FigureTable,
    figures_channel,
)
from transferqueue.workflows.dispatch.channels import publish
from transferqueue.workflows.job import names
from transferqueue.workflows.job.run.figures import curves, described
from transferqueue.workflows.job.run.record import RunRecord

CHANNEL: Final = figures_channel(names.TABLE, "run")
PERIOD_S: Final = 1.0
SHARE: Final = 20
_COLUMNS: Final = ("figure", "unit", "newest", "meaning", "made by")


class RunPage:
    """Shows the figures of a run on the page of `queue`."""

    def __init__(self, queue: tq.Queue, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._clock = queue, clock
        self._shown, self._due_at = (0, 0), clock()

    def show(self, record: RunRecord, *, at_once: bool = False) -> None:
        """Publish the figures if a step or a warning has come since, and it is time."""
        has = (len(record.new_steps), len(record.warnings.all))
        if has == self._shown or (self._clock() < self._due_at and not at_once):
            return
        began = self._clock()
        publish(self._queue, CHANNEL, run_figures(record))
        ended = self._clock()
        self._shown, self._due_at = has, ended + max(PERIOD_S, SHARE * (ended - began))


def run_figures(record: RunRecord) -> FigureTable:
    """Return the figures of a run as the page shows them."""
    steps = [record.steps[number] for number in sorted(record.steps)]
    drawn = curves(steps)[:CURVES_MAX]
    return FigureTable(
        title="Training",
        columns=_COLUMNS,
        lines=tuple(_line(name, steps[-1]) for name in drawn),
        curves=tuple(_curve(name, steps) for name in drawn),
        warnings=tuple(text[:CHARS_MAX] for text in record.warnings.recent[:LINES_MAX]),
    )


def _line(name: str, newest: Mapping[str, Any]) -> tuple[str, ...]:
    figure, value = described(name), newest.get(name)
    shown = f"{value:.4g}" if isinstance(value, int | float) else "–"
    return (name, figure.unit, shown, figure.meaning, figure.made) if figure else (name, "", shown, "", "")


def _curve(name: str, steps: Sequence[Mapping[str, Any]]) -> Curve:
    figure, size = described(name), -(-len(steps) // POINTS_MAX)
    parts = [steps[first : first + size] for first in range(0, len(steps), size)]
    return Curve(
        name=name,
        unit=figure.unit if figure else "",
        at=tuple(int(part[-1]["step"]) for part in parts),
        values=tuple(_mean([step.get(name) for step in part]) for part in parts),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{fmean(known):.6g}") if known else None
