"""`transferqueue compare-modes`: the GRPO job synchronous, delayed and asynchronous, at equal steps and seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from transferqueue.cli.screens.terminal import console, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transferqueue.workflows.grpo.comparison import ComparisonRun, ModeFigures

EXAMPLES = (
    ("transferqueue compare-modes", "three modes, three seeds: about ten minutes on two quiet cores"),
    ("transferqueue compare-modes --seeds 0 --steps 20", "a quick look"),
)
STEPS_DEFAULT: Final = 200
"""Gains 0.2 to 0.3 of held-out reward, far above its standard error of 0.02; a run takes about a minute."""


def compare_modes(
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    steps: Annotated[int, typer.Option(min=1, help="Trainer steps of each run.")] = STEPS_DEFAULT,
    rollouts: Annotated[int, typer.Option(min=1, help="Generating processes.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the record and its picture.")] = Path("bench/records"),
    runs: Annotated[Path, typer.Option(help="Folder of the runs' own files.")] = Path("runs"),
) -> None:
    """Run the GRPO job in its three modes and write what it was like in each.

    Samples per second, idle share of the trainer, held-out reward before and after, staleness, and how long a rollout
    stood still for new weights. Close other work on the machine: it is shared by all processes of a run.
    """
    from transferqueue.observe.measurement_record import Measurement
    from transferqueue.workflows.grpo import comparison
    from transferqueue.workflows.grpo.learning.settings import settings_for

    numbers = parse_seeds(seeds)
    began = Measurement()
    name = f"compare-modes-{began.start:%Y%m%d-%H%M%S}"
    learning = replace(settings_for(), steps=steps)
    finished = comparison.run_all(learning, numbers, directory=runs / name, rollouts=rollouts, told=_told)
    figures = comparison.compare(finished)
    details = comparison.details(finished, learning, rollouts=rollouts)
    began.record("compare-modes", comparison.results(finished), details=details).save(out / f"{name}.json")
    comparison.draw(out / f"{name}.png", figures, finished)
    _show(figures)
    say(f"wrote {out / name}.json and .png")


def parse_seeds(text: str) -> list[int]:
    """Seeds as numbers; `UsageError` when they are none."""
    from transferqueue.errors import UsageError

    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f'seeds "{text}" are not whole numbers with commas between, such as 0,1,2')
    return [int(part) for part in parts]


def _told(run: ComparisonRun) -> None:
    found = run.summary
    say(
        f"{run.mode:8} seed {run.seed}: {found.samples_per_s:7,.0f} samples/s, trainer idle {1 - found.trainer_busy:4.0%}, "
        f"held-out {found.heldout_reward_before:.3f} -> {found.heldout_reward_after:.3f}, {found.seconds:.0f} s"
    )


def _show(figures: Sequence[ModeFigures]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("mode", "samples/s", "ratio", "idle", "held-out reward", "stale", "stop", "request"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    for one in figures:
        table.add_row(
            one.mode,
            f"{one.samples_per_s:,.0f}",
            f"{one.speed:.2f}",
            f"{one.trainer_idle:.0%}",
            f"{one.reward_after:.3f} ± {one.reward_after_spread:.3f} ({one.reward_gain:+.3f})",
            f"{sum(int(version) * share for version, share in one.staleness.items()):.2f}",
            f"{1000 * one.swap_s_max:.1f} ms",
            f"{1000 * one.request_s:.1f} ms",
        )
    console().print(table)
