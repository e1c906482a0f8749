"""Trains a tiny model with verl, once on the original TransferQueue and once on this queue, and prints what both did.

.venv-stacks/bin/python -m bench.stacks [--package both|ours|original] [--steps N] [--record]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.run_record import RECORDS, ByHand, stamped
from bench.stacks import report
from bench.stacks.verl_job import VerlJob, prepare, run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.stacks", description="verl's trainer on a CPU.")
    parser.add_argument("--package", choices=("both", "ours", "original"), default="both")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for model, logs and metrics (default: a temporary one)")
    parser.add_argument("--record", action="store_true", help="write a record to bench/records")
    return parser


def main() -> int:
    """Run and print; 0 if every run made its steps."""
    chosen = _parser().parse_args()
    by_hand = ByHand(report.SCENARIO)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="stacks-"))
    job = VerlJob(steps=chosen.steps)
    prepare(folder / "prepared", job.warm_up_steps)
    packages = ("original", "ours") if chosen.package == "both" else (chosen.package,)
    outcomes = []
    for package in packages:
        outcomes.append(run(job, package, folder / f"{by_hand.began.start:%H%M%S}-{package}", folder / "prepared"))
        print("\n".join(report.lines(outcomes[-1])), flush=True)
    if len(outcomes) == 2:
        print(f"greatest relative difference of what they learned: {report.difference(*outcomes):.2g}")
    if chosen.record:
        path = RECORDS / f"{stamped('stacks', by_hand.began)}.json"
        by_hand.tell(report.results(outcomes), path, whole=True)
    return 0 if all(len(outcome.steps) == job.steps and not outcome.exit_code for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
