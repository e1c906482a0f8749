"""The GRPO job synchronous, delayed and asynchronous, at equal steps and seeds: ``python -m bench.compare_modes``.

Prints and records samples per second, idle share of the trainer, held-out reward before and after, staleness, and how long a rollout
stood still for new weights. Close other work on the machine: it is shared by all processes of a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.run_record import RECORDS, stamped
from transferqueue.errors import UsageError
from transferqueue.observe.measurement_record import Measurement
from transferqueue.workflows.grpo import comparison
from transferqueue.workflows.grpo.comparison import ComparisonRun, ModeFigures
from transferqueue.workflows.grpo.learning.settings import settings_for

STEPS_DEFAULT: Final = 200
"""Gains 0.2 to 0.3 of held-out reward, far above its standard error of 0.02; a run takes about a minute."""


def parse_seeds(text: str) -> list[int]:
    """Seeds as numbers; `UsageError` when they are none."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f'seeds "{text}" are not whole numbers with commas between, such as 0,1,2')
    return [int(part) for part in parts]


def show_run(run: ComparisonRun) -> None:
    summary = run.summary
    print(
        f"{run.mode:8} seed {run.seed}: {summary.samples_per_s:7,.0f} samples/s, trainer idle {1 - summary.trainer_busy:4.0%}, "
        f"held-out {summary.heldout_reward_before:.3f} -> {summary.heldout_reward_after:.3f}, {summary.seconds:.0f} s"
    )


def show(figures: Sequence[ModeFigures]) -> None:
    """Print one line a mode."""
    print(
        f"{'mode':8} {'samples/s':>9} {'ratio':>5} {'idle':>4} {'held-out reward':>24} {'stale':>5} {'stop':>9} {'request':>9}"
    )
    for mode in figures:
        reward = f"{mode.reward_after:.3f} ± {mode.reward_after_spread:.3f} ({mode.reward_gain:+.3f})"
        stale = sum(int(version) * share for version, share in mode.staleness.items())
        print(
            f"{mode.mode:8} {mode.samples_per_s:>9,.0f} {mode.speed:>5.2f} {mode.trainer_idle:>4.0%} {reward:>24} {stale:>5.2f} "
            f"{1000 * mode.swap_s_max:>6.1f} ms {1000 * mode.request_s:>6.1f} ms"
        )


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
    measurement = Measurement()
    name = stamped("compare-modes", measurement)
    learning = replace(settings_for(), steps=chosen.steps)
    runs = comparison.run_all(learning, seeds, directory=chosen.runs / name, rollouts=chosen.rollouts, told=show_run)
    figures = comparison.compare(runs)
    details = comparison.details(runs, learning, rollouts=chosen.rollouts)
    measurement.record("compare-modes", comparison.results(runs), details=details).save(chosen.out / f"{name}.json")
    comparison.draw(chosen.out / f"{name}.png", figures, runs)
    show(figures)
    print(f"wrote {chosen.out / name}.json and .png")


if __name__ == "__main__":
    main()
