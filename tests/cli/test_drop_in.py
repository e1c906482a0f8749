"""`transferqueue drop-in`: one file in a folder of packages, and what a new Python makes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from transferqueue.adapters.transfer_queue_hook import FOLDER
from transferqueue.cli.app import run
from transferqueue.cli.commands.drop_in import FILE


def found_by_a_new_python(site: Path) -> str:
    """Where ``transfer_queue`` would come from, in a Python that has this folder of packages beside its own."""
    program = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec('transfer_queue')\n"
        "print(found and found.origin, 'transferqueue' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_on_and_off_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "transfer_queue").mkdir()
    (tmp_path / "transfer_queue" / "__init__.py").write_text("")
    original = f"{tmp_path}/transfer_queue/__init__.py False"
    assert found_by_a_new_python(tmp_path) == original
    for switch, told in (("status", "off"), ("on", "on"), ("on", "on"), ("status", "on")):
        assert run(["drop-in", switch, "--site", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith(f"{told}: ")
    assert found_by_a_new_python(tmp_path) == f"{FOLDER}/transfer_queue/__init__.py False"
    for _ in range(2):
        assert run(["drop-in", "off", "--site", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith("off: ")
    assert found_by_a_new_python(tmp_path) == original


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drop-in", "on", "--site", str(tmp_path / "none")]) == 2
    assert f"{FILE} cannot be changed: No such file or directory" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()
