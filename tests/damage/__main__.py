"""``python -m tests.damage state|snapshots --count N --seed S``: damages of files that the queue reads again.

Each damage must end in exactly what was answered before it, or in an error or a loss that names what is damaged. The
command prints what it found, and ends with 1 if a damage was silent, crashed the reader or raised an error of another
type.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

KINDS = {"state": "tests.damage.state", "snapshots": "tests.damage.snapshots"}
"""Each module has `run(count, seed)`, which prints what it found and returns how many damages went wrong."""


def main() -> int:
    """Run one kind; 1 if a damage went wrong."""
    options = argparse.ArgumentParser(prog="python -m tests.damage", description=__doc__)
    options.add_argument("kind", choices=sorted(KINDS))
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    return int(import_module(KINDS[given.kind]).run(given.count, given.seed) > 0)


if __name__ == "__main__":
    sys.exit(main())
