"""The public tests in the wheel of TransferQueue 0.1.11, run against the drop-in.

They are found where the wheel put them, copied to a temporary folder (so that their own package is not imported
instead), and run by a pytest of their own, in which ``transfer_queue`` is ours, in Ray's workers too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transferqueue.adapters.transfer_queue_hook import FOLDER

DISTRIBUTION = "TransferQueue"
ROOT = Path(__file__).resolve().parents[2]

_LAYOUT = (
    "tests its own files (controller_state.pkl, simple_storage/storage_unit_info.json); here they are JSON and Arrow"
)
_PRIVATE = (
    "sets a private variable of its interface; tests/adapters/test_transfer_queue_checkpoint.py tests the behaviour"
)
INTERNALS = {
    "test_put_data_length_mismatch_raises": "tests a class of its storage units",
    "test_tensor_fields": _LAYOUT,
    "test_storage_saved_is_true": _LAYOUT,
    "test_load_raises_on_storage_unit_count_mismatch": _LAYOUT,
    "test_save_raises_if_not_initialized": _PRIVATE,
    "test_load_raises_if_not_initialized": _PRIVATE,
}
"""Tests of the wheel that test what is no documented behaviour, and what."""


def folder() -> Path:
    """Where the wheel put its tests; skips where the original is not installed."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("make test-shim installs it")
    for file in files:
        if file.name == "test_metadata.py":
            return Path(str(file.locate())).parent
    pytest.fail(f"{DISTRIBUTION} is installed, but its tests are not")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("test_metadata.py", 45),
        ("test_samplers.py", 60),
        ("test_streaming_dataset.py", 3),
        ("e2e/test_kv_interface_e2e.py", 56),
        ("e2e/test_e2e_lifecycle_consistency.py", 7),
        ("e2e/test_checkpoint_e2e.py", 9),
    ],
)
def test_the_tests_of_the_original_pass(file: str, least: int, tmp_path: Path) -> None:
    """least: how many must have passed, so that none is lost by a skip."""
    shutil.copy(folder() / file, tmp_path)
    chosen = [argument for name in INTERNALS for argument in ("--deselect", f"{Path(file).name}::{name}")]
    unwanted = " and ".join(f"not {name}" for name in INTERNALS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", unwanted, *chosen, Path(file).name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": FOLDER, "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert passed is not None
    assert int(passed[1]) >= least, run.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_says_what_the_original_does_to_each_kind_of_value() -> None:
    folder()
    run = subprocess.run(
        [sys.executable, "-m", "tests.engines.original_values"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    page = (ROOT / "docs" / "how-to" / "drop-in.md").read_text().split("## Values")[1].split("## ")[0]
    kept = re.search(r"Kept by both: (.*?)\.\n\n", page, re.DOTALL)
    assert kept is not None
    changed = dict(re.findall(r"^\| ([^|]+) \| (?:another )?(\S+) \| \1 \|$", page, re.MULTILINE))
    assert {kind: found for kind, found in outcomes.items() if found != "same"} == changed
    assert [kind for kind, found in outcomes.items() if found == "same"] == " ".join(kept[1].split()).split(", ")


def test_one_module_under_two_names() -> None:
    """Whoever imports which first, classes are the same."""
    folder()
    program = (
        "import transfer_queue, transfer_queue.metadata as theirs\n"
        "from transferqueue.adapters.transfer_queue import metadata as ours, BatchMeta\n"
        "from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler\n"
        "assert theirs is ours and transfer_queue.BatchMeta is BatchMeta\n"
        "assert transfer_queue.GRPOGroupNSampler is GRPOGroupNSampler\n"
        "print(transfer_queue.__version__)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": FOLDER},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stdout.strip() == "0.1.11", run.stderr


def test_activate_puts_the_drop_in_in_the_module_s_place() -> None:
    folder()
    program = (
        "import transfer_queue as before\n"
        "from transferqueue.adapters.transfer_queue_hook import activate\n"
        "activate()\n"
        "import os, subprocess, sys, transfer_queue as after\n"
        "assert before is not after and after.__name__.startswith('transferqueue.')\n"
        "child = 'import transfer_queue; print(transfer_queue.__name__)'\n"
        "print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True).stdout.strip())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout.strip() == "transferqueue.adapters.transfer_queue", run.stderr
