"""``python -m tests.simulator``: run many seeds, or repeat one."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tests.simulator import replay_command, simulate
from tests.simulator.run import KINDS
from tests.simulator.sweep import simulate_each, sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments`, run, print; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--kind", choices=[*KINDS], default="mixed", help="what all worlds have (default: what each seed says)"
    )
    parser.add_argument("--every", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help="run this one again, and nothing else")
    chosen = parser.parse_args(arguments)
    logging.getLogger("transferqueue").setLevel(logging.CRITICAL if chosen.seed is None else logging.ERROR)
    if chosen.every:
        return simulate_each(chosen.first, chosen.seeds, chosen.every, chosen.kind)
    if chosen.seed is not None:
        result = simulate(chosen.seed, chosen.kind)
        faults, broken, seeds = result.faults, [result] if result.broken else [], 1
    else:
        faults, broken = sweep(chosen.first, chosen.seeds, chosen.jobs, chosen.kind)
        seeds = chosen.seeds
    out = sys.stdout.write
    for kind, count in sorted(faults.items()):
        out(f"{count:9,} {kind}\n")
    for run in broken:
        out(f"seed {run.seed}: {run.broken}\n  {replay_command(run.seed, chosen.kind)}\n")
    out(f"{seeds:,} seeds, {faults.total():,} faults, {len(broken)} promises broken\n")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
