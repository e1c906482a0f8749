"""What a screen shows in place of a coordinator that is out of reach."""

from __future__ import annotations

from rich.text import Text

from transferqueue.cli.screens.layout import wrap
from transferqueue.observe.coordinators import UnreachableCoordinator


def silent_lines(silent: UnreachableCoordinator, width: int) -> list[Text]:
    """Its address, and why nothing is known of it."""
    head = Text(silent.address, style="bold cyan").append(" is out of reach", style="bold red")
    return [head, *wrap(Text(silent.unreachable), width, indent=2)]
