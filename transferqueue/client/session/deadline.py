"""The deadline of an operation that may need several requests.

The server ends a wait itself, with an error that says what was missing. But a server that is stopped or out of reach ends nothing.
So the caller keeps the deadline too: after it, replies have `LATE_ANSWER_S` in all to arrive, whatever the server does. Time that
this process spends on its own work, such as copying columns, does not count as lateness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from transferqueue.errors import UsageError
from transferqueue.limits import LATE_ANSWER_S, SECONDS_MAX, short_number

LEAST_S: Final = 1e-3


def seconds(name: str, value: object) -> float:
    """A number of seconds that a request may wait or last: 0 to 10^9. `UsageError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}={value!r} is {type(value).__name__}; give a number of seconds (0: do not wait)")
    if not 0 <= value <= SECONDS_MAX:  # which is also false of what is not a number
        shown = short_number(value) if isinstance(value, int) else repr(value)
        raise UsageError(f"{name}={shown} is out of range; give 0 (do not wait) to {SECONDS_MAX:g} seconds")
    return float(value)


class Deadline:
    """`wait_s` seconds from now by `clock`. late_s: how long answers may be late, all together."""

    def __init__(self, clock: Callable[[], float], wait_s: float, late_s: float = LATE_ANSWER_S) -> None:
        self.wait_s: Final = wait_s
        self._clock = clock
        self._at = clock() + wait_s
        self._least = min(wait_s, LEAST_S)
        self._late_s = late_s

    def left(self) -> float:
        """Seconds left, for the next request. 0 only if the caller gave 0: the server answers 0 with `Full`, and a wait that has
        passed with `DeadlineExceeded`."""
        return max(self._least, self._at - self._clock())

    @property
    def over(self) -> bool:
        """Whether the time has passed."""
        return self._clock() >= self._at

    def patience(self) -> float:
        """Seconds for which the caller waits for the reply to a request that it sends now."""
        return max(0.0, self._at - self._clock()) + self._late_s

    def waited(self, since: float) -> None:
        """Count the wait for another process from `since` until now."""
        now = self._clock()
        if now > self._at:
            self._late_s = max(0.0, self._late_s - (now - max(since, self._at)))
