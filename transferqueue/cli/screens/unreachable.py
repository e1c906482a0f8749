"""The lines of a coordinator that did not answer."""

from __future__ import annotations

from rich.text import Text

from transferqueue.cli.screens.layout import wrap
from transferqueue.wire.answers.coordinators import UnreachableCoordinator


def unreachable_lines(coordinator: UnreachableCoordinator, width: int) -> list[Text]:
    """The address of the coordinator, and the error."""
    head = Text(coordinator.address, style="bold cyan").append(" is out of reach", style="bold red")
    return [head, *wrap(Text(coordinator.unreachable), width, indent=2)]
