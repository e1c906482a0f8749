"""Explain why a running queue does not progress: sentences from the server's answer to `Observe("doctor")`.

A table is *stalled* when a request has waited in it for `patience_s`, when a session that holds rows of it has been silent for as
long, when the last leases of a task all failed, when rows have been ready for as long for a task whose last worker died, or when a task can never progress.
Other findings only describe the state. The server explains each request that waits; the ledger describes tasks without
a waiting request.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from transferqueue.observe.answers.sessions import SessionStats
from transferqueue.observe.answers.stats import TaskError, Waiting, parse
from transferqueue.observe.units import plural, rows, span

PATIENCE_S = 10.0
"""A pipeline whose stages keep pace waits for seconds at most. A person who asks has waited longer."""
NAMES_SHOWN = 4


class TaskDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's description of a task, or (task "") of its table. stranded: the task can never progress. unattended_s: for how long
    no worker has worked on it, though rows are ready (None: a worker does, or no rows are). died: its last worker died. errors: why its leases failed. failing: its recent leases all did."""

    task: str
    text: str
    stranded: bool = False
    unattended_s: float | None = None
    died: bool = False
    errors: list[TaskError] = []
    failing: bool = False


class DoctorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Observe("doctor")`, typed."""

    now_s: float
    tables: dict[str, list[TaskDiagnosis]]
    channels: dict[str, list[str]] = {}
    waiting: list[Waiting]
    sessions: dict[str, SessionStats]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about a task, or (task "") about its table."""

    task: str
    stalled: bool
    text: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of every table, stalled ones first. elsewhere: waiting requests that concern no table. channels: the state of each
    weight channel; requests that wait for a version or an update slot are in elsewhere."""

    tables: dict[str, list[Finding]]
    elsewhere: list[Finding]
    channels: dict[str, list[Finding]] = {}

    @property
    def stalled(self) -> list[str]:
        """The stalled tables, and "elsewhere" if another request is stalled."""
        names = [name for name, findings in self.tables.items() if any(finding.stalled for finding in findings)]
        return names + (["elsewhere"] if any(finding.stalled for finding in self.elsewhere) else [])


def diagnose(answer: object, *, patience_s: float = PATIENCE_S) -> Diagnosis:
    """Find for each table what waits in it and why. answer: what the server said, or that parsed. `ProtocolError` if it has another form."""
    parsed = answer if isinstance(answer, DoctorAnswer) else parse("doctor", answer, DoctorAnswer)
    known = {name: _table(name, tasks, parsed, patience_s) for name, tasks in parsed.tables.items()}
    others = [wait for wait in parsed.waiting if wait.table not in parsed.tables]
    channels = {
        name: [Finding(task="", stalled=False, text=text) for text in texts] for name, texts in parsed.channels.items()
    }
    return Diagnosis(tables=known, elsewhere=_waits(others, patience_s), channels=channels)


def _table(name: str, tasks: list[TaskDiagnosis], answer: DoctorAnswer, patience_s: float) -> list[Finding]:
    waits = _waits([wait for wait in answer.waiting if wait.table == name], patience_s)
    silent = _silent(name, answer.sessions.values(), patience_s)
    explained = {finding.task for finding in waits if finding.task}
    rest = [
        Finding(task=task.task, stalled=_stalls(task, patience_s), text=task.text)
        for task in tasks
        if task.failing or task.task not in explained
    ]
    return sorted([*waits, *silent, *rest], key=lambda finding: not finding.stalled)


def _stalls(task: TaskDiagnosis, patience_s: float) -> bool:
    return (
        task.stranded
        or task.failing
        or (task.died and task.unattended_s is not None and task.unattended_s >= patience_s)
    )


def _waits(waiting: list[Waiting], patience_s: float) -> list[Finding]:
    """One finding for all sessions with the same request and reason, in the order of the longest wait."""
    alike: dict[tuple[str, str, str], list[Waiting]] = {}
    for wait in sorted(waiting, key=lambda wait: -wait.waited_s):
        alike.setdefault((wait.request, wait.task, wait.why), []).append(wait)
    return [
        Finding(task=task, stalled=same[0].waited_s >= patience_s, text=f"{why} ({_who_waits(same)})")
        for (_, task, why), same in alike.items()
    ]


def _who_waits(same: list[Waiting]) -> str:
    names = list(dict.fromkeys(wait.label or f"session {wait.session}" for wait in same))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(names[:NAMES_SHOWN])}{more} {verb} waited {span(same[0].waited_s)}"


def _silent(table: str, sessions: Iterable[SessionStats], patience_s: float) -> list[Finding]:
    """Findings about silent sessions that hold rows of the table."""
    silent = []
    for session in sessions:
        leases = [lease for lease in session.leases if lease.table == table]
        if leases and session.silent_s >= patience_s:
            held = rows(sum(lease.rows for lease in leases))
            tasks = ", ".join(dict.fromkeys(lease.task for lease in leases))
            text = f"{session.name} holds {held} for {tasks} in {plural(len(leases), 'lease')} and has been silent for {span(session.silent_s)}"
            silent.append(Finding(task="", stalled=True, text=text))
    return silent
