"""The troubles of the last hour, each with its begin and end. Does no I/O."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from transferqueue.observe.verdict import QueueVerdict

TROUBLES_MAX: Final = 50
"""Number of ended troubles that are kept, the newest."""


class Trouble(msgspec.Struct, frozen=True):
    """A verdict that someone must act on.

    Attributes:
        state: Kind of its cause.
        table: Its table, or "".
        task: Its task, or "".
        text: Its latest text.
        from_s: Time of the first sample with it, by the server's clock.
        until_s: Time of the first sample without it. None: it lasts.
    """

    state: str
    table: str
    task: str
    text: str
    from_s: float
    until_s: float | None = None

    def is_of(self, verdict: QueueVerdict) -> bool:
        """Whether `verdict` names the same trouble."""
        return (self.state, self.table, self.task) == (verdict.state, verdict.table, verdict.task)


class Troubles:
    """Keeps the present trouble and the ended ones."""

    def __init__(self) -> None:
        self._lasting: Trouble | None = None
        self._ended: deque[Trouble] = deque(maxlen=TROUBLES_MAX)

    @property
    def all(self) -> list[Trouble]:
        """Ended troubles, the oldest first, then the present one."""
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
