"""The log of a loop that waits for rows in short pieces, since it may be asked to stop: why it waits, once a minute."""

from __future__ import annotations

import logging
import time
from typing import Final

from transferqueue.errors import DeadlineExceeded
from transferqueue.limits import WAIT_TOLD_S

_log: Final = logging.getLogger("transferqueue.flow")


class WaitNotice:
    """One wait of the stage `name`, from now on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since = self._told_at = time.monotonic()

    def waits_on(self, why: DeadlineExceeded) -> None:
        """A piece of the wait ended without rows. Log `why` if the last line is a minute old."""
        now = time.monotonic()
        if now >= self._told_at + WAIT_TOLD_S:
            self._told_at = now
            _log.warning('stage "%s" has waited for %.0f s: %s', self._name, now - self._since, why)
