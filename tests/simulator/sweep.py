"""Many seeds of the simulator, in several processes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import IO

import msgspec

from tests.simulator import Result, simulate
from transferqueue.errors import InternalError


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
    command = [sys.executable, "-m", "tests.simulator", "--every", str(jobs), "--kind", kind]
    command += ["--first", str(first), "--seeds", str(seeds)]
    with TemporaryFile() as results, subprocess.Popen(command, stdout=results) as process:
        try:
            yield process, results
        finally:
            process.kill()


def simulate_each(first: int, seeds: int, every: int, kind: str) -> int:
    """The work of a process of `sweep`: write each result to standard output."""
    for seed in range(first, first + seeds, every):
        sys.stdout.write(msgspec.json.encode(simulate(seed, kind)).decode() + "\n")
        sys.stdout.flush()
    return 0
