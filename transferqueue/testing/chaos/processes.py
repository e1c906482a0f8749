"""The processes of a run: forked, watched, stopped, and replaced when they die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from transferqueue.testing.chaos.process_context import fork


class ManagedProcess:
    """One process. role: its slot. pidfd: readable once it has ended."""

    def __init__(self, role: str, work: Callable[[], object], log: Path) -> None:
        self.role: Final = role
        self.pid: Final = fork(work, log)
        self.pidfd: Final = os.pidfd_open(self.pid)
        self._lives = True

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing if it has ended."""
        if not self._lives:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ended(self) -> int:
        """After its end, which is waited for: its exit code, or minus the signal that killed it."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self._lives = False
        return os.waitstatus_to_exitcode(status)


class Pipe:
    """Lines to or from a member: `here` is the end of this process, `there` that of the member."""

    def __init__(self, *, to_member: bool) -> None:
        reading, writing = os.pipe()
        self.here, self.there = (writing, reading) if to_member else (reading, writing)

    def say(self, line: bytes) -> None:
        """Send a line; nothing if nobody reads any more."""
        with suppress(BrokenPipeError):
            os.write(self.here, line + b"\n")

    def close(self) -> None:
        """Close both ends."""
        os.close(self.here)
        os.close(self.there)
