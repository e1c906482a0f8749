"""Which sessions work on which task, and which one left last. For reports only: nothing that the queue does depends on it.

1. A session works on a task from its first lease of it until it ends. Its leases and waiting requests show whether it is busy.
2. For each task the last session that ended is remembered: its label, when, and how it ended. The exit status of a process may
   be known only later than its end, so it is looked up when a report needs it.
3. Open sessions bound the memory that this takes; of ended ones, the latest `GONE_MAX` tasks are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from transferqueue.server.sessions.exit_status import SessionEnding

GONE_MAX: Final = 256
"""Tasks for which the last worker is remembered. Each may hold a descriptor of its process."""

Key = tuple[str, str]
"""Table and task."""


class DepartedWorker:
    """A worker whose session ended."""

    __slots__ = ("at", "ending", "label")

    def __init__(self, label: str, at: float, ending: SessionEnding) -> None:
        self.label, self.at, self.ending = label, at, ending


class Workers:
    """The workers of one coordinator."""

    def __init__(self) -> None:
        self._tasks: dict[int, dict[Key, float]] = {}
        """Session -> task -> when the session last asked for rows of the task."""
        self._sessions: dict[Key, dict[int, None]] = {}
        self._gone: OrderedDict[Key, DepartedWorker] = OrderedDict()

    def record_request(self, session: int, table: str, task: str, now: float) -> None:
        """Record that a session asks for rows of an existing task."""
        key = (table, task)
        mine = self._tasks.get(session)
        if mine is None:
            mine = self._tasks[session] = {}
        if key not in mine:
            self._sessions.setdefault(key, {})[session] = None
        mine[key] = now

    def record_end(self, session: int, label: str, reason: str, pidfd: int, now: float) -> None:
        """Record that a session ended. reason, pidfd: as in `SessionEnding`."""
        for key in self._tasks.pop(session, ()):
            others = self._sessions[key]
            del others[session]
            if not others:
                del self._sessions[key]
            self._forget(key)
            self._gone[key] = DepartedWorker(label, now, SessionEnding(reason, pidfd))
        while len(self._gone) > GONE_MAX:
            self._forget(next(iter(self._gone)))

    def forget_table(self, table: str) -> None:
        """Forget the workers of a dropped table, since another table may get its name."""
        for key in [key for key in self._gone if key[0] == table]:
            self._forget(key)
        for key in [key for key in self._sessions if key[0] == table]:
            for session in self._sessions.pop(key):
                del self._tasks[session][key]

    def last_to_ask(self, table: str, task: str) -> tuple[int, float] | None:
        """The open session that asked last for rows of the task, and when; None if there is none."""
        key = (table, task)
        return max(
            ((session, self._tasks[session][key]) for session in self._sessions.get(key, ())),
            key=lambda asked: asked[1],
            default=None,
        )

    def last_gone(self, table: str, task: str) -> DepartedWorker | None:
        """The worker of the task whose session ended last; None if there is none."""
        return self._gone.get((table, task))

    def close(self) -> None:
        """Forget all workers, and close their descriptors."""
        for key in list(self._gone):
            self._forget(key)

    def _forget(self, key: Key) -> None:
        gone = self._gone.pop(key, None)
        if gone is not None:
            gone.ending.close()
