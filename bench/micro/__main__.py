"""Scenario: single operations, timed by pytest-benchmark, kept like all others.

python -m bench.micro --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.harness import Result, save_results

SCENARIO = "micro"
HERE = Path(__file__).parent


def to_result(found: dict[str, Any]) -> Result:
    """One benchmark: the seconds of every round."""
    extra, numbers = found.get("extra_info", {}), found["stats"]["data"]
    return Result(SCENARIO, "transferqueue", found["name"], "time", "s", numbers[:200], int(extra.get("nbytes", 0)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-micro-") as folder:
        raw = Path(folder) / "micro.json"
        code = pytest.main([str(HERE), "-q", "-p", "no:cacheprovider", f"--benchmark-json={raw}", "--benchmark-quiet"])
        if code:
            return int(code)
        found = json.loads(raw.read_text())["benchmarks"]
    save_results(chosen.out, [to_result(benchmark) for benchmark in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
