"""Builds wheel and sdist into dist/, checks their metadata, and tries both in a bare environment of every interpreter:
``python -m tests.dist``.

Interpreters are those that are on the path as python3.11 to python3.14, and those that ``--python`` names. Wheel and
sdist each get an environment of their own with the extra ``[cli]`` and nothing else, and no access to the checkout.
There the programs of the first pages and the recipes run, but those that need torch; and from the unpacked sdist its
tests of the promises. A second build, from the unpacked sdist and with other rights of its files, must be the same to
the last bit.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.markdown import ROOT, Block, scripts

PAGES = (
    "README.md",
    "docs/learn/tour.md",
    "docs/learn/embed.md",
    "docs/how-to/choose-rows.md",
    "docs/how-to/data-parallel.md",
    "docs/how-to/drop-rows.md",
    "docs/how-to/durability.md",
    "docs/how-to/http-rewards.md",
    "docs/how-to/pacing.md",
    "docs/how-to/resume.md",
    "docs/how-to/two-hosts.md",
    "docs/understand/concepts.md",
    "docs/operate/waiting.md",
    "docs/reference/connect.md",
    "docs/reference/table.md",
    "docs/reference/policies.md",
    "docs/reference/asyncio.md",
    "docs/reference/errors.md",
    "docs/reference/figures.md",
)
"""Pages whose programs need nothing but the core and the command line, or say that they need torch."""
TESTS = ("tests/promises",)
"""Tests that need nothing else but `PYTEST`."""
PYTEST = ("hypothesis", "pytest", "pytest-timeout")
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def run(*command: object, cwd: Path) -> str:
    """Run a command that sees no checkout, and return what it prints; exits with its output if it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRANSFERQUEUE"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"failed with {done.returncode}: {' '.join(map(str, command))[:300]}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """Wheel and sdist, in an emptied folder, built twice, both accepted by twine."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        again, source = Path(folder, "again"), unpacked(sdist, Path(folder))
        run("chmod", "-R", "go-rwx", source, cwd=source)
        run(sys.executable, "-m", "hatchling", "build", "-d", again, cwd=source)
        for artefact in (wheel, sdist):
            if artefact.read_bytes() != (again / artefact.name).read_bytes():
                raise SystemExit(f"{artefact.name} differs from the one that is built from the unpacked sdist")
            print(f"{hashlib.sha256(artefact.read_bytes()).hexdigest()}  {artefact.name}, built twice")
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=out).strip())
    return wheel, sdist


def interpreters(named: list[str]) -> dict[str, str]:
    """Each interpreter by its version: those that were named, then those on the path that start."""
    found: dict[str, str] = {}
    for candidate in [*named, *(f"python{version}" for version in VERSIONS), sys.executable]:
        tell = [candidate, "-c", "import platform; print(platform.python_version())"]
        try:
            answer = subprocess.run(tell, capture_output=True, text=True, check=False)
        except OSError:
            continue
        version = answer.stdout.strip()
        if not answer.returncode and version not in found and version.rpartition(".")[0] in VERSIONS:
            found[version] = candidate
    return found


def install(python: Path, *packages: object) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages, cwd=python.parent)


def try_out(python: str, artefact: Path, folder: Path) -> str:
    """Install the artefact, run every program of `PAGES` and the first commands, and of an sdist its tests; returns
    what ran."""
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    bare = folder / "venv/bin/python"
    install(bare, f"{artefact}[cli]")
    run(bare, "-m", "pip", "check", "--disable-pip-version-check", cwd=folder)
    for command in (["--version"], ["docs"], ["docs", "tour"], ["docs", "Table.put"]):
        run(folder / "venv/bin/transferqueue", *command, cwd=folder)
    programs = runnable()
    for program in programs:
        file = folder / "program.py"
        file.write_text("\n" * (program.line - 1) + program.code, encoding="utf-8")
        run(bare, "-W", "default", file, cwd=folder)
    told = f"{len(programs)} programs of {len(PAGES)} pages run"
    return f"{told}; its tests: {run_tests(bare, artefact, folder)}" if artefact.suffix == ".gz" else told


def runnable() -> list[Block]:
    """Programs of `PAGES`, but those that need torch."""
    return [script for page in PAGES for script in scripts(ROOT / page) if "import torch" not in script.code]


def run_tests(python: Path, sdist: Path, folder: Path) -> str:
    """Unpack the sdist and run its tests there; returns their last line."""
    install(python, *PYTEST)
    source = unpacked(sdist, folder)
    return run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, cwd=source).splitlines()[-1]


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist below a folder; returns its top folder."""
    shutil.unpack_archive(sdist, folder / "sdist", filter="data")
    (source,) = (folder / "sdist").iterdir()
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], help="another interpreter; repeatable")
    options = parser.parse_args()
    wheel, sdist = build(ROOT / "dist")
    for version, python in interpreters(options.python).items():
        for kind, artefact in (("wheel", wheel), ("sdist", sdist)):
            with tempfile.TemporaryDirectory() as folder:
                told = try_out(python, artefact, Path(folder))
            print(f"Python {version}, {kind}: {told}", flush=True)
    untried = set(VERSIONS) - {version.rpartition(".")[0] for version in interpreters(options.python)}
    print(f"not tried, no interpreter: {', '.join(sorted(untried)) or 'none'}")


if __name__ == "__main__":
    main()
