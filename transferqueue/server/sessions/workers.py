"""Who works on which task, and who did last: for people. Nothing that the queue does depends on it.

Rules:

1. A session works on a task from its first lease of it until it ends; whether it is at it now shows in its leases and waits.
2. Of each task the last session that ended is remembered: its label, when, and how, as far as that is known. What the kernel
   can tell only later (a process is gone before its status is there) is asked for when somebody looks.
3. The memory of open sessions is bounded by them; of ended ones, `GONE_MAX` tasks are remembered, the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from transferqueue.server.sessions.exit_status import Ending

GONE_MAX: Final = 256
"""Tasks of which the last worker is remembered; each may hold a descriptor of its process."""

Key = tuple[str, str]
"""Table and task."""


class Gone:
    """A worker that left."""

    __slots__ = ("at", "ending", "label")

    def __init__(self, label: str, at: float, ending: Ending) -> None:
        self.label, self.at, self.ending = label, at, ending


class Workers:
    """The workers of one node."""

    def __init__(self) -> None:
        self._tasks: dict[int, dict[Key, float]] = {}
        """Session -> task -> when it last asked for rows of it."""
        self._sessions: dict[Key, dict[int, None]] = {}
        self._gone: OrderedDict[Key, Gone] = OrderedDict()

    def asks(self, session: int, table: str, task: str, now: float) -> None:
        """A session asks for rows of a task, which exists."""
        key = (table, task)
        mine = self._tasks.get(session)
        if mine is None:
            mine = self._tasks[session] = {}
        if key not in mine:
            self._sessions.setdefault(key, {})[session] = None
        mine[key] = now

    def left(self, session: int, label: str, said: str, pidfd: int, now: float) -> None:
        """A session has ended. said, pidfd: as of `Ending`."""
        for key in self._tasks.pop(session, ()):
            others = self._sessions[key]
            del others[session]
            if not others:
                del self._sessions[key]
            self._forget(key)
            self._gone[key] = Gone(label, now, Ending(said, pidfd))
        while len(self._gone) > GONE_MAX:
            self._forget(next(iter(self._gone)))

    def dropped(self, table: str) -> None:
        """The table is no more: another one of its name has other workers."""
        for key in [key for key in self._gone if key[0] == table]:
            self._forget(key)
        for key in [key for key in self._sessions if key[0] == table]:
            for session in self._sessions.pop(key):
                del self._tasks[session][key]

    def last_to_ask(self, table: str, task: str) -> tuple[int, float] | None:
        """The open session that asked last for rows of the task, and when."""
        key = (table, task)
        return max(
            ((session, self._tasks[session][key]) for session in self._sessions.get(key, ())),
            key=lambda found: found[1],
            default=None,
        )

    def last_gone(self, table: str, task: str) -> Gone | None:
        """The worker of the task that left last."""
        return self._gone.get((table, task))

    def close(self) -> None:
        """Remember nobody."""
        for key in list(self._gone):
            self._forget(key)

    def _forget(self, key: Key) -> None:
        gone = self._gone.pop(key, None)
        if gone is not None:
            gone.ending.close()
