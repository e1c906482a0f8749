"""What `top` and `doctor` ask a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transferqueue.client import Queue
    from transferqueue.observe.coordinators import Look
    from transferqueue.wire.answers.coordinators import UnreachableCoordinator


def look(queue: Queue, table: str = "") -> dict[str, Look | UnreachableCoordinator]:
    """What each coordinator says of now, by its address; of one table, what its coordinator says."""
    from transferqueue.observe.coordinators import looks
    from transferqueue.wire.answers.coordinators import by_coordinator

    stats = by_coordinator(queue.address, queue.stats())
    home = queue.coordinator_of(table) if table else queue.address
    answers = by_coordinator(home, queue.doctor(table or None))
    return looks(stats, answers)
