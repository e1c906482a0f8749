"""What clients call themselves and their rows is shown, and never acts on the terminal of whoever looks."""

import ast
import json
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.live import Live
from rich.text import Text
from typer.testing import CliRunner

import transferqueue as tq
from transferqueue import cli
from transferqueue.cli.app import app
from transferqueue.cli.screens.terminal import Screen, console, show
from transferqueue.errors import from_wire
from transferqueue.errors.text import visible, visible_json, visible_lines
from transferqueue.observe.prometheus import exposition

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u2066\u200b\ufeff\r\n\t\x00\x7f\u2028[red]m[/red][link=http://evil.example]l[/link]:boom:"
SHOWN = r"\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u2066\u200b\ufeff\r\n\t\x00\x7f\u2028[red]m[/red][link=http://evil.example]l[/link]:boom:"


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    """Everything that a client may choose is hostile: a label that waits and holds, a key, tags, values, reasons."""
    with tq.connect(label=HOSTILE) as queue:
        table = queue.create_table(
            "rows", tasks=[tq.Task("score", needs=["text"], gives=["y"]), tq.Task("train", needs=["y"])]
        )
        table.put(text=[HOSTILE, "b", "c"], key=[HOSTILE, "k", "l"], tags={"t": HOSTILE})
        batch = table.lease("score", rows=1)
        batch.release(failed=True, reason=HOSTILE)
        queue.weights("policy").publish(1, {"w": np.zeros(4, np.float32)})
        with table.lease("score", rows=2) as held:
            yield queue
            held.release()


def test_visible_escapes_what_does_not_print_and_nothing_else() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible(SHOWN) == SHOWN
    for text in ("", "plain", "größe 数量 🚀", "a\\b"):
        assert visible(text) == text
    assert visible("\ud800") == r"\ud800"
    assert visible_lines("a\nb\x1b") == "a\nb\\x1b"
    assert json.loads(visible_json(json.dumps([HOSTILE, "🚀\U000e0041"], ensure_ascii=False))) == [
        HOSTILE,
        "🚀\U000e0041",
    ]


COMMANDS = [
    ("top", "--once", "--interval", "0.05"),
    ("inspect",),
    ("inspect", "rows"),
    ("inspect", "rows", "0"),
    ("inspect", "rows", "--key", HOSTILE.replace("\x00", "")),
    ("doctor", "--patience", "0", "--table", "rows"),
    ("doctor", "--patience", "0"),
    ("inspect", "none"),
    ("inspect", HOSTILE.replace("\x00", "")),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3])[:20])
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_no_command_prints_a_control_character(queue: tq.Queue, words: tuple[str, ...], more: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "--address", queue.address, *more], env={"COLUMNS": "200"})
    printed = done.stdout + done.stderr
    assert printed
    assert [one for one in printed if not one.isprintable() and one != "\n"] == []


def test_what_is_hostile_is_shown_and_not_left_out(queue: tq.Queue) -> None:
    done = CliRunner().invoke(app, ["inspect", "rows", "0", "--address", queue.address], env={"COLUMNS": "2000"})
    shown = SHOWN.replace(r"\x07", "").replace(r"\r", "")  # rich leaves these two out of any text
    assert f"key {shown}" in done.stdout
    assert f"by {SHOWN}"[:20] in done.stdout
    as_json = CliRunner().invoke(app, ["inspect", "rows", "0", "--address", queue.address, "--json"]).stdout
    assert json.loads(as_json)["key"] == HOSTILE


def test_an_error_of_a_wait_names_its_holders_visibly(queue: tq.Queue) -> None:
    with pytest.raises(tq.DeadlineExceeded) as late:
        queue.table("rows").lease("score", rows=3, timeout_s=0.01)
    assert str(late.value).isprintable()
    assert str(from_wire("NotFound", HOSTILE)).replace("\n", "").isprintable()
    assert str(from_wire(HOSTILE, HOSTILE)).replace("\n", "").isprintable()


def test_metrics_have_no_control_character(queue: tq.Queue) -> None:
    stats = queue.stats()
    stats.tables["rows"].dropped[HOSTILE] = 1
    text = exposition(stats).decode()
    assert [one for one in text if not one.isprintable() and one != "\n"] == []
    assert "evil" in text


def test_only_the_consoles_own_escapes_reach_a_terminal() -> None:
    out = StringIO()
    screen = Screen(file=out, force_terminal=True, color_system="standard", width=300, highlight=False, markup=False)
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        live.update(Text("\n").join([Text(HOSTILE, style="red"), Text("b")]), refresh=True)
    show([Text(HOSTILE, style="bold")], screen)
    screen.print(HOSTILE)
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert [one for one in printed if not one.isprintable() and one not in "\n\r"] == []
    assert "\x1b[2J" not in out.getvalue()
    assert console().encoding


def test_commands_write_through_the_terminal_module_alone() -> None:
    """So no other place has to think of it."""
    folder = Path(cli.__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in {
                "print",
                "Console",
                "typer.echo",
                "typer.secho",
                "click.echo",
                "sys.stdout.write",
                "sys.stderr.write",
            }:
                found.append((path.name, name))
    assert {place for place in found if place[0] != "terminal.py"} == {
        ("__init__.py", "print"),  # before typer and rich are known to be there
        ("layout.py", "Console"),  # measures, and writes nothing
    }
