"""The two requests that `top` and `doctor` make of a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transferqueue.client import Queue
    from transferqueue.observe.coordinators import Look
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator


def look(queue: Queue, table: str = "") -> dict[str, Look | UnreachableCoordinator]:
    """Stats and diagnosis of each coordinator, by address; with `table`, of that table's coordinator alone."""
    from transferqueue.observe.coordinators import looks
    from transferqueue.wire.answers.coordinators import by_coordinator

    stats = by_coordinator(queue.address, queue.stats())
    home = queue.coordinator_of(table) if table else queue.address
    answers = by_coordinator(home, queue.doctor(table or None))
    return looks(stats, answers)
