"""One process of a flow, as its supervisor sees it: its pipes, its last events, and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.workflows.flow.draining import Removal
from transferqueue.workflows.flow.events import Failure, Receiver
from transferqueue.workflows.flow.processes.first_exception import first_exception
from transferqueue.workflows.flow.processes.stage_process import StageJob

_LAST_WORDS_BYTES: Final = 4000
_OUTPUT_BYTES: Final = 4 << 20
"""Output in which the cause of a death is looked for."""


class ChildProcess:
    """One running process: its pipes, and its last events."""

    def __init__(self, job: StageJob, address: str, log: Path, restarts: int, environment: Mapping[str, str]) -> None:
        self.job = job
        self.log = log
        self.restarts = restarts
        self.cause_before = ""
        """The cause of its last death, if it has not worked since."""
        self.failure: Failure | None = None
        self.removal: Removal | None = None
        self.receiver = Receiver()
        self.events, write_end = os.pipe()
        try:
            with log.open("ab") as written:
                self.log_start = self._log_size = written.tell()
                self.process = subprocess.Popen(
                    _command(job, address, write_end),
                    stdin=subprocess.PIPE,
                    stdout=written,
                    stderr=written,
                    pass_fds=(write_end,),
                    process_group=0,
                    env=os.environ | {"PYTHONUNBUFFERED": "1", **environment},
                )
        except BaseException:
            os.close(self.events)
            raise
        finally:
            os.close(write_end)
        self.death = os.pidfd_open(self.process.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # the whole group has gone

    def ask_to_drain(self) -> None:
        """Send the request over the lifeline."""
        if self.process.stdin is not None:
            try:
                os.write(self.process.stdin.fileno(), b"d")  # unbuffered: closing the pipe must not write again
            except BrokenPipeError:
                return  # it has ended

    def hang_up(self) -> None:
        """Close the lifeline: the process exits at once, without draining."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait_until(self, deadline: float) -> None:
        """Wait for the process to exit, at most until `deadline` (monotonic)."""
        select.select([self.death], [], [], max(0.0, deadline - time.monotonic()))

    def end(self) -> int:
        """Kill the rest of the process group, and return the exit code of the process."""
        # Before wait(): until then the dead leader keeps the number of the group from being used by others.
        self.signal(signal.SIGKILL)
        return self.process.wait()

    def last_words(self) -> str:
        """The traceback of its last failure, or the end of its output."""
        if self.failure is not None:
            return self.failure.text
        with self.log.open("rb") as written:
            written.seek(max(self.log_start, self.log.stat().st_size - _LAST_WORDS_BYTES))
            return written.read().decode(errors="replace").strip()

    def worked(self) -> None:
        """It has done some work: failures and output before its last work are not the cause of a death to come."""
        # Twice: its output and its events come on two ways, and the cause may be in the output already.
        self.failure, self.log_start, self._log_size = None, self._log_size, self.log.stat().st_size

    def cause(self) -> str:
        """The line that names its first exception since it last worked; "" if it wrote none."""
        with self.log.open("rb") as written:
            written.seek(self.log_start)
            output = written.read(_OUTPUT_BYTES).decode(errors="replace")
        return first_exception(output) or first_exception(self.failure.text if self.failure else "")

    def close(self) -> None:
        """Close the supervisor's ends of its pipes. Call it only after the process was waited for."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self.events)
        os.close(self.death)


def _command(job: StageJob, address: str, events: int) -> list[str]:
    module = "transferqueue.workflows.flow.processes.stage_process"
    text = msgspec.json.encode(job).decode()
    return [sys.executable, "-m", module, "--address", address, "--events", str(events), "--job", text]
