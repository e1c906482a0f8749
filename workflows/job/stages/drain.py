"""A generator that drains gives its unfinished rows back with their tokens, so that others go on with them.

The engine gets an abort; each request then ends with its tokens so far (`Pause.ABORT`), and `Generate` releases those
rows. The next round aborts requests that began during the pause. An engine that cannot abort finishes its rows instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import Generator, PartialResult, Pause, Unsupported
from transferqueue.errors import DeadlineExceeded
from transferqueue.workflows.flow.draining import DrainRequest
from transferqueue.workflows.flow.stage import Work

_ROUND_S: Final = 0.2
"""Seconds between two rounds of aborting."""


class DrainableWork:
    """The function of a generating stage, until a drain: then rows that were not begun are released as they are. Called
    from several threads at once."""

    def __init__(self, work: Work, drain: DrainRequest) -> None:
        self._work, self._drain = work, drain
        self._running = 0
        self._changed = threading.Condition()

    def __call__(self, batch: tq.Batch) -> Iterable[PartialResult]:
        """Yield the function's results."""
        with self._changed:
            is_late = self._drain.requested.is_set()
            self._running += not is_late
        if is_late:
            yield PartialResult(columns={}, at=np.arange(len(batch)), unfinished=True)
            return
        try:
            yield from self._parts(batch)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _parts(self, batch: tq.Batch) -> Iterable[PartialResult]:
        parts = self._work(batch)
        if not isinstance(parts, Iterator):
            raise TypeError(f"{type(self._work).__name__} returned {type(parts).__name__}; a generator yields parts")
        return parts

    def abort(self, engine: Generator) -> None:
        """End every request of the engine, also those that begin meanwhile, with its tokens so far. Returns when none
        runs."""
        abort_while(engine, lambda: self._running > 0, self._changed)


def abort_while(engine: Generator, runs: Callable[[], bool], changed: threading.Condition) -> None:
    """Abort the requests of `engine` in rounds until none runs, or return at once where the engine cannot: its rows are
    then finished.

    runs: whether requests run that are to end; asked while `changed` is held. changed: notified when a request ends;
    taken here.
    """
    with changed:
        while runs():
            try:
                engine.pause(Pause.ABORT)
                engine.resume()
            except (Unsupported, DeadlineExceeded):
                return
            changed.wait(_ROUND_S)


@contextmanager
def drainable(work: Work, engine: Generator, drain: DrainRequest) -> Iterator[Work]:
    """Yield `work` as a function that hands rows back at a drain. `work` must read and release the columns `BEGUN`."""
    drained = DrainableWork(work, drain)
    with drain.when_requested(lambda: drained.abort(engine)):
        yield drained
