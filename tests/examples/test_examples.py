"""The examples run as a reader would run them, do what they say, and use the public interface alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown import ROOT
from tests.scale import sizes

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX = 250
EXAMPLES_MAX = 8
RUN_ELSEWHERE = {
    "http_service": "tests/web/test_service.py",
    "ray_cluster": "tests/cluster/test_example.py",  # make test-ray
}


def run(name: str, *options: str, folder: Path) -> str:
    """What the example prints, in a process and a folder of its own; a warning fails it."""
    command = [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(folder.iterdir()), "an example leaves nothing behind"
    return done.stdout


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


# ---------------------------------------------------------------- what they do


@pytest.mark.slow
@pytest.mark.parametrize("steps", sizes(8, 40))
def test_grpo_trains_within_the_bound_on_staleness_and_learns_in_forty_steps(steps, tmp_path):
    pytest.importorskip("torch", exc_type=ImportError)
    *printed, learned, counts = run("grpo", "--steps", str(steps), folder=tmp_path).splitlines()
    before, after = numbers(learned.partition("reward")[2].replace("->", " "))
    assert steps < 40 or after > before + 0.1
    assert all(numbers(step)[-1] <= 1 for step in printed)
    assert f" done {128 * steps}," in counts
    assert counts.endswith("dropped {}")


@pytest.mark.slow
@pytest.mark.parametrize("updates", sizes(10, 30))
def test_reinforce_accounts_for_every_episode_and_learns_in_thirty_updates(updates, tmp_path):
    pytest.importorskip("torch", exc_type=ImportError)
    *_, learned, counts = run("reinforce", "--updates", str(updates), folder=tmp_path).splitlines()
    before, after = numbers(learned.replace("->", " "))
    assert updates < 30 or after > max(before + 1, 2)
    put, done, left = numbers(counts)
    assert put == done + left


@pytest.mark.slow
def test_documents_are_kept_or_dropped_as_duplicates(tmp_path):
    documents, rows = run("dedup_documents", "--documents", "500", folder=tmp_path).splitlines()
    put, written, dropped = numbers(documents)
    assert put == 500
    assert 0.15 * put < dropped < 0.35 * put, "a quarter of the corpus repeats an earlier text"
    assert rows == f"rows done {written:.0f}, live 0, balanced True"
    assert put == written + dropped


@pytest.mark.slow
def test_a_worker_dies_and_nothing_is_lost(tmp_path):
    codes, done_by, counts = run("workers", "--rows", "600", "--workers", "2", folder=tmp_path).splitlines()
    assert codes in {"exit codes [-9, 0]", "exit codes [0, -9]"}
    assert sum(numbers(done_by.replace("worker-", ""))[1::2]) == 600
    assert counts == "rows put 600, done 600, dropped 0, all right: True"


@pytest.mark.slow
def test_an_event_loop_finishes_every_row_though_requests_fail(tmp_path):
    requests, counts = run("async_worker", "--rows", "100", folder=tmp_path).splitlines()
    assert numbers(requests)[0] > 1, "several requests at a time"
    assert counts == "rows put 100, done 100, dropped 0, all right: True"


@pytest.mark.slow
def test_training_that_is_killed_ends_with_the_same_weights(tmp_path):
    told = run("checkpoint_resume", "--steps", "14", folder=tmp_path).splitlines()
    assert "broken: goes on after step 6; 128 rows that were trained since come again" in told
    assert told[-1] == "exit codes [0, -9, 0]; same weights: True"


# ---------------------------------------------------------------- how they are written


def test_there_are_few() -> None:
    assert len(EXAMPLES) <= EXAMPLES_MAX


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_says_how_to_run_it_and_is_tested_and_listed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_MAX
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/{path.name}" in docstring
    assert "Shows: " in docstring
    tests = ROOT / RUN_ELSEWHERE.get(path.stem, "tests/examples/test_examples.py")
    assert path.stem in tests.read_text(encoding="utf-8")
    assert path.name in (ROOT / "examples/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_the_public_interface_alone(path: Path) -> None:
    ours = [
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] in {"transferqueue", "adapters", "workflows", "tests", "bench"}
    ]
    assert all(name == "transferqueue" or name.startswith("transferqueue.adapters.") for name in ours)
