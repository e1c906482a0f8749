"""`transferqueue docs`: every page that the program names can be opened, and public names have their contract."""

import re

import pytest

from tests.markdown import ROOT
from transferqueue.cli.app import PANELS, run
from transferqueue.cli.contracts import contract, contract_like, names
from transferqueue.cli.doc_pages import page, pages
from transferqueue.errors import NotFound
from transferqueue.workflows.job.settings.describe import tables

NAMED = {
    (str(path.relative_to(ROOT)), name)
    for room in ("transferqueue", "adapters", "workflows")
    for path in (ROOT / room).rglob("*.py")
    for name in re.findall(r"transferqueue docs ([a-z][a-z-]+)", path.read_text())
    if path.name != "docs.py"  # whose examples are names, too
}


def opens(name: str) -> bool:
    try:
        return page(name).exists()
    except NotFound:
        return False


def test_every_page_that_the_program_names_can_be_opened():
    assert len(NAMED) > 20
    assert {(path, name) for path, name in NAMED if not opens(name)} == set()


def test_the_program_names_no_file_that_only_a_checkout_has():
    """A wheel has no docs/ in the folder where its user is; `matrix` writes into a checkout."""
    named = {
        str(path.relative_to(ROOT))
        for room in ("transferqueue", "adapters", "workflows")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"(?<![/\w])(docs/[\w-]+|SECURITY|README)\.md", path.read_text()) and path.name != "matrix.py"
    }
    assert named <= {"transferqueue/cli/doc_pages.py"}


def test_docs_lists_the_pages_and_where_they_are(capsys):
    assert run(["docs"]) == 0
    listed = capsys.readouterr().out
    assert "tour " in listed
    assert str(ROOT) in listed


@pytest.mark.parametrize(
    "name", ["tour", "TOUR.md", "docs/learn/tour.md", "Drop_In", "embed", "learn/embed", "policies"]
)
def test_a_page_is_found_by_each_of_its_names(name, capsys):
    assert run(["docs", name]) == 0
    assert capsys.readouterr().out.startswith("# ")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("Table.put", "Table.put"),
        ("tq.Table.put", "Table.put"),
        ("transferqueue.connect", "connect"),
        ("Full", "Full"),
        ("lease", "Table.lease"),
        ("put", "Table.put"),
        ("lease()", "Table.lease"),
        ("batch.ack", "Batch.ack"),
        ("rollouts.lease", "Table.lease"),
        ("task", "Task"),
        ("Stage", "workflows.flow.Stage"),
        ("stage", "adapters.protocols.StageFunction"),
        ("generator", "adapters.protocols.Generator"),
        ("learner", "adapters.protocols.Learner"),
        ("producer", "adapters.protocols.Producer"),
        ("adapters.protocols.Completion", "adapters.protocols.Completion"),
    ],
)
def test_a_name_shows_its_contract(name, path, capsys):
    assert run(["docs", name]) == 0
    assert capsys.readouterr().out.startswith(f"transferqueue.{path}: ")


@pytest.mark.parametrize("name", [name for names in PANELS.values() for name in names])
def test_the_name_of_a_command_shows_its_page_or_its_help(name, capsys):
    assert run(["docs", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# ") if name in pages() else f"Usage: transferqueue {name} " in shown


@pytest.mark.parametrize("name", [table.name for table in tables() if table.name])
def test_the_name_of_a_table_of_a_job_file_shows_its_keys(name, capsys):
    """Also where a page or a class has that name."""
    assert run(["docs", name]) == 0
    assert f"\n[{name}] " in f"\n{capsys.readouterr().out}"


def test_the_help_of_a_command_names_the_functions_of_its_name(capsys):
    assert run(["docs", "snapshot"]) == 0
    assert "The same name: Queue.snapshot, " in capsys.readouterr().out


def test_an_unknown_name_gets_five_near_ones(capsys):
    assert run(["docs", "Tabls"]) == 2
    near = capsys.readouterr().err.partition("near it are ")[2].partition(";")[0]
    assert len(near.split(", ")) == 5


@pytest.mark.slow
def test_every_name_that_may_be_asked_for_has_its_contract():
    for name in names():
        try:
            assert contract(name) or contract_like(name), name
        except NotFound as error:
            assert "which is not installed here; " in str(error)  # noqa: PT017  (most names have one)


def test_a_method_of_several_classes_names_the_others(capsys):
    assert run(["docs", "ack"]) == 0
    assert "The same name: Batch.ack, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("concept", "concepts"),
        ("leese", "lease"),
        ("lerner", "Learner"),
        ("Table.leaze", "Table.lease"),
        ("Tabel", "Table"),
    ],
)
def test_an_unknown_name_gets_those_that_are_near(name, near, capsys):
    assert run(["docs", name]) == 2
    said = capsys.readouterr().err
    assert f'no page, command or public name is called "{name}"; near it are ' in said
    assert near in re.split(r"near it are |, |; ", said)
    assert len(said) < 400


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("TRANSFERQUEUE_KEYS", "reference/environment"),
        ("pandas", "data-frames"),
        ("exit code", "reference/command-line"),
    ],
)
def test_other_words_find_the_pages_that_have_them(words, page, capsys):
    assert run(["docs", words]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f'no page, command or public name is called "{words}"; it is in\n')
    assert page in said


def test_an_unknown_name_without_near_ones_is_told_in_a_line(capsys):
    assert run(["docs", "xyzzyq" * 50]) == 2
    assert len(capsys.readouterr().err) < 400
    assert run(["docs", "Table.nothing"]) == 2


def test_version_is_an_option_too(capsys):
    assert run(["--version"]) == 0
    option = capsys.readouterr().out
    assert run(["version"]) == 0
    assert capsys.readouterr().out == option


def test_a_page_name_is_unique():
    assert page("readme") == ROOT / "README.md"
    assert len(set(pages().values())) == len(pages())
