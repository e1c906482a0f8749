"""Made-up answers of a server: a chain of tasks, each of which gives the column that the next one needs."""

from __future__ import annotations

from typing import Any

from tests.observe.snapshots import stats, table, task
from transferqueue.wire.answers.doctor import DoctorAnswer, PipelineStage, TablePipeline, TaskDiagnosis
from transferqueue.wire.answers.sessions import HeldLease, SessionStats
from transferqueue.wire.answers.stats import Stats, TableStats, TaskStats, Waiting

TABLE = "rollouts"
ROWS = 4


def session(
    number: int, label: str, silent_s: float = 0.5, rows: int = 0, of: str = "", **changed: Any
) -> SessionStats:
    """A session, with one lease of the task `of` if it holds rows."""
    leases = [HeldLease(lease=number, table=TABLE, task=of, rows=rows)] if rows else []
    known = {"session": number, "label": label, "pid": 4000 + number, "host": "node-1", "opened_s": 99.0}
    counts = {"reserved": 0, "grants": 0, "pins": 0, "waits": 0, "state": "open", "rows_leased": rows}
    return SessionStats(**{**known, **counts, "silent_s": silent_s, "leases": leases, **changed})


def wait(session: int, label: str, task: str = "", waited_s: float = 30.0, **changed: Any) -> Waiting:
    """A request that waits for rows of a task; another kind of request where `changed` says so."""
    about = {"session": session, "label": label, "request": "Lease", "table": TABLE, "task": task}
    return Waiting(**{**about, "waited_s": waited_s, "left_s": 5.0, "why": f"{label} waits; because", **changed})


def answer(stages: list[PipelineStage], ends: dict[str, int] | None = None, **changed: Any) -> DoctorAnswer:
    """What the doctor says of one table."""
    tasks = [TaskDiagnosis(task=stage.task, text=f"task {stage.task}") for stage in stages if stage.task]
    known = {"now_s": 100.0, "tables": {TABLE: tasks}, "waiting": [], "sessions": {}}
    return DoctorAnswer(**{**known, "pipelines": {TABLE: TablePipeline(stages=stages, ends=ends or {})}, **changed})


def chain(length: int, broken: int, **of_broken: Any) -> tuple[Stats, DoctorAnswer]:
    """Tasks `a`, `b`, …: those before `broken` are done with all rows, that one has them ready, and those after it
    wait."""
    names = [chr(ord("a") + at) for at in range(length)]
    stages, tasks = [PipelineStage(task="")], {}
    waiting, sessions = [], []
    for at, name in enumerate(names):
        needs, gives = [f"c{at}"], [f"c{at + 1}"]
        waits = at > broken
        stages.append(
            PipelineStage(
                task=name, needs=needs, gives=gives, lacks={needs[0]: ROWS} if waits else {},
                workers=[at + 1] if at != broken else [],
            )
        )  # fmt: skip
        tasks[name] = task(pending=ROWS) if waits else task(done=ROWS)
        if at != broken:
            sessions.append(session(at + 1, f"worker-{name}"))
            waiting.append(wait(at + 1, f"worker-{name}", name))
    tasks[names[broken]] = task(ready=ROWS, unattended_s=40.0, age_s=40.0, **of_broken)
    found = answer(stages, waiting=waiting, sessions={str(one.session): one for one in sessions})
    return stats(tables={TABLE: table(rows_put=ROWS, rows_live=ROWS, tasks=tasks)}), found


def one_table(tasks: dict[str, TaskStats], **changed: Any) -> dict[str, TableStats]:
    """The statistics of the table."""
    return {TABLE: table(**{"rows_put": ROWS, "rows_live": ROWS, "tasks": tasks, **changed})}
