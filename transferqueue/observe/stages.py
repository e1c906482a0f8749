"""The stages of a table in the order in which rows pass them, each with its workers. Does no I/O.

A task comes after the tasks that give what it needs. The first stage is the producers: the sessions that put rows. A
worker is a session that has asked for rows of the task (of a producer: that has put or reserved some) and is still
connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from transferqueue.observe.diagnosis import SILENT_S
from transferqueue.wire.answers.doctor import Departed, DoctorAnswer, PipelineStage, TaskDiagnosis
from transferqueue.wire.answers.sessions import SessionStats
from transferqueue.wire.answers.stats import Stats, TableStats, TaskError, TaskStats, Waiting

PRODUCERS: Final = "producers"
_MAKING_ROOM: Final = frozenset({"Reserve", "Put", "Continue", "Grant"})

WorkerState = Literal["works", "waits", "idle", "silent"]
StageState = Literal["moves", "waits", "idle", "failing", "silent", "missing"]


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One session in one stage.

    Attributes:
        name: Its label.
        state: Its state.
        rows: Rows that it leases there; of a producer, that it has reserved.
        silent_s: Seconds since its last message.
        session: Its number.
        waits: The reason of its wait, in the server's words, or "".
        waited_s: Seconds that it has waited. None: it does not wait.
    """

    name: str
    state: WorkerState
    rows: int
    silent_s: float
    session: int = 0
    waits: str = ""
    waited_s: float | None = None


class TableStage(msgspec.Struct, frozen=True, kw_only=True):
    """A task, or (task "") the producers, with its workers and its unfinished rows.

    Attributes:
        unattended_s: Seconds that rows have been ready while no session held or requested any.
        since_s: Age of its oldest lease, in seconds.
        lacks: As in `PipelineStage`.
        left: As in `PipelineStage`.
    """

    task: str
    state: StageState
    workers: list[Worker]
    ready: int = 0
    leased: int = 0
    incomplete: int = 0
    done: int = 0
    dropped: int = 0
    retrying: int = 0
    failing: bool = False
    stranded: bool = False
    errors: list[TaskError] = []
    retry_s: float | None = None
    paused_s: float | None = None
    unattended_s: float | None = None
    since_s: float | None = None
    needs: list[str] = []
    gives: list[str] = []
    lacks: dict[str, int] = {}
    left: Departed | None = None

    @property
    def name(self) -> str:
        """The name of the task, or "producers"."""
        return self.task or PRODUCERS

    @property
    def open_rows(self) -> int:
        """Number of unfinished rows of the task."""
        return self.ready + self.leased + self.incomplete + self.retrying


def all_stages(stats: Stats, answer: DoctorAnswer) -> dict[str, list[TableStage]]:
    """The stages of each table that both answers know."""
    return {name: _of_table(name, table, answer) for name, table in stats.tables.items() if name in answer.tables}


def in_order(stages: Iterable[PipelineStage]) -> list[PipelineStage]:
    """Each stage after the stages that give its needs; otherwise, and in a circle of needs, as declared."""
    left = {stage.task: stage for stage in stages}
    before = {stage.task: _givers(stage, left.values()) for stage in left.values()}
    ordered: list[PipelineStage] = []
    while left:
        chosen = next((task for task in left if before[task].isdisjoint(left)), next(iter(left)))
        ordered.append(left.pop(chosen))
    return ordered


def _givers(stage: PipelineStage, others: Iterable[PipelineStage]) -> set[str]:
    """The other tasks that give fields that the stage needs."""
    needs = set(stage.needs) - set(stage.gives)
    return {other.task for other in others if other is not stage and not needs.isdisjoint(other.gives)}


def _of_table(table: str, stats: TableStats, answer: DoctorAnswer) -> list[TableStage]:
    known = answer.pipelines[table].stages if table in answer.pipelines else []
    known = known or [PipelineStage(task=task) for task in ("", *stats.tasks)]
    diagnoses = {diagnosis.task: diagnosis for diagnosis in answer.tables[table] if diagnosis.task}
    return [_stage(table, stage, stats, diagnoses, answer) for stage in in_order(known)]


def _stage(
    table: str,
    stage: PipelineStage,
    stats: TableStats,
    diagnoses: Mapping[str, TaskDiagnosis],
    answer: DoctorAnswer,
) -> TableStage:
    workers = _workers(table, stage, answer)
    task, diagnosis = stats.tasks.get(stage.task), diagnoses.get(stage.task)
    made = TableStage(
        task=stage.task,
        state="idle",
        workers=workers,
        needs=stage.needs,
        gives=stage.gives,
        lacks=stage.lacks,
        left=stage.left,
        done=0 if stage.task else stats.rows_put,
    )
    if task is not None:
        made = _counted(made, task, diagnosis)
    return msgspec.structs.replace(made, state=_state(made))


def _counted(stage: TableStage, task: TaskStats, diagnosis: TaskDiagnosis | None) -> TableStage:
    return msgspec.structs.replace(
        stage,
        ready=task.ready,
        leased=task.leased,
        incomplete=task.pending + task.held,
        done=task.done,
        dropped=task.dropped,
        retrying=task.retrying,
        failing=task.paused_s is not None or (diagnosis is not None and diagnosis.failing),
        stranded=task.stranded,
        errors=task.errors or (diagnosis.errors if diagnosis else []),
        retry_s=task.retry_s,
        paused_s=task.paused_s,
        unattended_s=None if task.unattended_s is None else min(task.unattended_s, task.age_s or 0.0),
        since_s=task.oldest_lease_s,
    )


def _state(stage: TableStage) -> StageState:
    states = {worker.state for worker in stage.workers}
    if stage.failing:
        return "failing"
    if any(worker.state == "silent" and worker.rows for worker in stage.workers) or states == {"silent"}:
        return "silent"
    if stage.task and stage.ready and not states and stage.unattended_s is not None:
        return "missing"
    if "works" in states:
        return "moves"
    return "waits" if "waits" in states else "idle"


def _workers(table: str, stage: PipelineStage, answer: DoctorAnswer) -> list[Worker]:
    """The sessions that have worked on the stage, hold rows of it or wait for some, in the order of their labels."""
    waits = {wait.session: wait for wait in reversed(answer.waiting) if _waits_in(wait, table, stage.task)}
    numbers = {*stage.workers, *waits}
    for session in answer.sessions.values():
        if any((lease.table, lease.task) == (table, stage.task) and lease.rows for lease in session.leases):
            numbers.add(session.session)
    sessions = [session for session in answer.sessions.values() if session.session in numbers]
    found = [_worker(table, stage.task, session, waits.get(session.session)) for session in sessions]
    return sorted(found, key=lambda worker: (worker.name, worker.session))


def _waits_in(wait: Waiting, table: str, task: str) -> bool:
    if wait.table != table:
        return False
    return wait.request == "Lease" and wait.task == task if task else wait.request in _MAKING_ROOM


def _worker(table: str, task: str, session: SessionStats, wait: Waiting | None) -> Worker:
    held = sum(lease.rows for lease in session.leases if (lease.table, lease.task) == (table, task))
    rows = held if task else session.reserved
    state: WorkerState = "waits" if wait else "idle"
    if rows:
        state = "works"
    if session.silent_s >= SILENT_S:
        state = "silent"
    return Worker(
        name=session.name,
        state=state,
        rows=rows,
        silent_s=session.silent_s,
        session=session.session,
        waits=wait.why if wait else "",
        waited_s=wait.waited_s if wait else None,
    )
