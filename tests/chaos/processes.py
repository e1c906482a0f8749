"""The processes of a run: forked, watched, stopped, and replaced when they die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.chaos.process_context import fork


class ManagedProcess:
    """One child process. role: its place in the run, such as ``reward-1``. pidfd: readable once the process has
    ended."""

    def __init__(self, role: str, work: Callable[[], object], log: Path) -> None:
        self.role: Final = role
        self.pid: Final = fork(work, log)
        self.pidfd: Final = os.pidfd_open(self.pid)
        self._lives = True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended."""
        if not self._lives:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self) -> int:
        """Wait for the end of the process. Its exit code, or minus the signal that killed it."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self._lives = False
        return os.waitstatus_to_exitcode(status)


class Pipe:
    """A pipe for lines to or from a child. parent_end, child_end: the descriptor that each of them uses."""

    def __init__(self, *, to_child: bool) -> None:
        reading, writing = os.pipe()
        self.parent_end, self.child_end = (writing, reading) if to_child else (reading, writing)

    def send(self, line: bytes) -> None:
        """Send a line; does nothing if the child has closed its end."""
        with suppress(BrokenPipeError):
            os.write(self.parent_end, line + b"\n")

    def close(self) -> None:
        """Close both ends."""
        os.close(self.parent_end)
        os.close(self.child_end)
