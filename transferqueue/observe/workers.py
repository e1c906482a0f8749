"""Who works on a queue: each session with what it holds and what it waits for, from the server's answer to `Observe("doctor")`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from transferqueue.observe.answers.sessions import SessionStats
from transferqueue.observe.answers.stats import Waiting
from transferqueue.observe.diagnosis import DoctorAnswer
from transferqueue.observe.units import rows


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One session. holds: rows by task, such as "rollouts: 32 rows for train". waits: what it waits for, in the server's words, the
    longest wait first. waited_s: the longest; None: it waits for nothing."""

    name: str
    host: str
    pid: int
    silent_s: float
    holds: list[str]
    waits: list[str]
    waited_s: float | None


def workers(answer: DoctorAnswer) -> list[Worker]:
    """All sessions that hold or wait, those that have waited longest first, then the others by name."""
    waiting: defaultdict[int, list[Waiting]] = defaultdict(list)
    for wait in answer.waiting:
        waiting[wait.session].append(wait)
    found = [_worker(session, waiting[session.session]) for session in answer.sessions.values()]
    return sorted(
        (worker for worker in found if worker.holds or worker.waits),
        key=lambda worker: (-(worker.waited_s or 0.0), worker.name),
    )


def _worker(session: SessionStats, waiting: Iterable[Waiting]) -> Worker:
    longest_first = sorted(waiting, key=lambda wait: -wait.waited_s)
    return Worker(
        name=session.name,
        host=session.host,
        pid=session.pid,
        silent_s=session.silent_s,
        holds=_holds(session),
        waits=[wait.why for wait in longest_first],
        waited_s=longest_first[0].waited_s if longest_first else None,
    )


def _holds(session: SessionStats) -> list[str]:
    held: defaultdict[tuple[str, str], int] = defaultdict(int)
    for lease in session.leases:
        held[lease.table, lease.task] += lease.rows
    leased = [f"{table}: {rows(count)} for {task}" for (table, task), count in held.items()]
    return leased + ([f"{rows(session.reserved)} reserved"] if session.reserved else [])
