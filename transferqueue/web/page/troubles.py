"""The troubles of the last hour: for how long each verdict that someone had to act on lasted. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from transferqueue.observe.verdict import QueueVerdict

TROUBLES_MAX: Final = 50
"""Ended troubles that are kept: the newest."""


class Trouble(msgspec.Struct, frozen=True):
    """A verdict that lasted. text: as it was when last seen. from_s, until_s: when it was first seen, and first no
    longer seen (None: it lasts), by the server's clock."""

    state: str
    table: str
    task: str
    text: str
    from_s: float
    until_s: float | None = None

    def is_of(self, verdict: QueueVerdict) -> bool:
        """Whether `verdict` is still about this."""
        return (self.state, self.table, self.task) == (verdict.state, verdict.table, verdict.task)


class Troubles:
    """Keeps the trouble that there is, and those that ended."""

    def __init__(self) -> None:
        self._lasting: Trouble | None = None
        self._ended: deque[Trouble] = deque(maxlen=TROUBLES_MAX)

    @property
    def all(self) -> list[Trouble]:
        """Ended ones, the oldest first, then the one that lasts."""
        return [*self._ended, *([self._lasting] if self._lasting else [])]

    def see(self, now_s: float, verdict: QueueVerdict) -> None:
        """Note the verdict at `now_s`."""
        if any(trouble.from_s > now_s for trouble in self.all):  # another server, whose clock began anew
            self._lasting = None
            self._ended.clear()
        before = self._lasting
        same = before is not None and verdict.trouble and before.is_of(verdict)
        if before is not None and not same:
            self._ended.append(msgspec.structs.replace(before, until_s=now_s))
        from_s = before.from_s if before is not None and same else now_s
        lasting = Trouble(verdict.state, verdict.table, verdict.task, verdict.text, from_s)
        self._lasting = lasting if verdict.trouble else None

    def forget(self, before_s: float) -> None:
        """Forget troubles that ended before `before_s`."""
        while self._ended and (self._ended[0].until_s or 0.0) < before_s:
            self._ended.popleft()
