"""``python -m tests.chaos``: inject faults into a real queue, and account for every row.

Runs a server, producers, consumers and a trainer, and kills, freezes, restarts, disconnects and starves them. Uses a
server and a directory of its own, and removes both, also on Ctrl-C. Linux only. The exit code is 1 at a violation: a
row lost, done twice or with other bytes, a limit exceeded, or a wait that was stuck.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.measurement_record import Measurement
from tests.chaos.fault_plan import settings
from tests.chaos.run import chaos
from transferqueue.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments`, run, print; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="duration of the faults")
    parser.add_argument("--seed", type=int, default=1, help="determines the faults, their targets and times")
    parser.add_argument("--durability", metavar="LEVEL", help="of the server, which faults kill: process or disk")
    parser.add_argument(
        "--spill",
        action="store_true",
        help="a server with little memory and a disk for cold blocks, which is full at times; faults freeze it and do "
        "not kill it: these rows would end with it",
    )
    parser.add_argument(
        "--tcp",
        action="store_true",
        help="also remote workers, with keys, behind a proxy that delays, stalls, cuts and garbles",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the record of the run here, as JSON")
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="keep the event logs and the output of all processes here"
    )
    chosen = parser.parse_args(arguments)
    try:
        run = settings(chosen.seconds, chosen.seed, chosen.durability, chosen.tcp, chosen.spill)
    except UsageError as error:
        parser.error(str(error))
    began = Measurement()
    _say(run.command)
    report = chaos(run, _say, chosen.keep)
    for line in report.lines():
        _say(line)
    if chosen.out is not None:
        began.record("chaos", report.results(), details=report.details()).save(chosen.out)
    return 0 if report.kept else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
