"""Runs a job: its server, its table and its processes, until the last step; then the summary.

1. Nothing starts before the job has passed all rules, those that need its files too (`preflight`).
2. The server, the stages and the trainer are processes of their own. Whichever is killed is started again, and the run
   goes on; one that cannot work ends the run with its last words.
3. With ``on = "ray"`` server and processes are actors of a cluster (`on_ray`).
4. However the run ends, no process is left. A run that did not come to its end keeps its rows and its checkpoints, and
   `run_job` with `resume` goes on with them; a finished one keeps neither rows nor shared memory.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.storage.row_files.reader import JOB_ROWS
from transferqueue.wire.answers.stats import TableStats
from transferqueue.workflows.elastic.scaler import Scaler
from transferqueue.workflows.flow.events import Event
from transferqueue.workflows.flow.flow import Flow, Observe
from transferqueue.workflows.flow.on_ray import RayFlow
from transferqueue.workflows.flow.reports.audit import Audit, audit
from transferqueue.workflows.flow.reports.loggers import logged, logger_named
from transferqueue.workflows.job import names
from transferqueue.workflows.job.devices.placement import FoundDevice, Placement
from transferqueue.workflows.job.graph import TRAINERS, create_table, generating_task, stage_jobs
from transferqueue.workflows.job.run.elastic import scaler_of
from transferqueue.workflows.job.run.folder import PLAN, SUMMARY, RunFolder, new_folder
from transferqueue.workflows.job.run.machine import process_variables
from transferqueue.workflows.job.run.on_ray import deployed, flow_on_ray, reserved
from transferqueue.workflows.job.run.plot import can_draw, draw
from transferqueue.workflows.job.run.preflight import (
    check_queue,
    check_servers,
    placement_of,
    preflight,
    shared_variables,
)
from transferqueue.workflows.job.run.queue_snapshots import SNAPSHOTS, QueueSnapshots, restore_if_lost
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.recorded import recorded
from transferqueue.workflows.job.run.run_page import RunPage
from transferqueue.workflows.job.run.server import RunServer, discard_state
from transferqueue.workflows.job.run.summary import RunSummary, summarize
from transferqueue.workflows.job.run_files import MODEL
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.plan_file import PlanFile
from transferqueue.workflows.job.settings.read import checked
from transferqueue.workflows.job.settings.rules import LOGGERS
from transferqueue.workflows.job.settings.sizes import has_step_versions, records_rows
from transferqueue.workflows.job.training.policy_critic_pair import begin_pair

RECORD_S: Final = 60.0
"""Longest wait for the files of the last rows, which are written at once if the disk works."""
_LOOK_S: Final = 0.05
RESTARTS_MAX: Final = 5
"""Restarts of one process of a run; a run may take days."""


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """A run that has just started: its folder, the labels of its processes, their ids (on Ray: none), and the link of
    the page ("": none)."""

    folder: Path
    address: str
    labels: list[str]
    pids: dict[str, int]
    server: list[int]
    link: str


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """A finished run: its summary, the row counts of its table, its folder and the files in it."""

    summary: RunSummary
    audit: Audit
    folder: Path
    files: list[Path]


def run_job(
    job: Job,
    *,
    folder: RunFolder | None = None,
    code: Path | None = None,
    page: bool = False,
    plan: PlanFile | None = None,
    devices: Sequence[FoundDevice] | None = None,
    observe: Observe = lambda label, event: None,
    started: Callable[[RunningJob], None] = lambda running: None,
) -> JobOutcome:
    """Run `job` to its end and return its outcome. Blocks for as long as that takes.

    folder: of a new run (None: one in ``runs/``), or of one to go on with. code: folder whose modules rewards may name,
    beside the current one. page: serve the queue's page too. plan: the changes made to `job`; it is kept in the folder,
    and its prediction is in the summary. devices: the GPUs that the processes share (None: all that are there).
    observe: called for every event, by the supervising thread. started: called
    once the processes run.

    Raises `UsageError` and `Impossible` before anything starts; `AddressInUse` if another process runs the folder;
    `StageFailed` when a process cannot work; `InternalError` when the row counts do not balance at the end. Ends all
    processes on `KeyboardInterrupt`.
    """
    job = checked(job)
    placement = placement_of(job, devices=devices)
    tokenizer = preflight(job, code=code).renderer.tokenizer
    check_queue(job.queue.address)
    check_servers(job)
    environment = shared_variables(job, tokenizer, code)
    folder = folder or new_folder(job)
    with folder.locked():
        folder.begin(job, code)
        if plan is not None:
            plan.write(folder.path / PLAN)
        with RunRecord(folder.path, job) as record, _queue(job, folder, page=page) as (queue, address, server):
            if not (job.queue.address or queue.tables() or restore_if_lost(queue, folder.path)):
                folder.begin_table(job)
            table = create_table(queue, job, records=records_rows(job))
            began, run_page = time.monotonic(), RunPage(queue)
            with _loggers(job, folder, observe) as hear, _snapshots(job, queue, hear) as hear:
                _run_processes(
                    queue,
                    address,
                    job,
                    folder,
                    placement,
                    environment,
                    recorded(record, table, run_page, hear),
                    lambda flow: started(_running(folder, job, flow, address, server)),
                )
            run_page.show(record, at_once=True)
            stats = _all_recorded(table)
            audited = audit(table)
            audited.check_finished(names.TABLE)
            summary = summarize(
                record,
                job,
                audited,
                starts=len(folder.starts()),
                seconds=time.monotonic() - began,
                predicted=folder.predicted(),
                table=stats,
            )
            files = _write_files(folder.path, record, summary)
        if not job.queue.address:
            discard_state(folder.path)
            shutil.rmtree(folder.path / SNAPSHOTS, ignore_errors=True)
        return JobOutcome(summary=summary, audit=audited, folder=folder.path, files=files)


def _all_recorded(table: tq.Table) -> TableStats:
    """Wait for the files of the last rows, at most `RECORD_S`. Returns the statistics of the table."""
    until = time.monotonic() + RECORD_S
    while (stats := table.stats()).rows_to_record and time.monotonic() < until:
        time.sleep(_LOOK_S)
    return stats


def _run_processes(
    queue: tq.Queue,
    address: str,
    job: Job,
    folder: RunFolder,
    placement: Placement,
    environment: Mapping[str, str],
    observe: Observe,
    started: Callable[[Flow | RayFlow], None],
) -> None:
    processes = stage_jobs(placement.with_shares(job), folder.path)
    scaler = scaler_of(job, processes, observe)
    terms: dict[str, Any] = {
        "observe": scaler or observe,
        "restarts_max": RESTARTS_MAX,
        "environment": environment,
        "prepare": lambda together: _prepare(together, queue, folder, job),
    }
    with ExitStack() as stack:
        flow: Flow | RayFlow
        if job.on == "ray":
            gpus = stack.enter_context(reserved(placement, job))
            flow = flow_on_ray(job, processes, address, gpus=gpus, **terms)
        else:
            environments = process_variables(job, placement)
            flow = Flow(queue, processes, directory=folder.path / "logs", environments=environments, **terms)
        with flow, _scaling(scaler, flow, queue.table(names.TABLE), job):
            started(flow)
            flow.run()


def _scaling(scaler: Scaler | None, flow: Flow | RayFlow, table: tq.Table, job: Job) -> AbstractContextManager[None]:
    return nullcontext() if scaler is None else scaler.running(flow, table, generating_task(job))


def _prepare(together: str, queue: tq.Queue, folder: RunFolder, job: Job) -> None:
    if together == TRAINERS:
        begin_pair(queue, folder.path, job.steps, by_step=has_step_versions(job))


@contextmanager
def _queue(job: Job, folder: RunFolder, *, page: bool) -> Iterator[tuple[tq.Queue, str, RunServer | None]]:
    """Connect to the job's own server, which is started, or to the one that it names. Yields its address too."""
    with ExitStack() as stack:
        server, address = None, job.queue.address
        if not address and job.on == "ray":
            address = stack.enter_context(deployed(job, folder.path))
        elif not address:
            server = stack.enter_context(RunServer(folder.path, job.queue, page=page))
            address = server.address
        yield stack.enter_context(tq.connect(address, label="supervisor")), address, server


@contextmanager
def _loggers(job: Job, folder: RunFolder, observe: Observe) -> Iterator[Observe]:
    """Open the loggers of the job beside the files that every run has."""
    with ExitStack() as stack:
        for name in job.log.to:
            is_named = name in LOGGERS
            log = (
                stack.enter_context(logger_named(name)(folder.path / name))
                if is_named
                else load_callable(name, "log.to")
            )
            observe = logged(log, observe)
        yield observe


@contextmanager
def _snapshots(job: Job, queue: tq.Queue, observe: Observe) -> Iterator[Observe]:
    """Take snapshots of the queue beside checkpoints, where the server's state is not on a disk already."""
    if not job.checkpoint.every or job.queue.durability == "disk" or job.queue.address:
        yield observe
        return
    with QueueSnapshots(queue, keep=job.checkpoint.keep) as snapshots:

        def hear(label: str, event: Event) -> None:
            snapshots.hear(label, event)
            observe(label, event)

        yield hear


def _running(folder: RunFolder, job: Job, flow: Flow | RayFlow, address: str, server: RunServer | None) -> RunningJob:
    return RunningJob(
        folder=folder.path,
        address=address,
        labels=[process.label for process in stage_jobs(job)],
        pids=flow.pids(),
        server=[] if server is None else server.pids(),
        link="" if server is None else server.link,
    )


def _write_files(folder: Path, record: RunRecord, summary: RunSummary) -> list[Path]:
    """Write the files of a finished run; ``summary.json``, which says that it is finished, last."""
    timeline, curve, text, result = (
        folder / name for name in ("timeline.json", "learning.png", "summary.txt", SUMMARY)
    )
    record.write_timeline(timeline)
    if can_draw() and record.steps:
        draw(curve, record, summary)
    text.write_text(summary.text(), encoding="utf-8")
    result.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return [
        path
        for path in (
            folder / MODEL,
            result,
            text,
            *(folder / f"{name}.jsonl" for name in ("steps", "samples")),
            folder / JOB_ROWS,
            timeline,
            curve,
        )
        if path.exists()
    ]
