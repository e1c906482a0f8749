"""Ends this process when a call of somebody else's code does not return: Python cannot stop a thread.

The code runs in the main thread, where its own signals work. Another thread waits for the limit; it writes what hangs and where, and exits.
Code that holds the interpreter's lock stops that thread too, so a timer of C follows a little later.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from transferqueue.workflows.flow.stage_process import EXIT_FINAL

LATER_S: Final = 2.0
"""How much later the timer of C ends the process: its traceback names the code, but no row."""


@contextmanager
def ended_process_after(limit_s: float, described: Callable[[], str]) -> Iterator[None]:
    """End the process with `EXIT_FINAL` if the block takes longer than `limit_s`, and write `described()` to stderr.

    Not to be nested: there is one timer of C in a process.
    """
    timer = threading.Timer(limit_s, _end, [described])
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(limit_s + LATER_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _end(described: Callable[[], str]) -> None:
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
    sys.stderr.write(f"{described()}\n")
    sys.stderr.flush()
    os._exit(EXIT_FINAL)
