"""Whom the documentation is for: each page of the site begins with its reader and has one place in the navigation, and
the reference says who needs each command, option and adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import ROOT

NAVIGATION = ROOT / "docs" / "site" / "mkdocs.yml"
SECTIONS = ("Learn", "How-to", "Reference", "Understand", "Operate", "Contribute")
OPTION = re.compile(r"`(--[a-z-]+)`")
READER = re.compile(r"# [^\n]+\n\n\*For [^*]+\*")
WITHOUT_A_PLACE = ("docs/decisions/", "docs/conformance/")


def navigation() -> dict[str, list[str]]:
    """The pages of each section of the site, in order."""
    sections: dict[str, list[str]] = {}
    for line in NAVIGATION.read_text(encoding="utf-8").partition("\nnav:")[2].splitlines():
        if section := re.fullmatch(r"  - ([\w-]+):", line):
            sections[section[1]] = []
        elif page := re.search(r"([\w/.-]+\.md)$", line):
            sections.setdefault("", []).append(page[1]) if line.startswith("  - ") else next(
                reversed(sections.values())
            ).append(page[1])
    return sections


def test_the_site_is_ordered_by_purpose() -> None:
    assert tuple(name for name in navigation() if name) == SECTIONS


def test_every_page_has_one_place_in_its_section() -> None:
    placed = [page for pages in navigation().values() for page in pages]
    there = [str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")]
    assert sorted(page for page in there if not page.startswith(WITHOUT_A_PLACE)) == sorted(
        page for page in placed if page.startswith("docs/") and page != "docs/decisions/README.md"
    )
    for section, pages in navigation().items():
        own = [page for page in pages if page.startswith("docs/") and page != "docs/decisions/README.md"]
        assert {page.split("/")[1] for page in own} <= {section.lower()}, section


@pytest.mark.parametrize(
    "page", [page for pages in navigation().values() for page in pages if page.startswith("docs/")]
)
def test_every_page_names_its_reader(page: str) -> None:
    if not page.startswith(WITHOUT_A_PLACE):
        assert READER.match((ROOT / page).read_text(encoding="utf-8")), 'the line after the heading: "*For ….*"'


def rows(page: str, title: str) -> list[str]:
    """The rows of the first table under a heading of a page, without its head."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
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
    typer = pytest.importorskip("typer")
    from transferqueue.cli import app

    group = typer.main.get_command(app.app)
    group.commands["demo"] = app._load_demo()
    listed = {row.split("`")[1]: set(OPTION.findall(row)) for row in rows("docs/reference/command-line.md", "Commands")}
    assert listed == dict(commands(group))


def test_every_adapter_has_a_reader() -> None:
    entries = {path.name for path in (ROOT / "adapters").iterdir()} - {"__init__.py", "__pycache__"}
    page = (ROOT / "docs/reference/engines.md").read_text(encoding="utf-8").partition("\n## Folders\n")[2]
    named = re.findall(r"`adapters/([\w.]+)/?`", page.partition("\n## ")[0])
    assert sorted(named) == sorted(entries)


def test_the_readme_is_short_and_its_code_fits_a_phone() -> None:
    text = Path(ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(text.split()) <= 700
    assert [line for block in code for line in block.splitlines() if len(line) > 78] == []
