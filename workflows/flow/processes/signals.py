"""Signals wake a wait: Python handles them in the main thread alone, and the system may deliver them to any."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signal_pipe() -> Iterator[list[int]]:
    """Yield a descriptor that can be read once a signal has come, so that a wait for it lets Python handle the signal;
    none outside of the main thread.

    The descriptor does not block; the thread that wakes reads it empty.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    pipe, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield [pipe]
    finally:
        signal.set_wakeup_fd(before)
        os.close(pipe)
        os.close(write_end)
