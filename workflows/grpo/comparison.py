"""Compares the three modes of the job at equal steps and seeds: runs them, and writes a table, a record and a picture.

The modes alternate, seed by seed, so that a machine that becomes slower affects all of them. The results
are of one machine at one time: compare ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from transferqueue.errors import UsageError
from transferqueue.observe.measurement_record import MeasuredResult, summarize
from transferqueue.workflows.grpo.job import JobSettings, Mode
from transferqueue.workflows.grpo.learning.settings import LearningSettings
from transferqueue.workflows.grpo.report import Summary
from transferqueue.workflows.grpo.run import run_demo

MODES: Final[tuple[Mode, ...]] = ("sync", "delayed", "async")
COLORS: Final[Mapping[str, str]] = {"sync": "#a0aec0", "delayed": "#c05621", "async": "#2b6cb0"}
METRICS: Final[Mapping[str, str]] = {
    "seconds": "s",
    "samples_per_s": "1/s",
    "heldout_reward_before": "ratio",
    "heldout_reward_after": "ratio",
    "accuracy_before": "ratio",
    "accuracy_after": "ratio",
    "trainer_busy": "ratio",
    "rollout_busy": "ratio",
    "publish_lag_s": "s",
    "publish_s": "s",
    "swap_s_max": "s",
    "gap_s_max": "s",
    "request_s": "s",
    "rows_put": "count",
    "rows_done": "count",
    "rows_dropped": "count",
}
"""Fields of a run's summary that go into the record, with their units."""
_DOTS_PER_INCH: Final = 130


@dataclass(frozen=True, kw_only=True)
class ComparisonRun:
    """One finished run of the comparison."""

    mode: Mode
    seed: int
    summary: Summary


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """One mode, as means over all seeds. speed: its samples/s over those of sync with the same seed.

    reward_gain: held-out reward after minus before. reward_after_spread: standard deviation over seeds (0 for one seed).
    trainer_idle: share of the training time without a batch. swap_s_max, gap_s_max: the longest of all runs, as `weight_swaps` defines
    them. request_s: the mean of their median requests.
    """

    mode: Mode
    samples_per_s: float
    speed: float
    trainer_idle: float
    reward_before: float
    reward_after: float
    reward_after_spread: float
    reward_gain: float
    staleness: dict[str, float]
    publish_s: float
    swap_s_max: float
    gap_s_max: float
    request_s: float


def settings_of(mode: Mode, learning: LearningSettings, *, rollouts: int = 1) -> JobSettings:
    """Return the job in `mode`: staleness and depth are 0 when synchronous, else 1."""
    ahead = int(mode != "sync")
    return JobSettings(learning=learning, mode=mode, max_staleness=ahead, depth=ahead, rollouts=rollouts)


def run_all(
    learning: LearningSettings,
    seeds: Sequence[int],
    *,
    directory: Path,
    rollouts: int = 1,
    told: Callable[[ComparisonRun], None] = lambda run: None,
) -> list[ComparisonRun]:
    """Run each mode with each seed, one run at a time; files go to folders of `directory`. Calls `told` after each run.

    Raises `UsageError` for no seeds or a repeated one, before anything runs; otherwise as `run_demo`.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds {list(seeds)}: a comparison needs at least one, each named once")
    runs: list[ComparisonRun] = []
    for seed in seeds:
        for mode in MODES:
            settings = settings_of(mode, replace(learning, seed=seed), rollouts=rollouts)
            outcome = run_demo(settings, directory=directory / f"{mode}-seed{seed}")
            runs.append(ComparisonRun(mode=mode, seed=seed, summary=outcome.summary))
            told(runs[-1])
    return runs


def compare(runs: Sequence[ComparisonRun]) -> list[ModeFigures]:
    """Return one entry a mode, in the order of `MODES`. `runs` must hold a sync run for each seed."""
    base = {run.seed: run.summary.samples_per_s for run in runs if run.mode == "sync"}
    return [_figures(mode, [run for run in runs if run.mode == mode], base) for mode in MODES]


def _figures(mode: Mode, runs: Sequence[ComparisonRun], base: Mapping[int, float]) -> ModeFigures:
    summaries = [run.summary for run in runs]
    after = [summary.heldout_reward_after for summary in summaries]

    def mean(of: Callable[[Summary], float]) -> float:
        return round(fmean(map(of, summaries)), 4)

    return ModeFigures(
        mode=mode,
        samples_per_s=mean(lambda summary: summary.samples_per_s),
        speed=round(fmean(run.summary.samples_per_s / base[run.seed] for run in runs), 3),
        trainer_idle=mean(lambda summary: 1 - summary.trainer_busy),
        reward_before=mean(lambda summary: summary.heldout_reward_before),
        reward_after=mean(lambda summary: summary.heldout_reward_after),
        reward_after_spread=round(stdev(after), 4) if len(after) > 1 else 0.0,
        reward_gain=mean(lambda summary: summary.heldout_reward_after - summary.heldout_reward_before),
        staleness=_staleness(summaries),
        publish_s=mean(lambda summary: summary.publish_s),
        swap_s_max=max(summary.swap_s_max for summary in summaries),
        gap_s_max=max(summary.gap_s_max for summary in summaries),
        request_s=mean(lambda summary: summary.request_s),
    )


def _staleness(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the share of rows by versions behind."""
    rows = sum(sum(summary.staleness_histogram.values()) for summary in summaries)
    versions = sorted({version for summary in summaries for version in summary.staleness_histogram}, key=int)
    return {
        v: round(sum(summary.staleness_histogram.get(v, 0) for summary in summaries) / max(1, rows), 4)
        for v in versions
    }


def results(runs: Sequence[ComparisonRun]) -> list[MeasuredResult]:
    """Return medians over seeds by mode. The values of single runs are in their own files."""
    base = {run.seed: run.summary.samples_per_s for run in runs if run.mode == "sync"}
    measured = []
    for mode in MODES:
        runs_of_mode = [run for run in runs if run.mode == mode]
        measured += [
            summarize(f"{mode}/{metric}", unit, [getattr(run.summary, metric) for run in runs_of_mode])
            for metric, unit in METRICS.items()
        ]
        speeds = [run.summary.samples_per_s / base[run.seed] for run in runs_of_mode]
        measured.append(summarize(f"{mode}/speed_over_sync", "ratio", speeds))
    return measured


def details(runs: Sequence[ComparisonRun], learning: LearningSettings, *, rollouts: int) -> dict[str, Any]:
    """Return means over seeds by mode, and the settings of the job."""
    return {
        "rollouts": rollouts,
        "means": [asdict(figures) for figures in compare(runs)],
        "learning": asdict(learning),
    }


def draw(path: Path, figures: Sequence[ModeFigures], runs: Sequence[ComparisonRun]) -> None:
    """Draw speed, trainer idle share and held-out reward by mode, each seed a dot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(picture)
    panels: list[tuple[str, Callable[[Summary], float], list[float]]] = [
        ("samples/s", lambda one: one.samples_per_s, [one.samples_per_s for one in figures]),
        ("trainer idle share", lambda one: 1 - one.trainer_busy, [one.trainer_idle for one in figures]),
        ("held-out reward after", lambda one: one.heldout_reward_after, [one.reward_after for one in figures]),
    ]
    names = [one.mode for one in figures]
    for axes, (title, of, means) in zip(picture.subplots(1, len(panels)), panels, strict=True):
        axes.bar(names, means, color=[COLORS[name] for name in names], width=0.6)
        axes.plot([run.mode for run in runs], [of(run.summary) for run in runs], "k.", markersize=5)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=_DOTS_PER_INCH)
