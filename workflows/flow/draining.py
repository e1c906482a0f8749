"""A request to end a stage's process without losing work: it takes no new row, ends those that it has, and exits.

The request comes from the supervisor (a byte on the lifeline) or from the host (SIGTERM, if the job is elastic), and is
final.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from transferqueue.errors import AlreadyExists, NotFound, UsageError

EXIT_DRAINED: Final = 66
"""Exit code of a process that was asked to drain, and has."""
DRAIN_S: Final = 60.0
"""Default deadline of a removal."""
ADDED: Final = "added"
"""Kind of the event that reports a process that was added."""
REMOVED: Final = "removed"
"""Kind of the event that reports a removed process. Its values: those of `Removed`."""


class DrainRequest:
    """Whether a drain was requested, and the actions to take then. Safe from any thread.

    >>> drain = DrainRequest()
    >>> with drain.when_requested(lambda: None):
    ...     drain.request()
    >>> drain.requested.is_set()
    True
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []

    def request(self) -> None:
        """Ask for the drain; returns at once. Each action runs in a thread of its own. A second call does nothing."""
        with self._lock:
            first = not self.requested.is_set()
            self.requested.set()
            actions = [*self._actions] if first else []
        for action in actions:
            _run(action)

    @contextmanager
    def when_requested(self, action: Callable[[], None]) -> Iterator[None]:
        """Run `action` when a drain is requested during the block; at once if it was."""
        with self._lock:
            self._actions.append(action)
            late = self.requested.is_set()
        if late:
            _run(action)
        try:
            yield
        finally:
            with self._lock:
                self._actions.remove(action)

    def request_at_sigterm(self) -> None:
        """Let SIGTERM request the drain. Call it from the main thread."""
        # A thread of its own: the handler interrupts a thread that may hold the lock.
        signal.signal(signal.SIGTERM, lambda number, frame: _run(self.request))


def _run(action: Callable[[], None]) -> None:
    threading.Thread(target=action, name="drain", daemon=True).start()


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """How the process `label` was removed: ``drained``; ``killed``, after the deadline or from outside; ``preempted``:
    drained for its host. seconds: that took."""

    label: str
    how: str
    seconds: float


class Removal:
    """A removal that was asked for at `began` (monotonic seconds)."""

    def __init__(self, label: str, deadline_s: float) -> None:
        self.label, self.began = label, time.monotonic()
        self.deadline = self.began + deadline_s
        self.ended: Future[Removed] = Future()

    def ended_too(self, other: Removal) -> None:
        """End `other` as this one ends, and no later than either deadline."""
        self.deadline = min(self.deadline, other.deadline)
        self.ended.add_done_callback(lambda ended: other.ended.set_result(ended.result()))

    def end(self, how: str) -> Removed:
        """The process has ended."""
        removed = Removed(label=self.label, how=how, seconds=round(time.monotonic() - self.began, 3))
        self.ended.set_result(removed)
        return removed


class Drainable(Protocol):
    """The required attributes of a job: see `StageJob`."""

    @property
    def label(self) -> str:
        """Name of its process."""

    @property
    def drains(self) -> bool:
        """Whether its process can drain."""


def check_addition(job: Drainable, running: Mapping[str, Drainable], *, runs: bool) -> None:
    """Raise `AlreadyExists` if a process with the label of `job` runs, `UsageError` if the flow does not."""
    if not runs:
        raise UsageError(f"cannot add {job.label}: the flow does not run; enter it first, or it has ended")
    if job.label in running:
        raise AlreadyExists(f'process "{job.label}" runs already; give the job another instance number')


def check_removal(label: str, deadline_s: float, running: Mapping[str, Drainable], *, runs: bool) -> None:
    """Raise `NotFound` if no such process runs; `UsageError` if it does not drain, for a bad deadline, and if the flow
    does not run."""
    if not runs:
        raise UsageError(f"cannot remove {label}: the flow does not run; enter it first, or it has ended")
    if label not in running:
        raise NotFound(f'process "{label}" does not run; those that do are {", ".join(sorted(running))}')
    if not running[label].drains:
        raise UsageError(f'process "{label}" is a source or a loop, and only the process of a stage drains')
    if not deadline_s >= 0:
        raise UsageError(f'remove("{label}", deadline_s={deadline_s}): give seconds from 0 on')
