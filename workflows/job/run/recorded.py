"""What the supervisor of a run does with each event: it adds figures of the table, records it, shows it on the page,
and passes it on."""

from __future__ import annotations

import msgspec

import transferqueue as tq
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.flow import Observe
from transferqueue.workflows.flow.reports.loggers import STEP
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.run_page import RunPage


def recorded(
    record: RunRecord, table: tq.Table, page: RunPage, observe: Observe = lambda label, event: None
) -> Observe:
    """Return the `observe` of a run's flow. observe: gets each event as it is recorded, and each warning."""
    added = TableFigures(table)

    def hear(label: str, event: Event) -> None:
        for each in record.add(label, added.to(event)):
            observe(label, each)
        page.show(record)

    return hear


class TableFigures:
    """Adds to the figures of a step what the table's statistics say: for each task how long ago its next row was put
    (``queue_age_s``; None if no row waits), and how many rows were dropped since the step before, by reason
    (``dropped``)."""

    def __init__(self, table: tq.Table) -> None:
        self._table = table
        self._dropped = table.stats().dropped

    def to(self, event: Event) -> Event:
        """Return the event; of a step, with these figures."""
        if not isinstance(event, Figures) or event.kind != STEP:
            return event
        stats, before = self._table.stats(), self._dropped
        self._dropped = stats.dropped
        added = {
            "queue_age_s": {name: task.age_s for name, task in stats.tasks.items()},
            "dropped": {reason: rows - before.get(reason, 0) for reason, rows in stats.dropped.items()},
        }
        return msgspec.structs.replace(event, values=event.values | added)
