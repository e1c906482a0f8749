"""The contract of a public name: its signature and docstring. Users may give the name in several forms."""

from __future__ import annotations

import pydoc
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import isclass, isdatadescriptor, isroutine
from typing import Any, Final

import transferqueue as tq
from transferqueue.cli.doc_pages import folder
from transferqueue.errors import NotFound
from transferqueue.workflows.job.settings.describe import describe, key_names, tables

_KINDS: Final = {"scorer": "testing.conformance.scorers.Scorer", "stage": "adapters.protocols.StageFunction"}
"""Contracts of adapters that have another name than their kind; generator, learner and producer are the names of
theirs."""
_MEMBERS: Final = re.compile(r"^::: transferqueue\.(\S+)\n    options:\n      members: \[(.*)\]$", re.MULTILINE)


def contract(name: str) -> str | None:
    """Signature and docstring of an exact public name: ``Task``, ``tq.Table.put``, ``Generator``; entry of a key of a
    job file: ``trainer.lr``. None if there is none of this name."""
    path = _names().get(_stripped(name)) or _of_class(_stripped(name), exact=True)
    if path is None:
        return describe(name) if "." in name else None
    return _rendered(path)


def contract_like(name: str) -> str | None:
    """As `contract`, for a name in other letters (``task``, ``batch.ack``), a kind of adapter, a method alone
    (``lease``), and for the last part of a key (``lr``) or a table of a job file."""
    return "\n\n".join(filter(None, (_public_like(name), describe(name)))) or None


def table_keys(name: str) -> str:
    """The keys of the table of a job file that has this name; "" if there is none."""
    return (describe(name) or "") if name in {table.name for table in tables()} else ""


def _public_like(name: str) -> str | None:
    name = _stripped(name)
    by_letters = {each.lower(): path for each, path in reversed(_names().items())}
    path = _KINDS.get(name.lower()) or by_letters.get(name.lower()) or _of_class(name, exact=False)
    if path is not None:
        return _rendered(path)
    first, _, method = name.rpartition(".")
    known = first.lower() in by_letters  # else it may be a variable: rollouts.lease
    same = [path for path in _methods() if path.rpartition(".")[2] == method and not known]
    others = f"\nThe same name: {', '.join(same[1:])}" if same[1:] else ""
    return _rendered(same[0]) + others if same else None


def names() -> list[str]:
    """Every name that has a contract: public names, methods of the classes of `transferqueue`, kinds of adapters, keys
    of a job file."""
    alone = dict.fromkeys(path.rpartition(".")[2] for path in _methods())
    return [*_names(), *_KINDS, *_methods(), *alone, *key_names()]


def _stripped(name: str) -> str:
    return name.removeprefix("transferqueue.").removeprefix("tq.").removesuffix("()")


@cache
def _names() -> dict[str, str]:
    """Where each name is, below `transferqueue`: those of the package, then those that pages of the reference show of
    other modules."""
    found = {name: name for name in sorted(tq.__all__)}
    for page in sorted((folder() / "docs/reference").glob("*.md")):
        for module, members in _MEMBERS.findall(page.read_text(encoding="utf-8")):
            for member in members.split(", "):
                found.setdefault(member, f"{module}.{member}")
                found[f"{module}.{member}"] = f"{module}.{member}"
    return found


@cache
def _methods() -> list[str]:
    """``Class.member`` of each class of `transferqueue` but errors; the classes for threads before their asyncio
    twins."""
    classes = [(name, value) for name in sorted(tq.__all__, key=_rank) if isclass(value := getattr(tq, name))]
    return [f"{name}.{member}" for name, value in classes for member in _members(value)]


def _rank(name: str) -> tuple[bool, bool, str]:
    return name.startswith("Async"), name != "Table", name


def _members(value: type) -> Iterator[str]:
    for member in () if issubclass(value, BaseException) else dir(value):
        known = getattr(value, member, None)
        if not member.startswith("_") and (isroutine(known) or isdatadescriptor(known)):
            yield member


def _of_class(name: str, *, exact: bool) -> str | None:
    """The path of ``Class.member``; not exact: of ``class.member`` too."""
    first, _, member = name.rpartition(".")
    owners = (
        path for known, path in _names().items() if known == first or (not exact and known.lower() == first.lower())
    )
    return next((f"{path}.{member}" for path in owners if hasattr(_value(path), member)), None)


def _value(path: str) -> Any:
    """The object at this path below `transferqueue`; modules on the way are imported."""
    found: Any = tq
    try:
        for part in path.split("."):
            found = getattr(found, part) if hasattr(found, part) else import_module(f"{found.__name__}.{part}")
    except ModuleNotFoundError as error:
        raise NotFound(
            f"transferqueue.{path} needs {error.name}, which is not installed here; `transferqueue docs reference` "
            "names its page"
        ) from error
    return found


def _rendered(path: str) -> str:
    return pydoc.plain(pydoc.render_doc(_value(path), f"transferqueue.{path}: %s"))
