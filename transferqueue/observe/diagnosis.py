"""Why a running queue does not move: sentences, from what the server answered to `Observe("doctor")`.

A table is *stalled* when somebody has waited in it for `patience_s`, when a session that holds rows of it has said nothing for as
long, when rows have been ready for as long for a task whose last worker left without a goodbye, or when a task can never progress.
Anything else it says is how things stand. A request that waits is explained by
the server in its own words; a task for which nobody waits is told of in the ledger's.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from transferqueue.observe.answers.sessions import SessionStats
from transferqueue.observe.answers.stats import Waiting, parse
from transferqueue.observe.units import plural, rows, span

PATIENCE_S = 10.0
"""A pipeline whose stages keep pace waits for seconds at most; a person who asks has waited longer."""
NAMES_TOLD = 4


class TaskDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger says of a task, or (task "") of its table. stranded: the task can never progress. unattended_s: for how long
    nobody has worked on it, though rows are ready (None: somebody does, or none are). died: who did last said no goodbye."""

    task: str
    text: str
    stranded: bool = False
    unattended_s: float | None = None
    died: bool = False


class DoctorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `doctor`, as it came."""

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
    """What every table has to say, the stalled parts first. elsewhere: requests that concern no table. channels: how each
    weight channel stands; who waits for a version or a turn of it is elsewhere."""

    tables: dict[str, list[Finding]]
    elsewhere: list[Finding]
    channels: dict[str, list[Finding]] = {}

    @property
    def stalled(self) -> list[str]:
        """Tables that are stalled, and "memory" or a channel's wait as "elsewhere"."""
        names = [name for name, findings in self.tables.items() if any(finding.stalled for finding in findings)]
        return names + (["elsewhere"] if any(finding.stalled for finding in self.elsewhere) else [])


def diagnose(answer: object, *, patience_s: float = PATIENCE_S) -> Diagnosis:
    """Say of each table what waits in it and why; `ProtocolError` if `answer` is not one."""
    found = parse("doctor", answer, DoctorAnswer)
    known = {name: _table(name, told, found, patience_s) for name, told in found.tables.items()}
    others = [wait for wait in found.waiting if wait.table not in found.tables]
    channels = {
        name: [Finding(task="", stalled=False, text=text) for text in told] for name, told in found.channels.items()
    }
    return Diagnosis(tables=known, elsewhere=_waits(others, patience_s), channels=channels)


def _table(name: str, told: list[TaskDiagnosis], found: DoctorAnswer, patience_s: float) -> list[Finding]:
    waits = _waits([wait for wait in found.waiting if wait.table == name], patience_s)
    silent = _silent(name, found.sessions.values(), patience_s)
    explained = {finding.task for finding in waits if finding.task}
    rest = [
        Finding(task=one.task, stalled=_stalls(one, patience_s), text=one.text)
        for one in told
        if one.task not in explained
    ]
    return sorted([*waits, *silent, *rest], key=lambda finding: not finding.stalled)


def _stalls(one: TaskDiagnosis, patience_s: float) -> bool:
    return one.stranded or (one.died and one.unattended_s is not None and one.unattended_s >= patience_s)


def _waits(waiting: list[Waiting], patience_s: float) -> list[Finding]:
    """One finding for all that wait for the same with the same reason, by who has waited longest."""
    alike: dict[tuple[str, str, str], list[Waiting]] = {}
    for wait in sorted(waiting, key=lambda one: -one.waited_s):
        alike.setdefault((wait.request, wait.task, wait.why), []).append(wait)
    return [
        Finding(task=task, stalled=same[0].waited_s >= patience_s, text=f"{why} ({_who_waits(same)})")
        for (_, task, why), same in alike.items()
    ]


def _who_waits(same: list[Waiting]) -> str:
    names = list(dict.fromkeys(wait.label or f"session {wait.session}" for wait in same))
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(names[:NAMES_TOLD])}{more} {verb} waited {span(same[0].waited_s)}"


def _silent(table: str, sessions: Iterable[SessionStats], patience_s: float) -> list[Finding]:
    """Sessions that hold rows of the table and say nothing."""
    found = []
    for one in sessions:
        leases = [lease for lease in one.leases if lease.table == table]
        if leases and one.silent_s >= patience_s:
            held = rows(sum(lease.rows for lease in leases))
            tasks = ", ".join(dict.fromkeys(lease.task for lease in leases))
            text = f"{one.name} holds {held} for {tasks} in {plural(len(leases), 'lease')} and has been silent for {span(one.silent_s)}"
            found.append(Finding(task="", stalled=True, text=text))
    return found
