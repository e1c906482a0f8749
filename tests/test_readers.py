"""docs/READERS.md names who needs each command, option, adapter, setting and page: nothing is missing there, and
nothing there is gone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import transferqueue as tq
from tests.markdown import PAGES, ROOT, links

typer = pytest.importorskip("typer")

PAGE = ROOT / "docs" / "READERS.md"
ROW = re.compile(r"^\| (.+?) \|", re.MULTILINE)
OPTION = re.compile(r"`(--[a-z-]+)`")
PLAIN = ("docs/decisions/", "docs/conformance/")


def section(title: str) -> list[str]:
    """The rows of the table under this heading, without its head."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def commands(command: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Each command with its options, groups that run by themselves included."""
    for at, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {at}".strip())
    if name and (not hasattr(command, "commands") or command.invoke_without_command):
        yield name, {next(text for text in option.opts if text.startswith("--")) for option in options(command)}


def options(command: Any) -> list[Any]:
    return [option for option in command.params if option.opts[0].startswith("-") and "--help" not in option.opts]


def test_every_command_and_option_has_a_reader() -> None:
    from transferqueue.cli import app

    group = typer.main.get_command(app.app)
    group.commands["demo"] = app._load_demo()
    listed = {row.split("`")[1]: set(OPTION.findall(row)) for row in section("Commands and options")}
    assert listed == dict(commands(group))


def test_every_adapter_has_a_reader() -> None:
    folder = ROOT / "adapters"
    entries = {path.name for path in folder.iterdir() if path.name not in {"__init__.py", "__pycache__"}}
    named = re.findall(r"`adapters/([\w.]+)/?`", "".join(section("Adapters")))
    assert sorted(named) == sorted(entries)


@pytest.mark.parametrize(
    ("name", "function"),
    [("connect", tq.connect), ("create_table", tq.Queue.create_table), ("deploy_ray", tq.deploy_ray)],
)
def test_every_setting_has_a_reader(name: str, function: Any) -> None:
    rows = [row.split("|")[1] for row in section("Settings") if row.startswith(f"| `{name}`")]
    listed = [word for row in rows for word in re.findall(r"`(\w+)`", row.partition(":")[2])]
    own = {"self", "name"} if name == "create_table" else set()
    assert sorted(listed) == sorted(set(inspect.signature(function).parameters) - own)


def test_every_page_has_a_reader() -> None:
    elsewhere = [ROOT / "bench" / "README.md", ROOT / "bench" / "estimate.md", *ROOT.glob("[!.]*/README.md")]
    pages = {str(page.relative_to(ROOT)) for page in (*PAGES, *elsewhere)} - {"docs/READERS.md"}
    linked = {str((PAGE.parent / link).resolve().relative_to(ROOT)) for link in links(PAGE)}
    assert {page for page in pages if not page.startswith(PLAIN)} == {link for link in linked if link.endswith(".md")}
