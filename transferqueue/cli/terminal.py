"""Printing: lines as they were laid out, and JSON for machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text


def console() -> Console:
    """The terminal, or the pipe, that this command writes to; 80 columns wide if it has no width."""
    return Console(highlight=False)


def show(lines: Iterable[Text], to: Console) -> None:
    """Print lines as they are: what is too long runs on, for the terminal to wrap."""
    for line in lines:
        to.print(line, no_wrap=True, overflow="ignore", crop=False)


def show_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
