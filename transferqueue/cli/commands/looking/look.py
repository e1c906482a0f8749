"""What `top` and `doctor` ask a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transferqueue.client import Queue
    from transferqueue.observe.coordinators import Look, UnreachableCoordinator


def look(queue: Queue, table: str = "") -> dict[str, Look | UnreachableCoordinator]:
    """What each coordinator says of now, by its address; of one table, what its coordinator says."""
    from transferqueue.observe.answers.stats import Stats, parse
    from transferqueue.observe.coordinators import by_coordinator, looks
    from transferqueue.observe.diagnosis import DoctorAnswer

    stats = by_coordinator(queue.address, queue.stats(), lambda answer: parse("stats", answer, Stats))
    home = queue.coordinator_of(table) if table else queue.address
    answers = by_coordinator(home, queue.doctor(table or None), lambda answer: parse("doctor", answer, DoctorAnswer))
    return looks(stats, answers)
