"""Records of measurements: one JSON file of at most 10 KB a measurement, written the same way by every command.

A record has the measurement (kind, commit, command), its time and machine (start, load, machine, versions), and its
results. A result is one line, ``[name, unit, n, median, p10, p90]``: `n` samples and their median, 10th and 90th
percentile, with three significant digits. Counts are exact. A record holds no raw samples: a command that has them
writes them to a file of its own.

Times on two machines do not compare; ratios within one record do.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

RECORD_BYTES_MAX: Final = 10_000
"""A record is read by people beside a page, and stays in the repository for good."""
SIGNIFICANT_DIGITS: Final = 3
CHECKOUT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = (
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
    "transformers",
    "trl",
    "xxhash",
)
"""Packages whose versions a record names."""


class MeasuredResult(NamedTuple):
    """One metric: the number of samples, their median, 10th and 90th percentile.

    unit: s, bytes, ratio, 1/s, or count.
    """

    name: str
    unit: str
    n: int
    median: float
    p10: float
    p90: float


class MeasurementRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of one measurement, and its circumstances.

    Attributes:
        commit: Commit of the code in use, with a note if files differed from it; "" if unknown.
        load: Average number of runnable processes over the last minute, at start and end.
        details: Settings, assumptions and notes on single results, by kind of measurement.
    """

    kind: str
    commit: str
    command: str
    start: str
    load: dict[str, float]
    machine: dict[str, str | int]
    versions: dict[str, str]
    results: list[MeasuredResult]
    details: dict[str, Any] = {}

    def save(self, path: Path) -> None:
        """Write the record, making its folder.

        Raises:
            ValueError: The record would be larger than `RECORD_BYTES_MAX`.
        """
        text = _format(self)
        if len(text.encode()) > RECORD_BYTES_MAX:
            raise ValueError(
                f"{path}: a record of {len(text.encode())} bytes; {RECORD_BYTES_MAX} are allowed. "
                "Split it, or write fewer results: raw samples belong in another file"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def load_record(path: Path) -> MeasurementRecord:
    """Read a record. ValueError for another file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasurementRecord)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is not a measurement record: {error}. Records of older versions, which kept raw samples, are not "
            "read"
        ) from error


class Measurement:
    """A measurement under way: its start, and the load then. Make it before the first sample."""

    def __init__(self) -> None:
        self.start = datetime.now(UTC)
        self._load = os.getloadavg()[0]

    def record(
        self,
        kind: str,
        results: Sequence[MeasuredResult],
        *,
        versions: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> MeasurementRecord:
        """The record, with the present load. versions: default those of this process."""
        return MeasurementRecord(
            kind=kind,
            commit=commit_in_use(),
            command=command_line(),
            start=self.start.isoformat(timespec="seconds"),
            load={"start": round(self._load, 2), "end": round(os.getloadavg()[0], 2)},
            machine=machine(),
            versions=dict(package_versions() if versions is None else versions),
            results=list(results),
            details=dict(details or {}),
        )


# ---------------------------------------------------------------- results


def summarize(name: str, unit: str, samples: Iterable[float]) -> MeasuredResult:
    """Count, median and 10th and 90th percentile of samples. Raises ValueError if there are none."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError(f"{name}: there are no samples to summarize")
    low, high = ordered[0], ordered[-1]
    if len(ordered) > 1:
        tenths = statistics.quantiles(ordered, n=10, method="inclusive")
        low, high = tenths[0], tenths[-1]
    return rounded(MeasuredResult(name, unit, len(ordered), statistics.median(ordered), low, high))


def single(name: str, unit: str, value: float) -> MeasuredResult:
    """The result of one sample, or of a value computed from several."""
    return summarize(name, unit, [value])


def rounded(result: MeasuredResult) -> MeasuredResult:
    """The result as records hold it: three significant digits, but counts exact."""
    if result.unit == "count":
        return result
    return result._replace(
        median=_significant(result.median), p10=_significant(result.p10), p90=_significant(result.p90)
    )


def _significant(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


# ---------------------------------------------------------------- circumstances


def commit_in_use() -> str:
    """The commit of the code in use, nine digits, with a note if files differ from it; "" outside a checkout."""
    if not (CHECKOUT / ".git").exists():
        return ""
    changed = _git("status", "--porcelain", "--", "transferqueue", "adapters", "workflows", "bench")
    return _git("rev-parse", "--short=9", "HEAD") + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def command_line() -> str:
    """The command of this process, without the folders of its program."""
    program, *words = sys.orig_argv
    if words and not words[0].startswith("-"):
        program, *words = words
    return " ".join([Path(program).name.replace("python3", "python"), *words])


def machine() -> dict[str, str | int]:
    """Processor, cores this process may use, memory, kernel and Python."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Versions of the relevant packages in this environment."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


# ---------------------------------------------------------------- the file


def _format(record: MeasurementRecord) -> str:
    """One line a member, and one line a result, so that a changed result is a changed line."""
    members = {name: getattr(record, name) for name in record.__struct_fields__ if name != "results"}
    lines = [f" {json.dumps(name)}: {_json(value)}" for name, value in members.items() if name != "details" or value]
    results = ",\n".join(f"  {_json([_number(value) for value in result])}" for result in record.results)
    lines.append(f' "results": [\n{results}\n ]' if results else ' "results": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(value: Any) -> Any:
    """Whole numbers without a fraction."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
