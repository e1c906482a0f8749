"""What `transferqueue new-adapter` writes runs as it is, and passes once it is filled in; adapters are found by
name."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from transferqueue.adapters import registry
from transferqueue.adapters.skeletons import KINDS, write
from transferqueue.cli import main
from transferqueue.errors import AlreadyExists, NotFound, UsageError


def pytested(folder: Path) -> str:
    """What the tests of an adapter say."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_skeleton_runs(kind: str, tmp_path: Path) -> None:
    if kind == "learner":
        pytest.importorskip("torch")
    files = write("mine", kind, tmp_path)
    assert [path.name for path in files] == ["pyproject.toml", "transferqueue_mine.py", "test_mine.py"]
    said = pytested(files[0].parent)
    assert "skipped" in said
    assert "failed" not in said


@pytest.mark.slow
def test_a_skeleton_that_is_filled_in_passes(tmp_path: Path) -> None:
    _, module, _ = write("size", "stage", tmp_path)
    text = module.read_text()
    filled = text.replace(
        'raise Unsupported("size does nothing yet")', 'return {"size": batch["response_ids"].lengths}'
    )
    assert filled != text
    module.write_text(filled)
    said = pytested(module.parent)
    assert "4 passed" in said
    assert "skipped" not in said


def test_a_skeleton_is_clean(tmp_path: Path) -> None:
    for kind in KINDS:
        files = write(f"my_{kind}", kind, tmp_path)
        checked = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                "check",
                "--isolated",
                "--select",
                "E,F,I,UP,B",
                "--line-length",
                "130",
                *map(str, files[1:]),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if "No module named ruff" in checked.stderr:
            pytest.skip("ruff is not installed here")
        assert checked.returncode == 0, checked.stdout


def test_what_cannot_be_a_skeleton_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for name in ("", "Mine", "1st", "a-b", "a/b", ".."):
        with pytest.raises(UsageError, match="adapter name"):
            write(name, "stage", tmp_path)
    with pytest.raises(UsageError, match="'oracle' is not one of generator, learner, stage"):
        write("mine", "oracle", tmp_path)
    assert list(tmp_path.iterdir()) == []
    _, module, _ = write("mine", "stage", tmp_path)
    module.write_text("mine")
    with pytest.raises(AlreadyExists, match="is there already"):
        write("mine", "stage", tmp_path)
    assert module.read_text() == "mine"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    assert main(["new-adapter", "mine", "--kind", "stage", "--directory", str(tmp_path)]) == 0
    assert "transferqueue_mine.py" in capsys.readouterr().out
    assert main(["new-adapter", "mine", "--directory", str(tmp_path)]) != 0
    assert "is there already" in capsys.readouterr().err


def test_adapters_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transferqueue.adapters.stages.callables import Rewards

    points = EntryPoints(
        EntryPoint(name, value, registry.ADAPTERS.group)
        for name, value in (
            ("theirs", "fractions:Fraction"),
            ("rewards", "fractions:Fraction"),
            ("broken", "no_such:Thing"),
        )
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.select(group=group))
    assert registry.load("rewards") is Rewards
    assert registry.load("theirs").__name__ == "Fraction"
    assert {"theirs", "vllm", "openai"} <= set(registry.names())
    with pytest.raises(NotFound, match='no adapter "absent" is registered; there are agents'):
        registry.load("absent")
    with pytest.raises(UsageError, match=r"'broken' .* cannot be imported: .*no_such"):
        registry.load("broken")
