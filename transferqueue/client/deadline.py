"""What is left of the time that a caller gave an operation of several requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LEAST_S: Final = 1e-3


class Deadline:
    """`wait_s` seconds from now by `clock`."""

    def __init__(self, clock: Callable[[], float], wait_s: float) -> None:
        self._clock = clock
        self._at = clock() + wait_s
        self._least = min(wait_s, LEAST_S)

    def left(self) -> float:
        """Seconds until then. 0 only for a caller who would not wait: one who did is told that its time has passed
        (`DeadlineExceeded`), not that it asked for none (`Full`)."""
        return max(self._least, self._at - self._clock())
