"""`transferqueue chaos`: inject faults into a real queue, and account for every row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferqueue.cli.exit_codes import BROKEN
from transferqueue.cli.options import file_to_write, folder_to_write
from transferqueue.cli.screens.terminal import say

EXAMPLES = (
    ("transferqueue chaos", "three minutes, about 450 faults"),
    ("transferqueue chaos --seconds 20 --seed 7", "a short run with other faults"),
    (
        "transferqueue chaos --tcp --durability disk",
        "with remote workers behind a bad network, and a server that syncs to disk",
    ),
    ("transferqueue chaos --spill", "with rows that spill to a disk"),
    ("transferqueue chaos --out run.json --keep DIR", "the record as JSON; event logs and output of all processes"),
)


def chaos(
    seconds: Annotated[float, typer.Option(min=1, help="Duration of the faults.")] = 180.0,
    seed: Annotated[int, typer.Option(min=0, help="Determines the faults, their targets and times.")] = 1,
    durability: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            show_default="process",
            help="Of the server, which faults kill too: process or disk.",
        ),
    ] = None,
    spill: Annotated[
        bool,
        typer.Option(
            "--spill",
            help=(
                "Use a server with little memory and a disk for cold blocks, which is full at times. Faults freeze it "
                "and do not kill it: these rows would end with it."
            ),
        ),
    ] = False,
    tcp: Annotated[
        bool,
        typer.Option(
            "--tcp", help="Also remote workers, with keys, behind a proxy that delays, stalls, cuts and garbles."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the record of the run here, as JSON.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Keep the event logs and the output of all processes here. Default: removed.",
        ),
    ] = None,
) -> None:
    """Inject faults into a real queue, and account for every row.

    Runs a server, producers, consumers and a trainer, and kills, freezes, restarts, disconnects and starves them. Uses
    a server and a directory of its own, and removes both, also on Ctrl-C. Linux only. Exits with code 1 at a violation:
    a row lost, done twice or with other bytes, a limit exceeded, or a wait that was stuck.
    """
    from transferqueue.observe.measurement_record import Measurement
    from transferqueue.testing.chaos.fault_plan import settings
    from transferqueue.testing.chaos.run import chaos as run_chaos

    if out is not None:
        file_to_write("--out", out)
    if keep is not None:
        folder_to_write("--keep", keep)
    run = settings(seconds, seed, durability, tcp, spill)
    began = Measurement()
    say(f"{run.command}")
    report = run_chaos(run, say, keep)
    for line in report.lines():
        say(line)
    if out is not None:
        began.record("chaos", report.results(), details=report.details()).save(out)
    if not report.kept:
        raise typer.Exit(BROKEN)
