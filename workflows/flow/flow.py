"""The supervisor of a flow: starts a process for each job, receives their events, and ends all of them.

Rules:

1. Processes share only the queue. Each is a process group of its own: Ctrl-C in the terminal reaches
   the supervisor alone, and a signal to one process also reaches its children.
2. A thread supervises them from entering the flow until leaving it, whatever the program does meanwhile. The kernel wakes the
   thread when a process sends an event or exits; nothing is polled.
3. A flow ends when all processes have exited with success. A process that dies is started again, at most `restarts_max` times;
   its rows have gone to other workers by then. After the last restart, or when the process reports that a restart is
   useless, the flow fails with
   `StageFailed`, which shows the process's last output, and the other processes are ended.
4. A failed flow ends every wait for it. `run` raises its error, and so does each put, lease or other call
   of the flow's queue that waits, in any thread, or that would have to wait before the flow is left. Leaving a failed flow without an error
   raises it too, unless `run` did.
5. Rows that were tried too often (dropped, reason ``attempts``) fail the flow, with the last failure's traceback.
6. Leaving the flow, for any reason, ends all processes: with SIGTERM first, then SIGKILL. If the supervisor
   itself is killed, their lifelines close and they exit.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

import transferqueue as tq
from transferqueue.errors import PeerError, TransferQueueError
from transferqueue.workflows.flow.audit import audit
from transferqueue.workflows.flow.events import Event, Failure, Receiver
from transferqueue.workflows.flow.stage_process import EXIT_FINAL, StageJob

RESTARTS_MAX: Final = 2
"""Restarts of a process. One that was killed from outside deserves another try; one that dies three times is broken."""
_SIGNALS_S: Final = 0.5
"""Longest time between two looks for signals. The system may deliver Ctrl-C to any thread, and Python handles it in the main thread, once that wakes."""
_FAREWELL_S: Final = 1.0
"""Seconds between SIGTERM and SIGKILL."""
_PIPE_BYTES: Final = 1 << 16
_LAST_WORDS_BYTES: Final = 4000

Observe = Callable[[str, Event], None]
"""Called for each event, with the label of its process, by the supervising thread. If it raises, the flow fails with that error."""


class StageFailed(PeerError):
    """A stage cannot work. stage: its label. last_words: its traceback, or the end of its output."""

    def __init__(self, text: str, *, stage: str = "", last_words: str = "") -> None:
        super().__init__(text)
        self.stage = stage
        self.last_words = last_words


class _Child:
    """One running process: its pipes, and its last events."""

    def __init__(self, job: StageJob, address: str, log: Path, restarts: int, environment: Mapping[str, str]) -> None:
        self.job = job
        self.log = log
        self.restarts = restarts
        self.failure: Failure | None = None
        self.receiver = Receiver()
        self.events, write_end = os.pipe()
        try:
            with log.open("ab") as written:
                self.log_start = written.tell()
                self.process = subprocess.Popen(
                    _command(job, address, write_end),
                    stdin=subprocess.PIPE,
                    stdout=written,
                    stderr=written,
                    pass_fds=(write_end,),
                    process_group=0,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
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

    def wait_until(self, deadline: float) -> None:
        """Wait for the process to exit, at most until `deadline` (monotonic)."""
        select.select([self.death], [], [], max(0.0, deadline - time.monotonic()))

    def end(self) -> int:
        """Kill what is left of the group, and return the exit code of the process."""
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

    def close(self) -> None:
        """Close the supervisor's ends of its pipes. Call it only after the process was waited for."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self.events)
        os.close(self.death)


class Flow:
    """Runs `jobs`, each in a process, against `queue`. A context manager: leaving it ends all processes.

    directory: gets one log file a process (its stdout and stderr). queue: must accept other processes at
    its address, and stays open. environment: variables of the processes, beside those of this one. When a stage cannot work, calls of `queue` that wait raise `StageFailed` (rule 4).
    """

    def __init__(
        self,
        queue: tq.Queue,
        jobs: Sequence[StageJob],
        *,
        directory: Path,
        observe: Observe,
        restarts_max: int = RESTARTS_MAX,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._queue = queue
        self._jobs = jobs
        self._directory = directory
        self._observe = observe
        self._restarts_max = restarts_max
        self._environment = dict(environment or {})
        self._children: dict[str, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._stop = -1
        self._left = True
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._supervise, name="flow", daemon=True)

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._stop, self._left = os.eventfd(0, os.EFD_CLOEXEC), False
        self._selector.register(self._stop, selectors.EVENT_READ)
        try:
            for job in self._jobs:
                self._start(job, restarts=0)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self._tell()

    def pids(self) -> dict[str, int]:
        """Process id of each running process, by label."""
        return {label: child.process.pid for label, child in list(self._children.items())}

    def run(self) -> None:
        """Wait until every process has exited with success; raise `StageFailed` when one cannot work."""
        while not self._ended.wait(_SIGNALS_S):
            pass
        self._tell()

    def close(self) -> None:
        """End all processes and wait until they have exited, about a second at most. A second call does nothing."""
        if self._left:
            return
        self._left = True
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._end_all()
        self._queue.allow_waits()
        self._selector.close()
        os.close(self._stop)

    def _tell(self) -> None:
        if self._failure is not None and not self._is_told:
            self._is_told = True
            raise self._failure

    # ------------------------------------------------------------ the supervising thread

    def _supervise(self) -> None:
        try:
            while self._children and not self._left:
                self._turn()
        except BaseException as error:  # noqa: BLE001  (`run`, or leaving the flow, raises it)
            self._failure = error
            self._queue.end_waits(_why_no_waits(error))
            self._end_all()
        finally:
            self._ended.set()

    def _turn(self) -> None:
        for key, _ in self._selector.select():
            if key.data is None:
                return  # the flow is left
            child, act = key.data
            # What was ready together with the death of its process was read then.
            if self._children.get(child.job.label) is child:
                act(child)

    def _end_all(self) -> None:
        children = list(self._children.values())
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _FAREWELL_S
        for child in children:
            child.wait_until(deadline)
            child.end()
            self._forget(child)

    def _start(self, job: StageJob, restarts: int) -> None:
        child = _Child(job, self._queue.address, self._directory / f"{job.label}.log", restarts, self._environment)
        self._children[job.label] = child
        self._selector.register(child.events, selectors.EVENT_READ, (child, self._read))
        self._selector.register(child.death, selectors.EVENT_READ, (child, self._died))

    def _forget(self, child: _Child) -> None:
        for descriptor in (child.events, child.death):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        child.close()
        self._children.pop(child.job.label, None)

    def _read(self, child: _Child) -> None:
        received = os.read(child.events, _PIPE_BYTES)
        if not received:
            self._selector.unregister(child.events)
        for event in child.receiver.feed(received):
            self._observe(child.job.label, event)
            if isinstance(event, Failure):
                child.failure = event
                self._check_attempts(child)

    def _died(self, child: _Child) -> None:
        """Read the rest of its events, then start it again, fail the flow, or count it as finished."""
        code = child.end()
        os.set_blocking(child.events, False)
        try:
            while child.events in self._selector.get_map():
                self._read(child)
        except BlockingIOError:
            pass  # someone else still holds the pipe: all that was told has been read
        last_words = "" if code == 0 else child.last_words()
        self._forget(child)
        if code == 0:
            return
        if code == EXIT_FINAL or child.restarts >= self._restarts_max:
            raise _failed(child, code, last_words)
        self._start(child.job, child.restarts + 1)

    def _check_attempts(self, child: _Child) -> None:
        dropped = audit(self._queue.table(child.job.table)).dropped.get("attempts", 0)
        if dropped:
            raise StageFailed(
                f'stage "{child.job.label}": {dropped} rows were dropped after as many failed attempts as a row may have; '
                f"the last failure was {_last_line(child.last_words())}",
                stage=child.job.label,
                last_words=child.last_words(),
            )


def _command(job: StageJob, address: str, events: int) -> list[str]:
    module = "transferqueue.workflows.flow.stage_process"
    text = msgspec.json.encode(job).decode()
    return [sys.executable, "-m", module, "--address", address, "--events", str(events), "--job", text]


def _failed(child: _Child, code: int, last_words: str) -> StageFailed:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    again = f", after {child.restarts} restarts" if child.restarts else ""
    return StageFailed(
        f'stage "{child.job.label}" {how}{again}; its last words were {_last_line(last_words)}; see {child.log}',
        stage=child.job.label,
        last_words=last_words,
    )


def _why_no_waits(error: BaseException) -> TransferQueueError:
    """Return the error for calls that would wait for stages which the flow no longer runs."""
    if isinstance(error, TransferQueueError):
        return error
    return StageFailed(f"the flow has ended its stages, because its supervisor failed: {type(error).__name__}: {error}")


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2] or "none"
