"""The reference shows every public name, each with an example, and no page of the documentation has a dead link."""

from pathlib import Path

import pytest

import transferqueue as tq
from tests.reference import (
    DOCUMENTED,
    dead_links,
    gone,
    methods,
    missing_contracts,
    names_of,
    without_arguments,
    without_docstring_example,
    without_example,
)


def test_every_public_name_has_its_contract_in_the_reference() -> None:
    assert missing_contracts() == []
    assert gone() == []


def test_every_public_name_has_an_example() -> None:
    assert without_example() == []


def test_every_public_callable_has_an_example_in_its_docstring() -> None:
    assert without_docstring_example() == []


def test_a_missing_example_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tq.Table.put, "__doc__", "Add rows.")
    assert without_docstring_example() == ["Table.put"]


def test_every_public_callable_explains_its_parameters() -> None:
    assert without_arguments() == []


def test_the_site_has_no_dead_link(tmp_path: Path) -> None:
    assert dead_links(tmp_path / "site") == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    from tests.reference import _prepare

    site = _prepare().Site(tmp_path)
    page = Path(__file__).parent / "nowhere.md"
    link = _prepare().LINK.search("[text](gone.md#part)")
    assert site._link(page, link) == "[text](gone.md#part)"
    assert site.missing == ["tests/nowhere.md: gone.md"]


def test_the_names_to_show_are_found() -> None:
    """The lists above are not empty by mistake."""
    assert "Table.put" in set(methods())
    assert all(names_of(module) for module in DOCUMENTED)
