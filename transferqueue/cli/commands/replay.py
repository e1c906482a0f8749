"""`transferqueue replay`: the published AsyncFlow trace through the real queue, in three modes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from transferqueue.cli.screens.terminal import console, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transferqueue.workflows.sim.replay import Replayed

EXAMPLES: Final = (("transferqueue replay", "serial, streaming, asynchronous: about eight minutes"),)
SPEED_DEFAULT: Final = 40.0
"""A micro-batch takes 100 to 120 ms and a train step 60: far above what a lease costs, also on a machine with other work."""


def replay(
    speed: Annotated[float, typer.Option(help="Published seconds per second.")] = SPEED_DEFAULT,
    out: Annotated[Path, typer.Option(help="Folder of the record and its picture.")] = Path("bench/records"),
) -> None:
    """Replay the AsyncFlow trace: simulated engines with published service times, a real server, leases and processes.

    Writes iteration times, ratios to serial, busy-time spread and the overhead of the queue, with what was assumed.
    """
    from transferqueue.observe.measurement_record import Measurement
    from transferqueue.workflows.sim import replay as replaying
    from transferqueue.workflows.sim import replay_record

    began = Measurement()
    runs = [replaying.replay(mode, speed=speed) for mode in replaying.MODES]
    name = f"replay-{began.start:%Y%m%d-%H%M%S}"
    record = began.record("replay", replay_record.results(runs), details=replay_record.details(runs))
    record.save(out / f"{name}.json")
    replay_record.draw(out / f"{name}.png", runs)
    _show(runs, replay_record.speedups(runs))
    say(f"wrote {out / name}.json and .png")


def _show(runs: Sequence[Replayed], speedups: dict[str, dict[str, float]]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("mode", "iteration", "serial / it", "published", "over ideal", "largest spread"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    for run in runs:
        ratio = speedups.get(run.mode, {"ours": 1.0, "published": 1.0})
        table.add_row(
            run.mode,
            f"{run.iteration_s:,.0f} s",
            f"{ratio['ours']:.2f}",
            f"{ratio['published']:.2f}",
            f"{run.overhead:.1%}",
            f"{max(run.spread.values()):.1%}",
        )
    console().print(table)
