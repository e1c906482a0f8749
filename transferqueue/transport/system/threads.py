"""Waiting for threads of this process to end."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Final

STOP_S: Final = 90.0
"""A thread that must end waits for others at most a minute (for a snapshot that is given up), so after this time there
is a defect."""


def still_runs(thread: threading.Thread, wait_s: float = STOP_S) -> str:
    """Wait at most `wait_s` until a thread has ended. Returns its stack if it has not, else "". A thread that was never
    started has ended."""
    if thread.ident is None:
        return ""
    thread.join(wait_s)
    frame = sys._current_frames().get(thread.ident) if thread.is_alive() else None
    if frame is None:
        return ""
    return " < ".join(f"{at.filename}:{at.lineno} in {at.name}" for at in reversed(traceback.extract_stack(frame, 8)))


_kept_for_good: Final[list[object]] = []


def keep_for_good(*things: object) -> None:
    """Never free these: memory that a transfer under way may still write, and the objects that the transfer needs."""
    _kept_for_good.extend(things)
