"""`transferqueue streamrl`: the figures of StreamRL in simulation, beside the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from transferqueue.cli.screens.terminal import console, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transferqueue.workflows.sim.streamrl import FigureRow

EXAMPLES: Final = (("transferqueue streamrl", "dispatch, pipelining and elasticity: about a minute"),)


def streamrl(
    out: Annotated[Path, typer.Option(help="Folder of the record and its picture.")] = Path("bench/records"),
) -> None:
    """Simulate StreamRL's dispatch, pipelining and elasticity around the production ledger, with its published lengths.

    Prints published and simulated figures with what was assumed, and writes a record and a picture.
    """
    from transferqueue.observe.measurement_record import Measurement
    from transferqueue.workflows.sim import streamrl as simulating

    began = Measurement()
    lines = simulating.table()
    name = f"streamrl-{began.start:%Y%m%d-%H%M%S}"
    record = began.record("streamrl", simulating.results(lines), details=simulating.details(lines))
    record.save(out / f"{name}.json")
    simulating.draw(out / f"{name}.png", lines)
    _show(lines, simulating.ASSUMED)
    say(f"wrote {out / name}.json and .png")


def _show(lines: Sequence[FigureRow], assumed: Sequence[str]) -> None:
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("figure", "setting", "published", "ours"):
        shown.add_column(title, justify="right" if title == "ours" else "left")
    for line in lines:
        shown.add_row(line.figure, line.setting, line.published, f"{line.ours:.3f}")
    screen = console()
    screen.print(shown)
    for one in assumed:
        screen.print(f"assumed: {one}")
