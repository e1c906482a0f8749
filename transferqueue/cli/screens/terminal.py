"""Printing: the only place where commands write to the terminal. Whatever they write is made visible first (`transferqueue.text`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from transferqueue.text import visible, visible_json, visible_lines


class Screen(Console):
    """A console whose own escapes (colours, the live display) are the only ones that reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is written, piece by piece."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible_lines(segment.text))


def console(*, stderr: bool = False) -> Screen:
    """The terminal, or the pipe, that this command writes to; 80 columns wide if it has no width.

    Text is never markup: what is between brackets is shown as it is.
    """
    return Screen(stderr=stderr, highlight=False, markup=False, emoji=False)


def show(lines: Iterable[Text], to: Console) -> None:
    """Print lines as they are: what is too long runs on, for the terminal to wrap."""
    for line in lines:
        to.print(line, no_wrap=True, overflow="ignore", crop=False)


def show_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(visible_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def say(text: object, *, err: bool = False) -> None:
    """Print text, each of its lines as one."""
    typer.echo(visible_lines(str(text)), err=err)


def say_fields(*fields: str) -> None:
    """Print one line of fields with tabs between them."""
    typer.echo("\t".join(map(visible, fields)))
