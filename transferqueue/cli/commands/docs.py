"""`transferqueue docs`: pages of this installation, contracts of public names, help of commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from transferqueue.cli.completion import complete_page
from transferqueue.cli.screens.terminal import console, say, say_fields
from transferqueue.errors import NotFound

EXAMPLES = (
    ("transferqueue docs", "all pages, and their folder"),
    ("transferqueue docs tour", "five minutes"),
    ("transferqueue docs Table.put", "the contract of a public name"),
    ("transferqueue docs lease", "the contract of a method of any class"),
    ("transferqueue docs generator", "the contract of an adapter: generator, learner, scorer, stage, producer"),
    ("transferqueue docs serve", "the help of a command"),
)
_MISSPELT = 0.8
"""A name that is so near to a known one is that name, misspelt."""


def docs(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE|NAME]",
            show_default=False,
            autocompletion=complete_page,
            help="A page, a command, a name such as Table.put, lease, Task or generator, or any words.",
        ),
    ] = None,
) -> None:
    """Show a page of the documentation, or the contract of a name.

    Without a name it lists the pages. They are of the installed version and need no network. A page comes before the
    command of its name, and a command before a method.
    """
    from transferqueue.cli.doc_pages import folder, heading, pages

    if name is None:
        for each, path in pages().items():
            if not each.startswith("decisions/"):
                say_fields(f"{each:<22}", heading(path))
        say(f"\nfiles, examples and pictures: {folder()}")
        return
    program: Any = context.find_root()
    commands = program.command.commands
    if name in commands and name not in pages():
        program.command.main([name, "--help"], prog_name=program.info_name, standalone_mode=False)
        _show_same(name)
    else:
        _show(_text_of(name, commands))


def _show_same(name: str) -> None:
    """Name the functions and methods that have the name of a command."""
    from transferqueue.cli.contracts import names

    if same := [each for each in names() if each.endswith(f".{name}")]:
        say(f"The same name: {', '.join(dict.fromkeys(same))}")


def _text_of(name: str, commands: Iterable[str]) -> str:
    """The contract of exactly this name, else its page, else the contract of a similar name, else the pages that
    speak of it. A page with the name of a table of the job file is followed by the keys of the table.

    Raises:
        NotFound: There is none of them; the message lists up to five near names.
    """
    from transferqueue.cli.contracts import contract, contract_like, names, table_keys
    from transferqueue.cli.doc_pages import page, pages

    text = contract(name)
    if text is not None:
        return text
    known = [*names(), *commands]
    try:
        shown = page(name, besides=known).read_text(encoding="utf-8")
        return "\n".join(filter(None, (shown, table_keys(name))))
    except NotFound:
        misspelt = get_close_matches(name.lower(), [each.lower() for each in [*pages(), *known]], cutoff=_MISSPELT)
        text = contract_like(name) or ("" if misspelt else _mentions(name))
        if not text:
            raise
        return text


def _mentions(words: str) -> str:
    """The pages that speak of these words, a line for each; "" if none does."""
    from transferqueue.cli.doc_pages import heading, mentions

    found = [f"{name:<22} {heading(path)}" for name, path in mentions(words).items()]
    return "\n".join([f'no page, command or public name is called "{words[:80]}"; it is in', *found]) if found else ""


def _show(text: str) -> None:
    if sys.stdout.isatty():
        with console().pager():
            say(text)
    else:
        say(text)
