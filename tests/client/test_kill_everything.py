"""SIGKILL of everything at once, again and again: the next start cleans up, and nothing is left behind in the end.

All processes are forked from one that has loaded everything (`python -m tests.client.crowd`), so that a round takes a
moment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scale import sizes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", sizes(4, 100))
@pytest.mark.parametrize("level", ["memory", "process", "disk"])
def test_nothing_is_left_behind(level: str, rounds: int, tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    told = subprocess.run(
        [sys.executable, "-m", "tests.client.crowd", str(tmp_path), level, str(rounds)],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    report = json.loads(told.stdout.splitlines()[-1])
    assert report["rounds"] == rounds
    assert report["rows_put"] == report["rows_done"] + report["rows_live"] + report["rows_dropped"]
    if level == "memory":
        assert report["left"] == ["run"], "the directory of sockets, which is the user's"
        return
    assert report["rows_put"] >= report["rows_told"], "a put that was answered is a row for ever"
    kept = {
        "run",
        "state",
        "state/lock",
        "state/about.json",
        "state/arena",
        "state/journal.sqlite",
        "state/reserve",
    }
    assert {path for path in report["left"] if not path.startswith(("shm/", "state/arena-"))} <= kept
    assert len([path for path in report["left"] if "arena-" in path]) == 1, "one arena: that which the state names"
    assert report["left_without_state"] == []
