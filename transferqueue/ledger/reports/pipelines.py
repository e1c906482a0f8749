"""How the tasks of a table depend on each other, and how its rows ended lately: the input of a verdict."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Final

from transferqueue.ledger.arrays import IntArray
from transferqueue.ledger.rules.explain import sample
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.task_state import PENDING, TaskState
from transferqueue.wire.answers.doctor import PipelineStage, TablePipeline

EVENTS_SAMPLED: Final = 256
"""Events from which `ends` is counted, the newest: some hundred rows, however large the batches."""


def pipeline(table: TableState) -> TablePipeline:
    """The columns that each task needs, gives and lacks, in the order of declaration, and the latest ends of rows. Task
    "": the producers."""
    live = sample(table) if any(task.counts[PENDING] for task in table.tasks.values()) else None
    return TablePipeline(
        stages=[PipelineStage(task=""), *(_stage(table, task, live) for task in table.tasks.values())],
        ends=latest_ends(table),
    )


def _stage(table: TableState, task: TaskState, live: IntArray | None) -> PipelineStage:
    return PipelineStage(
        task=task.task.name,
        needs=list(task.task.needs),
        gives=list(task.task.gives),
        lacks={} if live is None else _lacks(table, task, live),
    )


def _lacks(table: TableState, task: TaskState, live: IntArray) -> dict[str, int]:
    """Of a sample of live rows, how many are pending for want of each column."""
    at = table.rows.pages.index(live)
    pending = at[task.state.a[at] == PENDING]
    missing = {
        name: pending.size - int(table.rows.has_all(pending, table.rows.mask((name,))).sum())
        if name in table.rows.fields
        else int(pending.size)
        for name in task.task.needs
    }
    return {name: rows for name, rows in missing.items() if rows}


def latest_ends(table: TableState) -> dict[str, int]:
    """Rows of the newest events by how they ended: acked by the pacing task, requeued or kept though stale, or the
    reason of a drop."""
    pacing = table.pacing.task if table.pacing else ""
    ends = Counter[str]()
    for event in islice(reversed(table.history), EVENTS_SAMPLED):
        if (event.what == "acked" and event.task == pacing) or event.what in ("requeued as stale", "kept though stale"):
            ends[event.what] += event.rows.size
        elif event.what == "dropped":
            ends[event.detail] += event.rows.size
    return dict(ends)
