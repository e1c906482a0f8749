"""How often a row is tried whose reward function or environment fails."""

from __future__ import annotations

import time
from typing import Final

TRIES_MAX: Final = 5
"""What failed five times, each time with other words, will fail the sixth time."""
PAUSE_S: Final = 1.0
"""Seconds before the second try; each further pause is twice as long."""


class Tries:
    """The tries of one row. It is tried again after a pause, up to `TRIES_MAX` times, unless it failed twice in a row
    with the same words, and what failed cannot pass."""

    def __init__(self) -> None:
        self.count = 0
        self._words = ""

    def failed(self, words: str, *, may_pass: bool = False) -> bool:
        """A try failed with these words. Returns whether another one is due; `pause` comes before it."""
        before, self._words = self._words, words
        self.count += 1
        return (may_pass or words != before) and self.count < TRIES_MAX

    def pause(self) -> None:
        """Wait before the next try."""
        time.sleep(PAUSE_S * 2.0 ** (self.count - 1))
