"""Each optional part may be deleted: the rest of the package still serves a queue, by the same tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.markdown import ROOT

PARTS: Final = (
    "server/durability",
    "server/shards",
    "server/spill",
    "server/row_record",
    "cluster/on_ray",
    "weights",
    "storage/devices",
)
"""Folders of the package. See `transferqueue.server.parts` for those of a server."""
CORE: Final = (
    *("tests/ledger/test_flow.py", "tests/server/test_parking.py"),
    *("tests/client/test_loader.py", "tests/client/test_pipeline.py"),
)
"""Tests of the queue that use no part."""
NEED: Final = {"server/shards": "remote"}
"""By part, the word in the names of those core tests that use it after all."""
COPIED: Final = ("transferqueue", "adapters", "workflows", "tests", "docs", "examples", "pyproject.toml")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_the_queue_works_without_a_part(part: str, tmp_path: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    shutil.rmtree(tmp_path / "transferqueue" / part)
    others = ("-k", f"not {NEED[part]}") if part in NEED else ()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", *others, *CORE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
