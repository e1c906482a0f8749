"""The learning curve of a run as a picture. Needs matplotlib, which the extra ``demo`` brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transferqueue.workflows.flow.reports.loggers import mean_staleness
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _GREEN, _ORANGE, _GREY = "#2b6cb0", "#2f855a", "#c05621", "#a0aec0"
_DOTS_PER_INCH: Final = 130
_SMOOTH_STEPS: Final = 10


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(path: Path, record: RunRecord, summary: RunSummary) -> None:
    """Draw over the trainer's steps: the reward (or loss) with the evaluations, the staleness, and the seconds of a
    step, waiting apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = sorted(record.steps)
    each = [record.steps[step] for step in steps]
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    learned, staleness, seconds = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    _draw_learned(learned, steps, each, record, summary)
    staleness.step(steps, [mean_staleness(step.get("staleness", {})) for step in each], where="mid", color=_ORANGE)
    staleness.set_ylabel("staleness\n(versions)")
    _draw_seconds(seconds, steps, each)
    seconds.set_xlabel("trainer step")
    for axes in (learned, staleness, seconds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.7)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw_learned(
    axes: Axes, steps: list[int], each: Sequence[Mapping[str, Any]], record: RunRecord, summary: RunSummary
) -> None:
    name = "reward" if any("reward" in step for step in each) else "loss"
    values = [float(step.get(name, float("nan"))) for step in each]
    axes.plot(steps, values, color=_GREY, linewidth=0.8, label=f"{name} of the step's rows")
    axes.plot(steps, _smooth(values), color=_BLUE, linewidth=2, label=f"mean of {_SMOOTH_STEPS} steps")
    points = [
        (int(found.get("step", 0)), found[summary.measure]) for found in record.evaluations if summary.measure in found
    ]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=_GREEN, linewidth=1, label=f"held-out {summary.measure}")
    axes.set_ylabel(name)
    axes.set_title(f"{summary.name}: {summary.kind}, {summary.mode}, {summary.steps} steps", loc="left")
    axes.legend(frameon=False)


def _draw_seconds(axes: Axes, steps: list[int], each: Sequence[Mapping[str, Any]]) -> None:
    ends = [float(step["at"]) for step in each]
    taken = [max(0.0, after - before) for before, after in pairwise(ends)]
    axes.plot(steps[1:], taken, color=_BLUE, linewidth=1, label="step")
    axes.plot(steps, [float(step.get("idle_s", 0.0)) for step in each], color=_ORANGE, linewidth=1, label="waiting")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=2)


def _smooth(values: list[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
