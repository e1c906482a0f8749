"""The demo's job synchronous, delayed and asynchronous, at equal steps and seeds: ``python -m bench.compare_modes``.

Prints and records samples per second, idle share of the trainer, held-out reward before and after, staleness, and how
long generation stood still for new weights. The modes alternate, seed by seed, so that a machine that becomes slower
affects all of them. The results are of one machine at one time: compare ratios, and close other work on it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

import msgspec

from bench.run_record import RECORDS, stamped
from transferqueue.errors import UsageError
from transferqueue.observe.measurement_record import MeasuredResult, Measurement, summarize
from transferqueue.workflows.job.demo import demo_job, make_inputs
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.run.summary import RunSummary
from transferqueue.workflows.job.settings.job import Mode

STEPS_DEFAULT: Final = 200
"""Gains about 0.3 of held-out reward, far above its standard error of 0.02; a run takes about a minute."""
MODES: Final[tuple[Mode, ...]] = ("sync", "delayed", "async")
COLORS: Final[Mapping[str, str]] = {"sync": "#a0aec0", "delayed": "#c05621", "async": "#2b6cb0"}
METRICS: Final[Mapping[str, tuple[str, Callable[[RunSummary], float]]]] = {
    "seconds": ("s", lambda run: run.seconds),
    "samples_per_s": ("1/s", lambda run: run.samples_per_s),
    "heldout_reward_before": ("ratio", lambda run: run.before or 0.0),
    "heldout_reward_after": ("ratio", lambda run: run.after or 0.0),
    "trainer_idle": ("ratio", lambda run: run.trainer_idle or 0.0),
    "rollout_busy": ("ratio", lambda run: run.busy.get("rollout", 0.0)),
    "publish_lag_s": ("s", lambda run: run.publish_lag_s),
    "publish_s": ("s", lambda run: run.publish_s or 0.0),
    "swap_s_max": ("s", lambda run: run.swaps.swap_s_max),
    "gap_s_max": ("s", lambda run: run.swaps.gap_s_max),
    "request_s": ("s", lambda run: run.swaps.request_s),
    "rows_put": ("count", lambda run: run.rows_put),
    "rows_done": ("count", lambda run: run.rows_done),
    "rows_dropped": ("count", lambda run: sum(run.rows_dropped.values())),
}
"""What of a run's summary goes into the record, with its unit."""


class ComparisonRun(NamedTuple):
    """One finished run."""

    mode: Mode
    seed: int
    summary: RunSummary


def parse_seeds(text: str) -> list[int]:
    """Seeds as numbers; `UsageError` when they are none, or one is named twice."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f'seeds "{text}" are not whole numbers with commas between, such as 0,1,2')
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f'seeds "{text}": a comparison needs each named once')
    return seeds


def run_all(seeds: Sequence[int], *, steps: int, rollouts: int, directory: Path) -> list[ComparisonRun]:
    """Run each mode with each seed, one run at a time; files go to folders of `directory`."""
    runs: list[ComparisonRun] = []
    for seed in seeds:
        inputs = directory / f"inputs-seed{seed}"
        make_inputs(inputs, task="chain_sum", seed=seed)
        for mode in MODES:
            job = demo_job(inputs, seed=seed, steps=steps, mode=mode, rollouts=rollouts)
            outcome = run_job(job, folder=RunFolder(directory / f"{mode}-seed{seed}"))
            runs.append(ComparisonRun(mode, seed, outcome.summary))
            show_run(runs[-1])
    return runs


def show_run(run: ComparisonRun) -> None:
    """Print one line a run."""
    of = run.summary
    print(
        f"{run.mode:8} seed {run.seed}: {of.samples_per_s:7,.0f} samples/s, trainer idle "
        f"{of.trainer_idle or 0.0:4.0%}, held-out {of.before or 0.0:.3f} -> {of.after or 0.0:.3f}, {of.seconds:.0f} s"
    )


def results(runs: Sequence[ComparisonRun]) -> list[MeasuredResult]:
    """Return medians over seeds by mode, and samples/s over those of sync with the same seed."""
    base = {run.seed: run.summary.samples_per_s for run in runs if run.mode == "sync"}
    measured = []
    for mode in MODES:
        of_mode = [run for run in runs if run.mode == mode]
        measured += [
            summarize(f"{mode}/{name}", unit, [of(run.summary) for run in of_mode])
            for name, (unit, of) in METRICS.items()
        ]
        speeds = [run.summary.samples_per_s / base[run.seed] for run in of_mode]
        measured.append(summarize(f"{mode}/speed_over_sync", "ratio", speeds))
    return measured


def means(runs: Sequence[ComparisonRun]) -> dict[str, dict[str, Any]]:
    """Return means over seeds by mode, with the share of rows by versions behind."""
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        of_mode = [run.summary for run in runs if run.mode == mode]
        after = [run.after or 0.0 for run in of_mode]
        behind = {version for run in of_mode for version in run.staleness}
        rows = max(1, sum(sum(run.staleness.values()) for run in of_mode))
        found[mode] = {name: round(fmean(of(run) for run in of_mode), 4) for name, (_, of) in METRICS.items()}
        found[mode]["heldout_reward_after_spread"] = round(stdev(after), 4) if len(after) > 1 else 0.0
        found[mode]["staleness"] = {
            v: round(sum(run.staleness.get(v, 0) for run in of_mode) / rows, 4) for v in sorted(behind, key=int)
        }
    return found


def show(figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one line a mode."""
    base = figures["sync"]["samples_per_s"]
    print(
        f"{'mode':8} {'samples/s':>9} {'ratio':>5} {'idle':>4} {'held-out reward':>24} {'stale':>5} {'stop':>9} "
        f"{'request':>9}"
    )
    for mode, of in figures.items():
        gain = of["heldout_reward_after"] - of["heldout_reward_before"]
        reward = f"{of['heldout_reward_after']:.3f} ± {of['heldout_reward_after_spread']:.3f} ({gain:+.3f})"
        stale = sum(int(version) * share for version, share in of["staleness"].items())
        print(
            f"{mode:8} {of['samples_per_s']:>9,.0f} {of['samples_per_s'] / base:>5.2f} {of['trainer_idle']:>4.0%} "
            f"{reward:>24} {stale:>5.2f} {1000 * of['swap_s_max']:>6.1f} ms {1000 * of['request_s']:>6.1f} ms"
        )


def draw(path: Path, figures: Mapping[str, Mapping[str, Any]], runs: Sequence[ComparisonRun]) -> None:
    """Draw speed, trainer idle share and held-out reward by mode, each seed a dot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(picture)
    panels = ("samples_per_s", "trainer_idle", "heldout_reward_after")
    for axes, name in zip(picture.subplots(1, len(panels)), panels, strict=True):
        axes.bar([*figures], [of[name] for of in figures.values()], color=[COLORS[mode] for mode in figures], width=0.6)
        axes.plot([run.mode for run in runs], [METRICS[name][1](run.summary) for run in runs], "k.", markersize=5)
        axes.set_title(name.replace("_", " "), loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=130)


def main() -> None:
    """Run the job in its three modes, about ten minutes on two quiet cores, and write a record and a picture."""
    options = argparse.ArgumentParser(prog="python -m bench.compare_modes", description=main.__doc__)
    options.add_argument("--seeds", default="0,1,2", help="seeds, with commas between")
    options.add_argument("--steps", type=int, default=STEPS_DEFAULT, help="trainer steps of each run")
    options.add_argument("--rollouts", type=int, default=1, help="generating processes")
    options.add_argument("--out", type=Path, default=RECORDS, help="folder of record and picture")
    options.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs' own files")
    chosen = options.parse_args()
    seeds = parse_seeds(chosen.seeds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measurement = Measurement()
    name = stamped("compare-modes", measurement)
    runs = run_all(seeds, steps=chosen.steps, rollouts=chosen.rollouts, directory=chosen.runs / name)
    figures = means(runs)
    job = msgspec.to_builtins(demo_job(Path("inputs"), steps=chosen.steps, rollouts=chosen.rollouts))
    details = {"rollouts": chosen.rollouts, "means": figures, "job": job}
    measurement.record("compare-modes", results(runs), details=details).save(chosen.out / f"{name}.json")
    draw(chosen.out / f"{name}.png", figures, runs)
    show(figures)
    print(f"wrote {chosen.out / name}.json and .png")


if __name__ == "__main__":
    main()
