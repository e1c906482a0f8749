"""What the search of the site has: the pages for users, and not decisions and sources. `make docs` builds the site
and asks it twenty searches (`docs/site/searches.py`)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.markdown import ROOT
from tests.test_readers import navigation


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    _module("prepare").prepare(out)
    return out


def _is_searched(page: Path) -> bool:
    return not page.read_text(encoding="utf-8").startswith("---\nsearch:\n  exclude: true\n")


def test_twenty_searches_lead_to_pages_that_are_searched(prepared: Path) -> None:
    searches = _module("searches").SEARCHES
    placed = {page for pages in navigation().values() for page in pages}
    assert len(searches) == 20
    assert set(searches.values()) <= placed
    assert [page for page in searches.values() if not _is_searched(prepared / page)] == []


def test_decisions_and_sources_are_not_searched(prepared: Path) -> None:
    assert _is_searched(prepared / "docs/reference/table.md")
    decisions = sorted((prepared / "docs/decisions").glob("*.md"))
    sources = list(prepared.rglob("*.*.md"))
    assert len(decisions) > 10
    assert len(sources) > 10
    assert [page.name for page in (*decisions, *sources) if _is_searched(page)] == []


def test_blocks_of_code_open_with_their_language_alone(prepared: Path) -> None:
    """Markdown shows a block whose opening has a second word as text, and swallows the headings after it."""
    opened = [
        line
        for page in prepared.rglob("*.md")
        for line in re.findall(r"^```+\w.*$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(opened) > 100
    assert [line for line in opened if not re.fullmatch(r"```+\w+", line)] == []
