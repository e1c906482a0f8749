"""Compare Python and the installed libraries with the requirements of this distribution."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Final

import msgspec

from transferqueue.lazy import DISTRIBUTION, install_line
from transferqueue.observe.machine.result import Check, fail, ok, warn

PYTHON_MIN: Final = (3, 11)
SHOWN_EXTRAS: Final = ("cli", "torch", "demo", "web", "http", "ray")
_REQUIREMENT: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(?:>=\s*(?P<least>[0-9.]+))?")
_EXTRA: Final = re.compile(r"""extra\s*==\s*["'](?P<extra>[^"']+)["']""")


class Requirement(msgspec.Struct, frozen=True):
    """A declared dependency. `extra` is "" for the core."""

    name: str
    least: str
    extra: str


def version() -> str:
    """Version of this distribution; ``unknown`` if it was never installed."""
    return _installed(DISTRIBUTION) or "unknown"


def library_checks() -> list[Check]:
    """Python, then every core dependency, then one line for each extra."""
    declared = requirements()
    core = [_core(need) for need in declared if not need.extra]
    return [_python(), *core, *extra_checks(declared)]


def extra_checks(declared: list[Requirement]) -> list[Check]:
    """One check for each extra in `declared`. A library is named in the first extra that requires it."""
    named: set[str] = set()
    checks = []
    for extra in SHOWN_EXTRAS:
        needs = [need for need in declared if need.extra == extra]
        if needs:
            checks.append(_extra(extra, needs, named))
            named |= {need.name for need in needs}
    return checks


def requirements(lines: Iterable[str] | None = None) -> list[Requirement]:
    """The requirements of the installed distribution (or those in `lines`), without itself."""
    if lines is None:
        try:
            lines = metadata.requires(DISTRIBUTION) or ()
        except metadata.PackageNotFoundError:
            return []
    parsed = [_parse(line) for line in lines]
    return [need for need in parsed if need is not None and need.name.lower() != DISTRIBUTION]


def at_least(version: str, least: str) -> bool:
    """Whether `version` is `least` or later, by their numbers: ``2.10.0+cpu`` is after ``2.9``."""
    return _numbers(version) >= _numbers(least)


def _parse(line: str) -> Requirement | None:
    needed, _, marker = line.partition(";")
    match, extra = _REQUIREMENT.match(needed.strip()), _EXTRA.search(marker)
    return Requirement(match["name"], match["least"] or "", extra["extra"] if extra else "") if match else None


def _numbers(version_text: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9.]*", version_text)
    return tuple(int(part) for part in leading[0].split(".") if part) if leading else ()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    running = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MIN:
        return fail("python", running, "use Python " + ".".join(map(str, PYTHON_MIN)) + " or later")
    return ok("python", running)


def _core(need: Requirement) -> Check:
    version = _installed(need.name)
    remedy = install_line(upgrade=True)
    if version is None:
        return fail(need.name, f"not installed; {need.least or 'any version'} or later is needed", remedy)
    if not at_least(version, need.least):
        return fail(need.name, f"{version}; {need.least} or later is needed", remedy)
    return ok(need.name, version)


def _extra(extra: str, needs: list[Requirement], named: set[str]) -> Check:
    """A missing extra is fine; a library that is too old is not."""
    subject = f"extra [{extra}]"
    versions = {need.name: _installed(need.name) for need in needs}
    old = [
        f"{need.name} {versions[need.name]}" for need in needs if not at_least(versions[need.name] or "999", need.least)
    ]
    if old:
        return warn(subject, f"{', '.join(old)} too old", install_line(extra, upgrade=True))
    missing = [name for name, installed in versions.items() if installed is None]
    if missing:
        return ok(subject, f"not installed (without {', '.join(missing)})")
    fresh = [f"{name} {installed}" for name, installed in versions.items() if name not in named]
    return ok(subject, ", ".join(fresh) or "installed")
