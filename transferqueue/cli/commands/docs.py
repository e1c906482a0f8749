"""`transferqueue docs`: the documentation of this installation, and the contract of a public name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from transferqueue.cli.completion import complete_page
from transferqueue.cli.screens.terminal import console, say, say_fields

EXAMPLES = (
    ("transferqueue docs", "the pages, and the folder that they are in"),
    ("transferqueue docs tour", "five minutes"),
    ("transferqueue docs Table.put", "the contract of a public name"),
)


def docs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE|NAME]",
            show_default=False,
            autocompletion=complete_page,
            help="A page, or a public name such as Table.put.",
        ),
    ] = None,
) -> None:
    """Show a page of the documentation, or the contract of a public name.

    Without a name: list the pages. They are of the installed version and need no network.
    """
    from transferqueue.cli.pages import folder, heading, page, pages

    if name is None:
        for each, path in pages().items():
            if not each.startswith("decisions/"):
                say_fields(f"{each:<22}", heading(path))
        say(f"\nfiles, examples and pictures: {folder()}")
        return
    text = _contract(name)
    _show(page(name).read_text(encoding="utf-8") if text is None else text)


def _contract(name: str) -> str | None:
    """Signature and docstring of a public name of `transferqueue`; None if it is none."""
    import pydoc

    import transferqueue as tq

    name = name.removeprefix("transferqueue.").removeprefix("tq.")
    first, *rest = name.split(".")
    if first not in tq.__all__:
        return None
    value = getattr(tq, first)
    for part in rest:
        value = getattr(value, part, None)
    return None if value is None else pydoc.plain(pydoc.render_doc(value, f"transferqueue.{name}: %s"))


def _show(text: str) -> None:
    if sys.stdout.isatty():
        with console().pager():
            say(text)
    else:
        say(text)
