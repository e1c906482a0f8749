"""How time is taken and kept: warm-up, repetitions, median and spread, and the record of a run.

A `Result` is one metric of one contender on one workload in one scenario: every repetition is kept, not only their
median. A record is one JSON file: results, and what they were measured with (commit, machine, load, versions).
Times on two machines do not compare; the ratios within one record do (`compare.py`).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "bench" / "records"
RECORD_FORMAT = 1
PACKAGES = (
    "asyncflow-transferqueue",
    "mooncake-transfer-engine-non-cuda",
    "TransferQueue",
    "msgspec",
    "numpy",
    "pyarrow",
    "pyzmq",
    "ray",
    "redis",
    "tensordict",
    "torch",
    "xxhash",
)

Unit = Literal["s", "bytes", "ratio", "1/s", "count"]


@dataclass(frozen=True)
class Result:
    """One metric. raw: every repetition. nbytes: payload of one repetition, where that has a meaning.

    checked: the payload was compared byte for byte after every repetition (None: nothing is carried).
    skipped: why there is no number; raw is empty then.
    """

    scenario: str
    contender: str
    workload: str
    metric: str
    unit: Unit
    raw: list[float]
    nbytes: int = 0
    checked: bool | None = None
    note: str = ""
    skipped: str = ""
    median: float | None = field(init=False)
    spread: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median", statistics.median(self.raw) if self.raw else None)
        object.__setattr__(self, "spread", spread(self.raw))

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.scenario, self.contender, self.workload, self.metric)


def spread(raw: list[float]) -> float:
    """Interquartile range over the median: how far repetitions lie apart."""
    if len(raw) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(raw, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def percentile(raw: Iterable[float], share: float) -> float:
    """The smallest value that `share` of the samples do not exceed."""
    ordered = sorted(raw)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed(work: Callable[[], object], *, warm: int = 2, repetitions: int = 7, budget_s: float = 5.0) -> list[float]:
    """Seconds of each repetition of `work`, after `warm` unmeasured ones; fewer once the budget is spent."""
    for _ in range(warm):
        work()
    raw: list[float] = []
    until = time.perf_counter() + budget_s
    while len(raw) < repetitions and (len(raw) < 3 or time.perf_counter() < until):
        began = time.perf_counter()
        work()
        raw.append(time.perf_counter() - began)
    return raw


# ---------------------------------------------------------------- where and with what


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def commit() -> dict[str, Any]:
    """The commit measured, and whether the package differed from it."""
    dirty = git("status", "--porcelain", "--", "transferqueue", "bench")
    return {"id": git("rev-parse", "HEAD") or "unknown", "modified": bool(dirty)}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that matter, in this environment."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------- files


def save_results(path: Path, results: list[Result]) -> None:
    """What one scenario of one contender found, for `run.py` to gather."""
    found = {"versions": versions(), "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(found))


def to_result(found: dict[str, Any]) -> Result:
    return Result(**{name: value for name, value in found.items() if name not in ("median", "spread")})


def load_results(path: Path) -> tuple[dict[str, str], list[Result]]:
    found = json.loads(path.read_text())
    return found["versions"], [to_result(result) for result in found["results"]]


@dataclass(frozen=True)
class Record:
    """One run: what was measured, when, where, with what, how busy the machine was before and after."""

    results: list[Result]
    commit: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, dict[str, str]]
    started: str
    seconds: float
    load: dict[str, list[float]]
    quick: bool
    format: int = RECORD_FORMAT

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def find(self, scenario: str, contender: str, workload: str, metric: str) -> Result | None:
        """That result, if it was measured."""
        key = (scenario, contender, workload, metric)
        return next((result for result in self.results if result.key == key and result.raw), None)

    def median(self, scenario: str, contender: str, workload: str, metric: str) -> float | None:
        found = self.find(scenario, contender, workload, metric)
        return found.median if found else None


@dataclass
class ByHand:
    """One scenario run by hand: how long it took and what else the machine did, for `tell`."""

    contender: str
    began: float = field(default_factory=time.monotonic)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    load: list[float] = field(default_factory=lambda: list(os.getloadavg()))

    def tell(self, results: list[Result], out: Path | None, *, whole: bool) -> None:
        """Print the medians, and write them to `out` (None: nowhere): as a whole record, or for `run.py` to gather."""
        for one in results:
            print(f"{one.workload}  {one.metric:26} {one.median:.6g} {one.unit}")
        if out is None:
            return
        if not whole:
            save_results(out, results)
            return
        Record(
            results=results,
            commit=commit(),
            machine=machine(),
            versions={self.contender: versions()},
            started=self.started,
            seconds=time.monotonic() - self.began,
            load={"before": self.load, "after": list(os.getloadavg())},
            quick=False,
        ).save(out)


def load_record(path: Path) -> Record:
    """Read a record. Raises ValueError if the file is not one of this format."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("format") != RECORD_FORMAT:
        raise ValueError(f"{path} is not a benchmark record of format {RECORD_FORMAT}; make one with `make bench`")
    found["results"] = [to_result(result) for result in found["results"]]
    return Record(**found)
