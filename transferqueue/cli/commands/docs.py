"""`transferqueue docs`: the documentation of this installation, and the contract of a public name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from transferqueue.cli.completion import complete_page
from transferqueue.cli.screens.terminal import console, say, say_fields
from transferqueue.errors import NotFound

EXAMPLES = (
    ("transferqueue docs", "the pages, and the folder that they are in"),
    ("transferqueue docs tour", "five minutes"),
    ("transferqueue docs Table.put", "the contract of a public name"),
    ("transferqueue docs lease", "of a method, whichever class has it"),
    ("transferqueue docs generator", "of an adapter: generator, learner, scorer, stage, producer"),
)


def docs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE|NAME]",
            show_default=False,
            autocompletion=complete_page,
            help="A page, or a name such as Table.put, lease, Task or generator.",
        ),
    ] = None,
) -> None:
    """Show a page of the documentation, or the contract of a public name.

    Without a name: list the pages. They are of the installed version and need no network.
    """
    from transferqueue.cli.doc_pages import folder, heading, pages

    if name is None:
        for each, path in pages().items():
            if not each.startswith("decisions/"):
                say_fields(f"{each:<22}", heading(path))
        say(f"\nfiles, examples and pictures: {folder()}")
        return
    _show(_found(name))


def _found(name: str) -> str:
    """The contract of exactly this name, else the page, else the contract of a name like it. `NotFound` lists names
    that are near."""
    from transferqueue.cli.contracts import contract, contract_like, names
    from transferqueue.cli.doc_pages import page

    text = contract(name)
    if text is not None:
        return text
    try:
        return page(name, besides=names()).read_text(encoding="utf-8")
    except NotFound:
        text = contract_like(name)
        if text is None:
            raise
        return text


def _show(text: str) -> None:
    if sys.stdout.isatty():
        with console().pager():
            say(text)
    else:
        say(text)
