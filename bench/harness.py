"""How time is taken: warm-up, repetitions, and the samples that a scenario hands to whoever writes its record.

A `Result` is one metric of one contender on one workload in one scenario, with every sample. `run_record.py` writes the
records, which hold medians and percentiles only. This module also runs in the environment of the peers, which lacks
pyarrow and xxhash: it imports nothing that needs them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bench.measurement_record import package_versions

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"

Unit = Literal["s", "bytes", "ratio", "1/s", "count"]


@dataclass(frozen=True)
class Result:
    """One metric. raw: every sample. nbytes: payload of one repetition, where that has a meaning.

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


# ---------------------------------------------------------------- files


def save_results(path: Path, results: list[Result]) -> None:
    """Write every sample of one scenario of one contender, for `run.py` to gather."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": package_versions(), "results": [asdict(result) for result in results]}))


def load_results(path: Path) -> tuple[dict[str, str], list[Result]]:
    found = json.loads(path.read_text())
    return found["versions"], [Result(**result) for result in found["results"]]


def add_peers(peers: Path = PEERS) -> None:
    """Have redis-py found in the environment of the peers. What both environments have is still taken from ours."""
    sys.path += map(str, peers.glob("lib/python3*/site-packages"))
