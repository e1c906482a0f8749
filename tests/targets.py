"""`make test-all`: runs the test targets of the Makefile one after another, and prints one table of them.

    python -m tests.targets TARGET ...

Needs no package. A target that fails does not stop the others; what it printed is in `runs/test-all/TARGET.log`. Ends
with 1 if any target failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

LOGS: Final = Path("runs/test-all")


@dataclass(frozen=True)
class Outcome:
    """What came of one target. ran: its tests were reached, so that the counts say something."""

    target: str
    ran: bool
    good: bool
    passed: int
    failed: int
    skipped: int
    seconds: float

    def line(self) -> str:
        """Its line of the table."""
        counts = (self.passed, self.failed, self.skipped) if self.ran else ("-", "-", "-")
        verdict = "ok" if self.good else "FAILED" if self.ran else "FAILED before its tests"
        return f"{self.target:14} {counts[0]:>7} {counts[1]:>7} {counts[2]:>8} {self.seconds:>8.0f}  {verdict}"


def run(target: str) -> Outcome:
    """Make this target, its output to a file, and count its tests by the report that pytest writes."""
    LOGS.mkdir(parents=True, exist_ok=True)
    report, log = (LOGS / f"{target}.xml").resolve(), LOGS / f"{target}.log"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("wb") as out:
        command = ["make", target, f"ARGS=--junitxml={report}"]
        ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
    return judged(target, ended.returncode, report, time.monotonic() - started)


def judged(target: str, code: int, report: Path, seconds: float) -> Outcome:
    """What the exit code of make and the report of pytest say together."""
    if not report.exists():
        return Outcome(target, False, code == 0, 0, 0, 0, seconds)
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    all_skipped = tests == skipped > 0  # pytest ends with a code of its own where a module skips itself
    return Outcome(
        target, True, not failed and (code == 0 or all_skipped), tests - failed - skipped, failed, skipped, seconds
    )


def main(targets: list[str]) -> int:
    """Run all, then print the table."""
    outcomes = []
    for target in targets:
        print(f"make {target} > {LOGS / f'{target}.log'}", flush=True)
        outcomes.append(run(target))
    print(f"\n{'target':14} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for outcome in outcomes:
        print(outcome.line())
    return int(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
