"""Help pages: every command has one, with examples that parse, and showing them loads next to nothing."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from transferqueue.cli import app as application
from transferqueue.cli import main
from transferqueue.observe.machine.libraries import version

GROUP: Any = typer.main.get_command(application.app)
COMMANDS = [
    "demo",
    "plan",
    "train",
    "serve",
    "top",
    "inspect",
    "doctor",
    "snapshot",
    "restore",
    "drop-in",
    "version",
]

_PROBE = """
import sys
from transferqueue.cli import main
code = main(["--help"])
print(sorted({name.partition(".")[0] for name in sys.modules}))
sys.exit(code)
"""


def examples_of(name: str) -> list[str]:
    context = GROUP.make_context("transferqueue", [name], resilient_parsing=True)
    _, command, _ = GROUP.resolve_command(context, [name])
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    return [line.removeprefix("[cyan]$ ").removesuffix("[/cyan]") for line in lines if line.startswith("[cyan]$ ")]


def parse(line: str) -> None:
    program, *words = shlex.split(line)
    assert program == "transferqueue"
    context = GROUP.make_context("transferqueue", list(words))
    name, command, rest = GROUP.resolve_command(context, words)
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name: str) -> None:
    lines = examples_of(name)
    assert lines
    for line in lines:
        assert shlex.split(line)[1] == name
        parse(line)


def test_an_example_that_does_not_parse_is_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse("transferqueue top --colour")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_a_help_page_fits_and_shows_its_examples(name: str, width: int) -> None:
    result = CliRunner(env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}).invoke(
        application.app, [name, "--help"]
    )
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= width
    for line in examples_of(name):
        assert f"$ {line}" in result.stdout


def test_the_group_lists_its_commands() -> None:
    result = CliRunner().invoke(application.app, ["--help"])
    assert [name for name in COMMANDS if f" {name} " not in result.stdout] == []
    for _, line in enumerate(application.EXAMPLES):
        parse(line[0])


def test_the_group_shows_its_commands_in_panels() -> None:
    lines = CliRunner().invoke(application.app, ["--help"]).stdout.splitlines()
    titles = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert titles == ["Options", *application.PANELS]
    shown = [line.split()[1] for line in lines if line.startswith("│ ") and line[2] not in " -"]
    assert shown == [name for names in application.PANELS.values() for name in names]


@pytest.mark.parametrize("name", [name for names in application.PANELS.values() for name in names])
def test_a_command_with_more_than_eight_options_shows_them_in_panels(name: str) -> None:
    context = GROUP.make_context("transferqueue", [name], resilient_parsing=True)
    _, command, _ = GROUP.resolve_command(context, [name])
    options = [option for option in command.params if option.param_type_name == "option" and option.name != "help"]
    panels = {option.rich_help_panel for option in options}
    assert len(options) <= 8 or (len(panels) > 2 and None not in panels)


@pytest.mark.parametrize(("old", "new"), application.RENAMED.items())
def test_a_renamed_command_names_its_new_name(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([old, "--help"]) == 2
    assert capsys.readouterr().err.startswith(f"error: `transferqueue {old}` is now `transferqueue {new}`, ")
    assert new in GROUP.commands
    assert old not in GROUP.commands


def test_no_command_shows_the_help() -> None:
    assert "Usage: transferqueue" in CliRunner().invoke(application.app, []).output


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(application.app, ["tops"])
    assert result.exit_code == 2
    assert "tops" in result.stderr


def test_help_is_light() -> None:
    """A person waits for it: it loads none of what takes long to load."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))
    assert loaded.isdisjoint({"numpy", "torch", "zmq", "pyarrow", "matplotlib", "reasoning_gym"})


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"transferqueue {version()}\n"


def test_ctrl_c_while_modules_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "transferqueue.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "transferqueue.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["version"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serve", "--spill-dir", "", "--spill-bytes", "1GiB"], "--spill-dir"),
        (["serve", "--durability", "process", "--state="], "--state="),
        (["keys", "new", "trainer", "--keys", ""], "--keys"),
        (["restore", "--address", "", "000001"], "--address"),
        (["inspect", ""], "inspect"),
    ],
)
def test_an_empty_value_is_refused(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script gives whose variable is not set. It would name the present directory, or another server than was
    meant."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {named} has no value: perhaps a variable of the shell is not set"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "{profile}", "--out", "{folder}"],
        ["plan", "{profile}", "--picture", "{file}/plan.png"],
        ["demo", "--out", "{file}"],
        ["new-adapter", "mine", "--directory", "{file}"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("kept")
    places = {"file": tmp_path / "file", "folder": tmp_path, "profile": "nowhere.toml"}
    assert main([word.format_map(places) for word in words]) == 2
    assert " cannot be made: " in (error := capsys.readouterr().err) or " is a folder; name another file" in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"
