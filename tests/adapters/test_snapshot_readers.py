"""The recipe that reads a snapshot with polars and duckdb runs as it is written. `make test-others` has both."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.markdown import ROOT, blocks

MISSING = [name for name in ("polars", "duckdb") if find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: make test-others")
def test_the_recipe_runs_and_both_agree(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs" / "how-to" / "data-frames.md")
    (at,) = [number for number, block in enumerate(page) if block.info == "py" and "polars.from_arrow" in block.code]
    code = page[at - 1].code + page[at].code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for mean in ("0.5", "1.0"):
        assert done.stdout.count(mean) >= 2, done.stdout
