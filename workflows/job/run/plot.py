"""The learning curve of a run as a picture. Needs matplotlib, which the extra ``demo`` brings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transferqueue.workflows.job.run.figures import curves, described
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _GREEN, _GREY = "#2b6cb0", "#2f855a", "#a0aec0"
_COLUMNS: Final = 3
_DOTS_PER_INCH: Final = 130
_SMOOTH_STEPS: Final = 10


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(path: Path, record: RunRecord, summary: RunSummary) -> None:
    """Draw over the trainer's steps: the reward (or loss) with the evaluations, and each other figure that has a
    curve."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = sorted(record.steps)
    each = [record.steps[step] for step in steps]
    learned = "reward" if any("reward" in step for step in each) else "loss"
    names = [name for name in curves(each) if name != learned]
    rows = -(-len(names) // _COLUMNS)
    figure = Figure(figsize=(9, 4 + 1.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows + 1, _COLUMNS, height_ratios=(3, *([1] * rows)))
    top = figure.add_subplot(grid[0, :])
    _draw_learned(top, steps, each, learned, record, summary)
    places = [figure.add_subplot(grid[1 + at // _COLUMNS, at % _COLUMNS]) for at in range(len(names))]
    for axes, name in zip(places, names, strict=True):
        axes.plot(steps, _values(each, name), color=_BLUE, linewidth=1)
        unit = (found := described(name)) and found.unit
        axes.set_title(f"{name} ({unit})" if unit else name, loc="left", fontsize="small")
        axes.tick_params(labelsize="x-small")
    for axes in (top, *places):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.7)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw_learned(
    axes: Axes,
    steps: list[int],
    each: Sequence[Mapping[str, Any]],
    name: str,
    record: RunRecord,
    summary: RunSummary,
) -> None:
    values = _values(each, name)
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


def _values(each: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [math.nan if step.get(name) is None else float(step[name]) for step in each]


def _smooth(values: list[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
