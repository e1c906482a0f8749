"""The supervisor of a flow: starts a process for each job, receives their events, and ends all of them.

1. Processes share only the queue. Each is a process group of its own: Ctrl-C in the terminal reaches
   the supervisor alone, and a signal to one process also reaches its children.
2. A thread supervises them from entering the flow until leaving it, whatever the program does meanwhile. The kernel
   wakes the thread when a process sends an event or exits; nothing is polled.
3. A flow ends when all processes have exited with success. A process that dies is started again; its rows have gone to
   other workers by then, and the event `RESTART` says why it died. When it has died `restarts_max` times more without
   work in between, or twice of the same exception, or when it reports that a restart is useless, the flow fails with
   `StageFailed`, which shows the process's last output, and the other processes are ended. A kill while the process
   waits for a batch does not count. `Unreachable` and its kin, as while a server is started again, never count as the
   same exception.
4. A failed flow ends every wait for it. `run` raises its error, and so does each put, lease or other call
   of the flow's queue that waits, in any thread, or that would have to wait before the flow is left. Leaving a failed
   flow without an error raises it too, unless `run` did.
5. A stage whose function raises goes on: its rows are tried again, and it logs why (`loop.runner`, rule 3).
6. Leaving the flow, for any reason, ends all processes: with SIGTERM first, then SIGKILL. If the supervisor
   itself is killed, their lifelines close and they exit.
   Where processes work only together (`StageJob.together`), the death of one ends the others, with SIGKILL, and all are
   started again. `prepare` is called when none of them lives. If one with another name has finished, only those of the
   dead process's name are started again.
7. `add` and `remove` change the processes while the flow runs. A process that is removed takes no new row, ends those
   that it has, and exits; after the deadline it is killed, and its rows go to others. It is not started again, however
   it ends. An elastic process that its host ends by SIGTERM is removed.
"""

from __future__ import annotations

import math
import os
import select
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

import transferqueue as tq
from transferqueue import errors
from transferqueue.errors import PeerError, TransferQueueError
from transferqueue.workflows.flow.draining import (
    ADDED,
    DRAIN_S,
    EXIT_DRAINED,
    REMOVED,
    Removal,
    Removed,
    check_addition,
    check_removal,
)
from transferqueue.workflows.flow.events import RESTART, Event, Failure, Figures
from transferqueue.workflows.flow.processes.child_process import ChildProcess
from transferqueue.workflows.flow.processes.signals import signal_pipe
from transferqueue.workflows.flow.processes.stage_process import EXIT_FINAL, StageJob

RESTARTS_MAX: Final = 2
"""Restarts of a process without work in between. A process that works between its deaths is killed from outside, such
as a preempted one; one that dies three times before it has worked is broken."""
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM)
"""What ends an idle process with one of these is not the process: it has no batch that could be the cause."""
_FAREWELL_S: Final = 1.0
"""Seconds between SIGTERM and SIGKILL."""
_PIPE_BYTES: Final = 1 << 16

Observe = Callable[[str, Event], None]
"""Called for each event, with the label of its stage, by the supervising thread. If it raises, the flow fails with
that error."""


class StageFailed(PeerError):
    """A stage cannot work. `stage` is its label, `last_words` its traceback or the end of its output."""

    def __init__(self, text: str, *, stage: str = "", last_words: str = "") -> None:
        super().__init__(text)
        self.stage = stage
        self.last_words = last_words


def threads_of_any(processes: int) -> int:
    """Return the threads of each of so many processes of which nothing else is known: the cores, divided."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, processes))


class Flow:
    """Runs jobs, each in a process, against a queue. A context manager: leaving it ends all processes.

    When a stage cannot work, `run`, and every call of the queue that waits, raises `StageFailed`.

    Args:
        queue: accepts other processes at its address, and stays open.
        jobs: the processes.
        directory: gets one log file for each process, with its stdout and stderr.
        observe: is called for each event, with the label of its stage, by the supervising thread. If it raises, the
            flow fails with that error.
        restarts_max: restarts of a process without work in between; default 2.
        environment: variables of the processes, beside those of this one; default None. Without ``OMP_NUM_THREADS``
            here or there, each process has as many threads as there are cores for each of `jobs`, at least one.
        environments: further ones of single processes, by label; default None.
        prepare: is called with a name of `StageJob.together` before the processes of that name start, first or again;
            default: does nothing.
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
        environments: Mapping[str, Mapping[str, str]] | None = None,
        prepare: Callable[[str], None] = lambda together: None,
    ) -> None:
        self._queue = queue
        self._jobs = jobs
        self._directory = directory
        self._observe = observe
        self._restarts_max = restarts_max
        threads = os.environ.get("OMP_NUM_THREADS", str(threads_of_any(len(jobs))))
        self._environment = {"OMP_NUM_THREADS": threads, **(environment or {})}
        self._environments = environments or {}
        self._prepare = prepare
        self._children: dict[str, ChildProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = self._over = -1
        self._left = True
        self._lock = threading.Lock()
        self._labels = {job.label: job for job in jobs}
        self._asked: deque[StageJob | Removal] = deque()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._supervise, name="flow", daemon=True)

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._wake, self._left = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            for together in dict.fromkeys(job.together for job in self._jobs if job.together):
                self._prepare(together)
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

    def add(self, job: StageJob) -> None:
        """Start one more process. Returns at once, from any thread. The event `ADDED` follows.

        Args:
            job: the process.

        Raises:
            AlreadyExists: a process with its label has not ended.
            UsageError: the flow does not run.
        """
        with self._lock:
            check_addition(job, self._labels, runs=self._runs)
            self._labels[job.label] = job
            self._asked.append(job)
            os.eventfd_write(self._wake, 1)

    def remove(self, label: str, *, deadline_s: float = DRAIN_S) -> Future[Removed]:
        """Ask a process to drain. Returns at once, from any thread.

        The process takes no new row, ends those that it has, and exits; after the deadline it is killed, and its rows
        go to others. The event `REMOVED` follows. A second call for a process that drains may shorten its deadline.

        Args:
            label: of the process, such as ``"rollout-0"``.
            deadline_s: seconds until it is killed; default 60.

        Returns:
            A future that ends when the process has. Do not wait for it in `observe`.

        Raises:
            NotFound: no such process runs.
            UsageError: it is a source or a loop, which do not drain; `deadline_s` is negative; or the flow does not
                run.
        """
        removal = Removal(label, deadline_s)
        with self._lock:
            check_removal(label, deadline_s, self._labels, runs=self._runs)
            self._asked.append(removal)
            os.eventfd_write(self._wake, 1)
        return removal.ended

    @property
    def _runs(self) -> bool:
        return not (self._left or self._ended.is_set())

    def run(self) -> None:
        """Wait until every process has exited with success.

        Raises:
            StageFailed: a stage cannot work.
        """
        with signal_pipe() as signals:
            while not self._ended.is_set():
                select.select([self._over, *signals], [], [])
                for pipe in signals:
                    with suppress(BlockingIOError):
                        os.read(pipe, _PIPE_BYTES)
        self._tell()

    def close(self) -> None:
        """End all processes and wait until they have exited, about a second at most. A second call does nothing."""
        if self._left:
            return
        with self._lock:
            self._left = True
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._end_all()
        self._queue.allow_waits()
        self._selector.close()
        os.close(self._wake)
        os.close(self._over)

    def _tell(self) -> None:
        if self._failure is not None and not self._is_told:
            self._is_told = True
            raise self._failure

    # ------------------------------------------------------------ the supervising thread

    def _supervise(self) -> None:
        try:
            while not self._left and not self._is_over():
                self._turn()
        except BaseException as error:  # noqa: BLE001  (`run`, or leaving the flow, raises it)
            self._failure = error
            self._queue.end_waits(_why_no_waits(error))
            self._give_up_removals()
            self._end_all()
        finally:
            with self._lock:
                self._ended.set()
            self._give_up_removals()
            os.eventfd_write(self._over, 1)

    def _is_over(self) -> bool:
        with self._lock:
            if not self._children and not self._asked:
                self._ended.set()
            return self._ended.is_set()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._next_deadline_s()):
            if key.data is None:
                os.eventfd_read(self._wake)
                self._do_what_was_asked()
                if self._left:
                    return
                continue
            child, act = key.data
            # Events that were ready together with the process's death were read then.
            if self._children.get(child.job.label) is child:
                act(child)

        self._kill_late_drains()

    def _do_what_was_asked(self) -> None:
        while self._asked and not self._left:
            asked = self._asked.popleft()
            if isinstance(asked, StageJob):
                self._start(asked, restarts=0)
                self._report(asked.label, ADDED, {"label": asked.label})
            else:
                self._begin_removal(asked)

    def _begin_removal(self, removal: Removal) -> None:
        child = self._children.get(removal.label)
        if child is None:  # it ended in between
            removal.end("drained")
            return
        if child.removal is not None:
            child.removal.ended_too(removal)
            return
        child.removal = removal
        child.ask_to_drain()

    def _next_deadline_s(self) -> float | None:
        nearest = min((child.removal.deadline for child in self._children.values() if child.removal), default=math.inf)
        return None if nearest == math.inf else max(0.0, nearest - time.monotonic())

    def _kill_late_drains(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.removal and child.removal.deadline <= now:
                child.signal(signal.SIGKILL)
                child.removal.deadline = math.inf

    def _removed(self, child: ChildProcess, code: int) -> None:
        """Report a process that was removed, or that its host ended."""
        how = "killed" if code not in (0, EXIT_DRAINED) else "drained" if child.removal else "preempted"
        removed = (child.removal or Removal(child.job.label, 0.0)).end(how)
        self._report(child.job.label, REMOVED, msgspec.to_builtins(removed))

    def _report(self, label: str, kind: str, values: dict[str, Any]) -> None:
        self._observe(label, Figures(kind=kind, at=time.monotonic(), values=values))

    def _give_up_removals(self) -> None:
        """The flow ends: drop the pending drains."""
        waiting = [child.removal for child in self._children.values() if child.removal]
        waiting += [asked for asked in self._asked if isinstance(asked, Removal)]
        for removal in waiting:
            if not removal.ended.done():
                removal.end("killed")

    def _end_all(self) -> None:
        children = list(self._children.values())
        for child in children:
            if child.job.elastic:
                child.hang_up()  # SIGTERM would make it drain
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _FAREWELL_S
        for child in children:
            child.wait_until(deadline)
            child.end()
            self._forget(child)

    def _start(self, job: StageJob, restarts: int) -> None:
        environment = {**self._environment, **self._environments.get(job.label, {})}
        child = ChildProcess(job, self._queue.address, self._directory / f"{job.label}.log", restarts, environment)
        self._children[job.label] = child
        self._selector.register(child.events, selectors.EVENT_READ, (child, self._read))
        self._selector.register(child.death, selectors.EVENT_READ, (child, self._died))

    def _forget(self, child: ChildProcess) -> None:
        for descriptor in (child.events, child.death):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        child.close()
        self._children.pop(child.job.label, None)

    def _read(self, child: ChildProcess) -> None:
        received = os.read(child.events, _PIPE_BYTES)
        if not received:
            self._selector.unregister(child.events)
        for event in child.receiver.feed(received):
            self._observe(event.stage or child.job.label, event)
            if isinstance(event, Failure):
                child.failure = event
        if child.receiver.progressed:
            child.worked()

    def _died(self, child: ChildProcess) -> None:
        """Read the rest of its events, then start it again, fail the flow, or count it as finished."""
        code = self._ended_with(child)
        self._do_what_was_asked()  # a removal that was asked for before the death counts
        last_words, cause = ("", "") if code == 0 else (child.last_words(), child.cause())
        self._forget(child)
        removed = bool(child.removal) or code == EXIT_DRAINED
        if removed or code == 0:
            with self._lock:
                del self._labels[child.job.label]
            if removed:
                self._removed(child, code)
            return
        if child.receiver.progressed or (child.receiver.is_idle and -code in _FROM_OUTSIDE):
            child.restarts, child.cause_before = 0, ""
        is_same = bool(cause) and cause == child.cause_before and not _is_of_peer(cause)
        if code == EXIT_FINAL or child.restarts >= self._restarts_max or is_same:
            raise _failed(child, code, last_words, cause, is_same=is_same)
        text = f"{child.job.label} {_end_of(code)}; {_why(last_words, cause)}"
        following = (
            f"it is started again, restart {child.restarts + 1} of {self._restarts_max} without work in between; see "
            f"{child.log}"
        )
        self._report(child.job.label, RESTART, {"label": child.job.label, "text": text, "next": following})
        self._start_again(child, cause)

    def _ended_with(self, child: ChildProcess) -> int:
        """End the process, read the rest of its events, and return its exit code."""
        code = child.end()
        os.set_blocking(child.events, False)
        try:
            while child.events in self._selector.get_map():
                self._read(child)
        except BlockingIOError:
            pass  # another process still holds the pipe; all events have been read
        return code

    def _start_again(self, dead: ChildProcess, cause: str) -> None:
        """Start a process again, and with it those that work only together with it, also those of its name that had
        finished."""
        others = started_with(dead.job, self._jobs, self._children)
        running = [child for job in others if (child := self._children.get(job.label)) is not None]
        for child in running:
            child.signal(signal.SIGKILL)
        for child in running:
            self._ended_with(child)
            self._forget(child)
        if is_whole(dead.job, others, self._jobs):
            self._prepare(dead.job.together)
        self._start(dead.job, dead.restarts + 1)
        self._children[dead.job.label].cause_before = cause
        for job in others:
            with self._lock:
                self._labels.setdefault(job.label, job)
            self._start(job, dead.restarts + 1)


def started_with(dead: StageJob, jobs: Sequence[StageJob], running: Collection[str]) -> list[StageJob]:
    """Return the labels that must restart with `dead`: all that work only together with it. If those of another name
    have finished, their results stay, and only those of its own name restart. running: labels.
    """
    others = [job for job in jobs if dead.together and job.together == dead.together and job.label != dead.label]
    whole = all(job.label in running for job in others if job.name != dead.name)
    return others if whole else [job for job in others if job.name == dead.name]


def is_whole(dead: StageJob, others: Sequence[StageJob], jobs: Sequence[StageJob]) -> bool:
    """Whether `dead` and `others` are all that work together, so that none lives once they are ended."""
    return bool(dead.together) and len(others) + 1 == sum(job.together == dead.together for job in jobs)


def _failed(child: ChildProcess, code: int, last_words: str, cause: str, *, is_same: bool) -> StageFailed:
    again = f", after {child.restarts} restarts without work in between" if child.restarts else ""
    twice = ", twice in a row of the same exception, so it is not started again" if is_same else ""
    return StageFailed(
        f'stage "{child.job.label}" {_end_of(code)}{again}{twice}; {_why(last_words, cause)}; see {child.log}',
        stage=child.job.label,
        last_words=last_words,
    )


def _end_of(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _why(last_words: str, cause: str) -> str:
    last = _last_line(last_words)
    first = f"its first exception was {cause}, " if cause and cause != last else ""
    return f"{first}its last words were {last}"


def _is_of_peer(cause: str) -> bool:
    """Whether a cause is that a peer was not reachable, which ends by itself."""
    kind = getattr(errors, cause.partition(":")[0].rpartition(".")[2], None)
    return isinstance(kind, type) and issubclass(kind, PeerError)


def _why_no_waits(error: BaseException) -> TransferQueueError:
    """Return the error for calls that would wait for stages which the flow no longer runs."""
    if isinstance(error, TransferQueueError):
        return error
    return StageFailed(f"the flow has ended its stages, because its supervisor failed: {type(error).__name__}: {error}")


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2] or "none"
