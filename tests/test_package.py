"""The wheel and the sdist hold the package once, and the wheel works without tests, benchmarks, torch and ray."""

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.markdown import ROOT, scripts
from transferqueue.wire.versions import VERSION

PACKAGE = ROOT / "transferqueue"
INFO = f"asyncflow_transferqueue-{VERSION}.dist-info"
CORE = {"cryptography", "msgspec", "numpy", "pyarrow", "pyzmq", "xxhash"}


@dataclass(frozen=True)
class Built:
    """The two artefacts, built from the tree, and the wheel built again from the unpacked sdist."""

    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


def _run(*command: object, cwd: Path) -> str:
    """Run as someone who never saw this checkout: nothing on PYTHONPATH, another working directory."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=out / sdist.name.removesuffix(".tar.gz"))
    (again,) = out.glob("*/dist/*.whl")
    return Built(wheel, sdist, again)


def _sources() -> set[str]:
    """Every file that is shipped, as it is imported: the linked folders under their names in the package."""
    files = {
        Path(folder, file).relative_to(PACKAGE)
        for folder, _, files in os.walk(PACKAGE, followlinks=True)
        for file in files
        if not folder.endswith("__pycache__")
    }
    return {f"transferqueue/{file}" for file in files}


def _files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def _documentation() -> set[str]:
    """The pages and examples that `transferqueue docs` shows, as a wheel holds them."""
    shown = [*ROOT.glob("*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("examples/**/*.*"), *ROOT.glob("deploy/**/*")]
    shown += [path for path in ROOT.glob("docs/**/*.*") if {"site", "conformance"}.isdisjoint(path.parts)]
    files = [path.relative_to(ROOT) for path in shown if path.is_file() and "__pycache__" not in path.parts]
    return {f"transferqueue/documentation/{file}" for file in files}


def test_wheel_holds_the_package_and_its_documentation_once_and_nothing_else(built: Built) -> None:
    files = _files(built.wheel)
    assert {name for name in files if "/documentation/" in name} == _documentation()
    files = [name for name in files if "/documentation/" not in name]
    assert [name for name, times in Counter(files).items() if times > 1] == []
    assert set(files) - _sources() == {
        f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert _sources() - set(files) == set()
    assert {
        "transferqueue/py.typed",
        "transferqueue/adapters/__init__.py",
        "transferqueue/workflows/__init__.py",
        "transferqueue/testing/checker/checker.py",
        "transferqueue/testing/conformance/generators.py",
    } <= set(files)


def test_every_module_that_is_shipped_imports_without_those_that_are_not() -> None:
    """No shipped module names a module that stays in the repository."""
    left_out = r"\bbench\.\w|(from|import) (bench|tests)\b"
    naming = [
        path for path in sorted(_sources()) if path.endswith(".py") and re.search(left_out, (ROOT / path).read_text())
    ]
    assert naming == []


def test_wheel_names_exactly_the_core_dependencies(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{INFO}/METADATA"))
        entry_points = archive.read(f"{INFO}/entry_points.txt").decode()
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.partition(">")[0].strip() for line in core} == CORE
    assert len(core) == len(CORE)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"torch", "ray", "vllm", "cli", "metrics", "demo", "all"}
    assert "transferqueue = transferqueue.cli:main" in entry_points


def test_an_editable_installation_reads_the_pages_of_the_checkout(tmp_path: Path) -> None:
    """A copy of the pages beside the link to the checkout would grow old there."""
    build = "from hatchling.build import build_editable; print(build_editable(__import__('sys').argv[1]))"
    name = _run(sys.executable, "-c", build, tmp_path, cwd=ROOT).split()[-1]
    assert [file for file in _files(tmp_path / name) if "documentation" in file] == []


def test_sdist_holds_the_package_once_and_builds_the_same_wheel(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    files = [member.name.partition("/")[2] for member in members]
    assert all(member.isreg() for member in members), "a link in an sdist would lead out of it"
    assert [name for name, times in Counter(files).items() if times > 1] == []
    others = {file for file in set(files) - _sources() if "/" not in file}
    assert others == {
        ".dockerignore",
        ".gitignore",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "PKG-INFO",
        "README.md",
        "SECURITY.md",
        "constraints.txt",
        "pyproject.toml",
    }
    folders = {file.partition("/")[0] for file in set(files) - _sources() - others}
    assert folders == {".github", "bench", "deploy", "docs", "examples", "tests"}, "what tests and documentation need"
    assert _sources() - set(files) == set()
    assert sorted(_files(built.wheel_of_sdist)) == sorted(_files(built.wheel))


@pytest.mark.long
@pytest.mark.slow
def test_wheel_runs_the_readme_in_an_empty_environment(built: Built, tmp_path: Path) -> None:
    """Installed with nothing but its core dependencies; the checkout is not in reach of it. `make dist` does so with
    each Python."""
    home = tmp_path / "venv"
    venv.create(home)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", built.wheel, cwd=tmp_path)
    _run(*pip, "check", cwd=tmp_path)

    probe = """
import importlib.util, sys
import transferqueue, transferqueue.adapters, transferqueue.workflows
assert transferqueue.__file__.startswith(sys.prefix), transferqueue.__file__
for name in ("adapters", "workflows", "tests", "bench", "torch", "ray", "typer"):
    assert importlib.util.find_spec(name) is None, name
from transferqueue.cli.doc_pages import folder, page
assert str(folder()).startswith(sys.prefix), folder()
assert page("figures").read_text().startswith("# Figures")
"""
    _run(python, "-I", "-W", "error", "-c", probe, cwd=tmp_path)
    example = tmp_path / "example.py"
    example.write_text(scripts(ROOT / "README.md")[0].code)
    _run(python, "-W", "default", example, cwd=tmp_path)
