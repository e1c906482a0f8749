"""Some mutated snapshots on every run of the suite; ten thousand by ``make soak``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scale import sizes


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", sizes(50, 500))
def test_no_mutated_snapshot_is_silent_or_ends_the_process(count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.damage", "snapshots", "--count", str(count), "--seed", "77"],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{count:,} mutated snapshots in ")
