"""What is left of the time that a caller gave an operation of several requests."""

from __future__ import annotations

from collections.abc import Callable


class Deadline:
    """`wait_s` seconds from now by `clock`."""

    def __init__(self, clock: Callable[[], float], wait_s: float) -> None:
        self._clock = clock
        self._at = clock() + wait_s

    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._at - self._clock())
