"""Who waits for what in a running queue: sentences from the server's answer to `Observe("doctor")`.

The server explains each request that waits; the ledger describes tasks without a waiting request. What of it is wrong,
`verdict` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from transferqueue.limits import HEARTBEAT_S
from transferqueue.observe.answers.sessions import SessionStats
from transferqueue.observe.answers.stats import TaskError, Waiting, parse
from transferqueue.observe.units import plural, rows, span

NAMES_SHOWN = 4
SILENT_S: Final = 2 * HEARTBEAT_S
"""A live client sends something every `HEARTBEAT_S`; one late message is not reported."""


class TaskDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's description of a task, or (task "") of its table. stranded: the task can never progress.
    unattended_s: for how long no worker has worked on it, though rows are ready (None: a worker does, or no rows are).
    died: its last worker died. errors: as in `TaskStats`. failing: its recent leases all failed."""

    task: str
    text: str
    stranded: bool = False
    unattended_s: float | None = None
    died: bool = False
    errors: list[TaskError] = []
    failing: bool = False


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """The worker whose session ended last, when, and how. died: without a goodbye."""

    label: str
    ago_s: float
    how: str
    died: bool = False


class PipelineStage(msgspec.Struct, frozen=True, kw_only=True):
    """A task, or (task "") the sessions that put rows. lacks: in a sample of its pending rows, how many lack each
    column. workers: the open sessions that have asked for its rows."""

    task: str
    needs: list[str] = []
    gives: list[str] = []
    lacks: dict[str, int] = {}
    workers: list[int] = []
    left: Departed | None = None


class TablePipeline(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of a table, and how its rows ended of late: "acked" by the pacing task, or why they did not reach
    it."""

    stages: list[PipelineStage] = []
    ends: dict[str, int] = {}


class DoctorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Observe("doctor")`, typed."""

    now_s: float
    tables: dict[str, list[TaskDiagnosis]]
    pipelines: dict[str, TablePipeline] = {}
    channels: dict[str, list[str]] = {}
    waiting: list[Waiting]
    sessions: dict[str, SessionStats]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about a task, or (task "") about its table."""

    task: str
    text: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of every table: waits, silent sessions, then tasks without a wait. elsewhere: waiting requests that
    concern no table. channels: the state of each weight channel; requests that wait for a version or an update slot are
    in elsewhere."""

    tables: dict[str, list[Finding]]
    elsewhere: list[Finding]
    channels: dict[str, list[Finding]] = {}


def diagnose(answer: object) -> Diagnosis:
    """Find for each table what waits in it and why. answer: what the server said, or that parsed. `ProtocolError` if it
    has another form."""
    parsed = answer if isinstance(answer, DoctorAnswer) else parse("doctor", answer, DoctorAnswer)
    known = {name: _table(name, tasks, parsed) for name, tasks in parsed.tables.items()}
    others = [wait for wait in parsed.waiting if wait.table not in parsed.tables]
    channels = {name: [Finding(task="", text=text) for text in texts] for name, texts in parsed.channels.items()}
    return Diagnosis(tables=known, elsewhere=_waits(others), channels=channels)


def _table(name: str, tasks: list[TaskDiagnosis], answer: DoctorAnswer) -> list[Finding]:
    waits = _waits([wait for wait in answer.waiting if wait.table == name])
    explained = {finding.task for finding in waits if finding.task}
    rest = [Finding(task=task.task, text=task.text) for task in tasks if task.task not in explained]
    return [*waits, *_silent(name, answer.sessions.values()), *rest]


def _waits(waiting: list[Waiting]) -> list[Finding]:
    """One finding for all sessions with the same request and reason, in the order of the longest wait."""
    alike: dict[tuple[str, str, str], list[Waiting]] = {}
    for wait in sorted(waiting, key=lambda wait: -wait.waited_s):
        alike.setdefault((wait.request, wait.task, wait.why), []).append(wait)
    return [Finding(task=task, text=f"{why} ({_who_waits(same)})") for (_, task, why), same in alike.items()]


def _who_waits(same: list[Waiting]) -> str:
    names = list(dict.fromkeys(wait.label or f"session {wait.session}" for wait in same))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(names[:NAMES_SHOWN])}{more} {verb} waited {span(same[0].waited_s)}"


def _silent(table: str, sessions: Iterable[SessionStats]) -> list[Finding]:
    """Findings about silent sessions that hold rows of the table."""
    silent = []
    for session in sessions:
        leases = [lease for lease in session.leases if lease.table == table]
        if leases and session.silent_s >= SILENT_S:
            held = rows(sum(lease.rows for lease in leases))
            tasks = ", ".join(dict.fromkeys(lease.task for lease in leases))
            text = (
                f"{session.name} holds {held} for {tasks} in {plural(len(leases), 'lease')} and has been silent for "
                f"{span(session.silent_s)}"
            )
            silent.append(Finding(task="", text=text))
    return silent
