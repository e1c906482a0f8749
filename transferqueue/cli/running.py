"""What the commands that run a flow share: signals end it in order, and a stage that failed has its last words."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from transferqueue.cli.screens.terminal import console


@contextmanager
def ended_like_ctrl_c(number: signal.Signals) -> Iterator[None]:
    """Let signal ``number`` end the run as Ctrl-C does, with everything cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def last_words_shown() -> Iterator[None]:
    """Print the traceback of a stage that failed, before the one line that names it."""
    from transferqueue.workflows.flow.flow import StageFailed

    try:
        yield
    except StageFailed as error:
        if error.last_words:
            console(stderr=True).print(error.last_words, soft_wrap=True)
        raise
