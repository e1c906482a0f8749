"""The time that a caller gave an operation of several requests: what the server is told of it, and when the caller stops waiting.

The server ends a wait itself, with an error that says what was missing. But a server that is stopped, or out of reach, ends
nothing. So the deadline belongs to the caller: past it an answer has `LATE_ANSWER_S` in all to arrive, whatever the server does.
Time that this process takes for its own work, such as copying columns, is not waiting, and counts for neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from transferqueue.limits import LATE_ANSWER_S

LEAST_S: Final = 1e-3


class Deadline:
    """`wait_s` seconds from now by `clock`. late_s: how long answers may be late, all together."""

    def __init__(self, clock: Callable[[], float], wait_s: float, late_s: float = LATE_ANSWER_S) -> None:
        self.wait_s: Final = wait_s
        self._clock = clock
        self._at = clock() + wait_s
        self._least = min(wait_s, LEAST_S)
        self._late_s = late_s

    def left(self) -> float:
        """Seconds until then. 0 only for a caller who would not wait: one who did is told that its time has passed
        (`DeadlineExceeded`), not that it asked for none (`Full`)."""
        return max(self._least, self._at - self._clock())

    @property
    def over(self) -> bool:
        """Whether the time has passed."""
        return self._clock() >= self._at

    def patience(self) -> float:
        """Seconds for which the caller waits for what it asks of another process now."""
        return max(0.0, self._at - self._clock()) + self._late_s

    def waited(self, since: float) -> None:
        """The caller has waited from `since` until now for another process."""
        self._late_s = max(0.0, self._late_s - max(0.0, self._clock() - max(since, self._at)))
