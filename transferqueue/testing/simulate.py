"""``python -m transferqueue.testing.simulate``: run many seeds, or repeat one."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import IO

import msgspec

from transferqueue.errors import InternalError
from transferqueue.testing.simulator import Result, replay_command, simulate
from transferqueue.testing.simulator.run import KINDS


def sweep(first: int, seeds: int, jobs: int = 2, kind: str = "mixed") -> tuple[Counter[str], list[Result]]:
    """Run `seeds` seeds from `first` of this kind of world in `jobs` processes: faults by name, and the results that
    broke a promise.

    Each process takes every `jobs`-th seed and writes one line of JSON for each result.
    """
    faults: Counter[str] = Counter()
    broken = []
    with ExitStack() as running:
        processes = [running.enter_context(_process(first + at, seeds - at, jobs, kind)) for at in range(jobs)]
        for process, results in processes:
            if process.wait() != 0:
                raise InternalError(f"a process of the simulator ended with {process.returncode}")
            results.seek(0)
            for line in results:
                result = msgspec.json.decode(line, type=Result, dec_hook=lambda kind, value: kind(value))
                faults += result.faults
                if result.broken:
                    broken.append(result)
    return faults, sorted(broken, key=lambda run: run.seed)


@contextmanager
def _process(first: int, seeds: int, jobs: int, kind: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start a process that writes its results to a file. It would block on a full pipe, which is read only later."""
    command = [sys.executable, "-m", "transferqueue.testing.simulate", "--every", str(jobs), "--kind", kind]
    command += ["--first", str(first), "--seeds", str(seeds)]
    with TemporaryFile() as results, subprocess.Popen(command, stdout=results) as process:
        try:
            yield process, results
        finally:
            process.kill()


def _each(first: int, seeds: int, every: int, kind: str) -> int:
    """The work of a process of `sweep`."""
    for seed in range(first, first + seeds, every):
        sys.stdout.write(msgspec.json.encode(simulate(seed, kind)).decode() + "\n")
        sys.stdout.flush()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments`, run, print; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m transferqueue.testing.simulate", description=__doc__)
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
        return _each(chosen.first, chosen.seeds, chosen.every, chosen.kind)
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
