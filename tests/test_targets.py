"""`make test-all`: what it makes of targets that pass, fail, skip everything, or end before their tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import targets
from tests.targets import judged, main

MAKEFILE = Path(__file__).resolve().parent.parent / "Makefile"
REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


@pytest.mark.parametrize(
    ("counts", "code", "line"),
    [
        ((7, 0, 0, 2), 0, "t 5 0 2 3 ok"),
        ((7, 1, 1, 2), 2, "t 3 2 2 3 FAILED"),
        ((2, 0, 0, 2), 2, "t 0 0 2 3 ok"),
        ((7, 0, 0, 2), 2, "t 5 0 2 3 FAILED"),
        (None, 2, "t - - - 3 FAILED before its tests"),
    ],
    ids=["passed", "failed", "a module that skips itself", "an error after the tests", "no report"],
)
def test_a_target_is_judged_by_its_report_and_its_exit_code(
    counts: tuple[int, ...] | None, code: int, line: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    if counts is not None:
        report.write_text(REPORT.format(*counts))
    assert judged("t", code, report, 3.0).line().split() == line.split()


def test_all_run_though_one_fails_and_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write = f"@{sys.executable} -c \"import sys; open(sys.argv[1].split('=')[1], 'w').write(sys.argv[2])\" $(ARGS)"
    (tmp_path / "Makefile").write_text(
        f"first:\n\t@echo no network; exit 1\nlast:\n\t{write} '{REPORT.format(3, 0, 0, 1)}'\n"
    )
    assert main(["first", "last"]) == 1
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [line[:4] for line in table] == [
        ["target", "passed", "failed", "skipped"],
        ["first", "-", "-", "-"],
        ["last", "2", "0", "1"],
    ]
    assert "no network" in (targets.LOGS / "first.log").read_text()
    assert main(["last"]) == 0


def test_test_all_runs_every_test_target_but_the_long_one() -> None:
    text = MAKEFILE.read_text()
    made = set(re.findall(r"^(test[a-z-]*):", text, re.MULTILINE))
    listed = re.search(r"^TARGETS \?= (.*)$", text, re.MULTILINE)
    assert listed
    assert made - {"test-all", "test-long"} == set(listed[1].split())


def test_each_environment_has_what_the_package_needs() -> None:
    """pip installs the requirements of the package with it, so a new one reaches the environments of all targets."""
    installs = [line for line in MAKEFILE.read_text().splitlines() if line.endswith("--editable .")]
    assert len(installs) >= 10
    assert not [line for line in installs if "--no-deps" in line]
