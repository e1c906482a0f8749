"""`transferqueue docs`: every page that the program names can be opened, and public names have their contract."""

import re

import pytest

from tests.markdown import ROOT
from transferqueue.cli.app import run
from transferqueue.cli.pages import page, pages

NAMED = {
    (str(path.relative_to(ROOT)), name)
    for room in ("transferqueue", "adapters", "workflows")
    for path in (ROOT / room).rglob("*.py")
    for name in re.findall(r"transferqueue docs ([a-z][a-z-]+)", path.read_text())
}


def test_every_page_that_the_program_names_can_be_opened():
    assert len(NAMED) > 20
    assert {(path, name) for path, name in NAMED if name not in pages()} == set()


def test_the_program_names_no_file_that_only_a_checkout_has():
    """A wheel has no docs/ in the folder where its user is; `matrix` writes into a checkout."""
    named = {
        str(path.relative_to(ROOT))
        for room in ("transferqueue", "adapters", "workflows")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"(?<![/\w])(docs/[\w-]+|SECURITY|README)\.md", path.read_text()) and path.name != "matrix.py"
    }
    assert named <= {"transferqueue/cli/pages.py"}


def test_docs_lists_the_pages_and_where_they_are(capsys):
    assert run(["docs"]) == 0
    listed = capsys.readouterr().out
    assert "tour " in listed
    assert str(ROOT) in listed


@pytest.mark.parametrize("name", ["tour", "TOUR.md", "docs/TOUR.md", "Drop_In", "embed", "guides/embed", "policies"])
def test_a_page_is_found_by_each_of_its_names(name, capsys):
    assert run(["docs", name]) == 0
    assert capsys.readouterr().out.startswith("# ")


@pytest.mark.parametrize("name", ["Table.put", "tq.Table.put", "transferqueue.connect", "Full"])
def test_a_public_name_shows_its_contract(name, capsys):
    assert run(["docs", name]) == 0
    assert name.rpartition(".")[2] in capsys.readouterr().out


def test_an_unknown_page_names_those_that_are_near(capsys):
    assert run(["docs", "observin"]) == 2
    assert 'no page and no public name is called "observin"; near it are observing' in capsys.readouterr().err
    assert run(["docs", "Table.nothing"]) == 2


def test_version_is_an_option_too(capsys):
    assert run(["--version"]) == 0
    option = capsys.readouterr().out
    assert run(["version"]) == 0
    assert capsys.readouterr().out == option


def test_a_page_name_is_unique():
    assert page("readme") == ROOT / "README.md"
    assert len(set(pages().values())) == len(pages())
