"""Every error of the tree ends a command with one line and its documented code; nothing prints a traceback."""

import re
import sys
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from tests.markdown import ROOT
from transferqueue import cli, errors
from transferqueue.cli import exit_codes
from transferqueue.cli.app import Commands
from transferqueue.cli.exit_codes import exit_code
from transferqueue.lazy import install_line
from transferqueue.server.process.supervisor import EXIT_TORN


def command_that(act: Callable[[], None]) -> typer.Typer:
    app = typer.Typer(cls=Commands)
    app.command("run")(act)
    app.command("other")(act)
    return app


def outcome_of(error: BaseException) -> tuple[int, str]:
    def act() -> None:
        raise error

    result = CliRunner().invoke(command_that(act), ["run"])
    assert result.stdout == ""
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound, 2),
        (errors.AddressInUse, 2),
        (errors.Unreachable, 3),
        (errors.OutOfMemory, 3),
        (errors.DeadlineExceeded, 4),
        (errors.InternalError, 5),
        (errors.LedgerTorn, EXIT_TORN),
        (MemoryError, EXIT_TORN),
    ],
)
def test_an_error_is_one_line_and_a_code(error: type[BaseException], code: int) -> None:
    assert outcome_of(error('table "x" is not here;\n it has a, b')) == (
        code,
        'error: table "x" is not here; it has a, b\n',
    )


def test_every_error_of_the_tree_has_a_code() -> None:
    assert {exit_code(error("")) for error in errors.BY_NAME.values()} == {2, 3, 4, 5, 74}


def test_the_page_has_every_code_and_no_other() -> None:
    page = (ROOT / "docs/reference/command-line.md").read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    listed = set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE)))
    assert listed == {0, EXIT_TORN, *(code for code in vars(exit_codes).values() if isinstance(code, int))}


def test_a_long_line_is_not_broken_and_markup_is_text() -> None:
    text = 'field "[red]x[/red]" ' + "is not there " * 40
    assert outcome_of(errors.NotFound(text))[1] == f"error: {text.strip()}\n"


def test_an_interrupt_is_130() -> None:
    assert outcome_of(KeyboardInterrupt()) == (130, "error: interrupted\n")


def test_a_missing_library_names_its_extra() -> None:
    code, text = outcome_of(ModuleNotFoundError("No module named 'reasoning_gym.x'", name="reasoning_gym.x"))
    assert code == 2
    assert install_line("demo") in text


def test_a_defect_of_ours_is_not_hidden() -> None:
    def act() -> None:
        raise ModuleNotFoundError("No module named 'transferqueue.nowhere'", name="transferqueue.nowhere")

    result = CliRunner().invoke(command_that(act), ["run"])
    assert isinstance(result.exception, ModuleNotFoundError)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_core_install_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"typer": object(), "rich": object(), missing: None}
    monkeypatch.setattr(cli, "find_spec", found.get)
    monkeypatch.delitem(sys.modules, "transferqueue.cli.app", raising=False)
    assert cli.main(["version"]) == 2
    assert capsys.readouterr().err == (
        f"error: the command line needs {missing}, not installed here: {install_line('cli')}\n"
    )
    assert "transferqueue.cli.app" not in sys.modules
