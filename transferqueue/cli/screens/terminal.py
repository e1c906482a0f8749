"""Printing: commands write to the terminal only through this module.

Control characters are replaced by visible text first (`transferqueue.errors.text`), so that no name in a table can send
an escape sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from transferqueue.errors.text import visible, visible_json, visible_lines


class Screen(Console):
    """A console that lets only its own escapes (colours, the live display) reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments to write, with control characters made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible_lines(segment.text))


def console(*, stderr: bool = False) -> Screen:
    """A console on stdout or stderr, 80 columns wide if it has no width. Brackets in text are printed, never read as
    markup."""
    return Screen(stderr=stderr, highlight=False, markup=False, emoji=False)


def show(lines: Iterable[Text], to: Console) -> None:
    """Print lines without breaking or cutting them: the terminal wraps long ones."""
    for line in lines:
        to.print(line, no_wrap=True, overflow="ignore", crop=False)


def show_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(visible_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def say(text: object, *, err: bool = False) -> None:
    """Print text. Line breaks in it stay line breaks."""
    typer.echo(visible_lines(str(text)), err=err)


def say_ready(addresses: Iterable[str]) -> None:
    """Print ``ready`` and the addresses at once: the program that started this process reads the line from a pipe."""
    say(" ".join(["ready", *addresses]))
    sys.stdout.flush()


def say_fields(*fields: str) -> None:
    """Print one line of fields with tabs between them."""
    typer.echo("\t".join(map(visible, fields)))
