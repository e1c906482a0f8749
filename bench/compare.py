"""Compare two runs; fail if the second is worse than the first by more than a tolerance.

    python -m bench.compare OLD NEW [--tolerance 0.25] [--contender transferqueue]

What is compared is made independent of the machine first: required figures are ratios already; a time that moves bytes
is divided by the time of a memcpy of as many bytes in its own run, any other time by its run's ZeroMQ round trip.
OLD and NEW are folders of records that `bench.run` wrote, or single records. Records of the form before this one, one
file with all samples, are refused. Exit code 1: something got worse, or is no longer measured. 2: a file is not a
record.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.figures import figures
from bench.run_record import RunRecord, Summary, load_run
from bench.workloads import DENSE, KIB

TOLERANCE = 0.25
BULK_BYTES = 256 * KIB
"""From here on a time is a matter of bytes, below one of messages."""


@dataclass(frozen=True)
class Change:
    """One value in both records. factor: how many times worse it became (below 1: better)."""

    name: str
    old: float
    new: float | None
    factor: float

    def worse(self, tolerance: float) -> bool:
        return self.new is None or self.factor > 1 + tolerance

    def line(self) -> str:
        if self.new is None:
            return f"{self.name}: {self.old:.4g} -> not measured"
        better = "worse" if self.factor > 1 else "better"
        by = self.factor if self.factor > 1 else 1 / self.factor
        return f"{self.name}: {self.old:.4g} -> {self.new:.4g} ({by:.2f} times {better})"


def units(record: RunRecord) -> tuple[float | None, float | None]:
    """Seconds of a byte copied, and of a round trip, on the record's machine."""
    copy = record.median("limits", "memcpy", f"{DENSE // KIB}KiB", "copy")
    return copy / DENSE if copy else None, record.median("limits", "zmq", "64B", "round_trip")


def normal(record: RunRecord, result: Summary) -> float | None:
    """A result's median, independent of the machine; None if its record lacks the limit for that."""
    if result.unit != "s":
        return result.median
    byte, trip = units(record)
    if result.nbytes >= BULK_BYTES:
        return result.median / (byte * result.nbytes) if byte else None
    return result.median / trip if trip else None


def values(record: RunRecord, contender: str) -> Iterator[tuple[str, float, bool]]:
    """Name, value and whether more is better, of all that can be compared."""
    for figure in figures(record):
        if figure.value is not None:
            yield f"{figure.work} against {figure.against}", figure.value, figure.more
    for result in record.summaries:
        value = normal(record, result)
        if result.contender == contender and value is not None:
            yield " ".join(result.key), value, result.unit == "1/s"


def changes(old: RunRecord, new: RunRecord, contender: str) -> list[Change]:
    """Every value of the old record, beside that of the new one."""
    after = {name: value for name, value, _ in values(new, contender)}
    return [_change(name, value, after.get(name), more) for name, value, more in values(old, contender)]


def _change(name: str, old: float, new: float | None, more: bool) -> Change:
    if new is None:
        return Change(name, old, None, float("inf"))
    low, high = (new, old) if more else (old, new)
    return Change(name, old, new, high / low if low else (1.0 if high == low else float("inf")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare two runs of the benchmarks.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="0.25: a quarter worse is still accepted")
    parser.add_argument("--contender", default="transferqueue")
    chosen = parser.parse_args(arguments)
    try:
        found = changes(load_run(chosen.old), load_run(chosen.new), chosen.contender)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    worse = [change for change in found if change.worse(chosen.tolerance)]
    for change in sorted(worse, key=lambda change: -change.factor):
        print(f"worse  {change.line()}")
    middle = statistics.median(change.factor for change in found) if found else 1.0
    print(f"{len(found)} values, {len(worse)} worse by more than {chosen.tolerance:.0%}; median factor {middle:.2f}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
