"""Runs the main job: asynchronous GRPO of a small transformer, with every stage a process that shares only the queue.

`run_demo` runs it on this machine, `grpo.on_ray` on a cluster; both call `run_job`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import transferqueue as tq
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.flow import Flow, Observe
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.reports.audit import Audit, audit
from transferqueue.workflows.flow.reports.loggers import STEP
from transferqueue.workflows.grpo.job import TABLE, JobSettings, create_table, jobs
from transferqueue.workflows.grpo.report import RunLog, Summary, summarize, write_files


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """A finished run: its summary, the row counts of its table, and the files it wrote."""

    summary: Summary
    audit: Audit
    files: list[Path]


def run_demo(
    settings: JobSettings,
    *,
    directory: Path,
    observe: Callable[[str, Event], None] = lambda label, event: None,
    started: Callable[[Flow], None] = lambda flow: None,
) -> RunOutcome:
    """Run the job and return its outcome; files and logs go to `directory`.

    Blocks until the run has ended. The server runs in this process, each stage in its own; no process is
    left when this returns or raises. observe: called for every event. started: called once the processes run.
    Raises `StageFailed` when a stage cannot work, and `InternalError` when the row counts do not balance at the end.
    """
    with tq.connect("embedded", label="supervisor") as queue:

        def in_processes(stage_jobs: Sequence[StageJob], on_event: Observe) -> None:
            with Flow(queue, stage_jobs, directory=directory, observe=on_event) as flow:
                started(flow)
                flow.run()

        return run_job(queue, settings, in_processes, directory=directory, observe=observe)


def run_job(
    queue: tq.Queue,
    settings: JobSettings,
    run: Callable[[Sequence[StageJob], Observe], None],
    *,
    directory: Path,
    observe: Observe,
) -> RunOutcome:
    """Create the job's table in `queue`, let `run` run its processes until all have ended, and summarise their events.

    Files go to `directory`. Raises what `run` raises, and `InternalError` when the row counts do not balance at the end.
    """
    began = time.monotonic()
    record = RunLog()

    def on_event(label: str, event: Event) -> None:
        event = aged(event, table)
        record.add(label, event)
        observe(label, event)

    directory.mkdir(parents=True, exist_ok=True)
    table = create_table(queue, settings)
    run(jobs(settings), on_event)
    audited, stats = audit(table), table.stats()
    audited.check_finished(TABLE)
    summary = summarize(record, settings, audited, table=stats, seconds=time.monotonic() - began)
    return RunOutcome(summary=summary, audit=audited, files=write_files(directory, record, summary))


def aged(event: Event, table: tq.Table) -> Event:
    """Add `queue_age_s` to the metrics of a step: for each task, how long ago its next row was put; None if no row waits."""
    if not isinstance(event, Figures) or event.kind != STEP:
        return event
    ages = {name: task["age_s"] for name, task in table.stats()["tasks"].items()}
    return msgspec.structs.replace(event, values=event.values | {"queue_age_s": ages})


def run_name(settings: JobSettings, now: datetime | None = None) -> str:
    """Folder name of a run: data set, mode, seed and UTC time."""
    at = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return f"{settings.learning.dataset}-{settings.mode}-seed{settings.learning.seed}-{at}"
