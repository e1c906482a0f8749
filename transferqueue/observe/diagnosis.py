"""The waits of a running queue and their reasons: sentences from the server's answer to `Observe("doctor")`.

The server explains each waiting request; the ledger describes tasks without one. `verdict` finds the trouble in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from transferqueue.limits import HEARTBEAT_S
from transferqueue.observe.units import plural, rows, span
from transferqueue.wire.answers.doctor import DoctorAnswer, TaskDiagnosis
from transferqueue.wire.answers.sessions import SessionStats
from transferqueue.wire.answers.stats import Waiting

NAMES_SHOWN = 4
SILENT_S: Final = 2 * HEARTBEAT_S
"""A live client sends something every `HEARTBEAT_S`; one late message is not reported."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about a task, or (task "") about its table."""

    task: str
    text: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a queue.

    Attributes:
        tables: By table: waits, silent sessions, then tasks without a wait.
        elsewhere: Waiting requests of no table, those for a version or an update slot included.
        channels: The state of each weight channel.
    """

    tables: dict[str, list[Finding]]
    elsewhere: list[Finding]
    channels: dict[str, list[Finding]] = {}


def diagnose(answer: DoctorAnswer) -> Diagnosis:
    """Collect the findings of each table and channel."""
    known = {name: _table(name, tasks, answer) for name, tasks in answer.tables.items()}
    others = [wait for wait in answer.waiting if wait.table not in answer.tables]
    channels = {name: [Finding(task="", text=text) for text in texts] for name, texts in answer.channels.items()}
    return Diagnosis(tables=known, elsewhere=_waits(others), channels=channels)


def _table(name: str, tasks: list[TaskDiagnosis], answer: DoctorAnswer) -> list[Finding]:
    waits = _waits([wait for wait in answer.waiting if wait.table == name])
    explained = {finding.task for finding in waits if finding.task}
    rest = [Finding(task=task.task, text=task.text) for task in tasks if task.task not in explained]
    return [*waits, *_silent(name, answer.sessions.values()), *rest]


def _waits(waiting: list[Waiting]) -> list[Finding]:
    """One finding for all sessions with the same request and reason, the longest wait first."""
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
