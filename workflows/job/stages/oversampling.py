"""When a batch is full, the requests of a job that over-samples end, and their rows go on under the weights that the
batch makes.

1. The trainer announces a full batch (`transferqueue.workflows.flow.loop.full_batches`). The engine then gets an abort:
   each request ends with its tokens so far, and its row is released with them. A row that was not begun is released as
   it is. So no row is lost, or generated twice at once.
2. A row that is leased again waits for the weights that the batch makes (`policy_weights`). It goes on with its tokens,
   or begins anew where its oldest token is more than `pacing.max_staleness` versions behind.
3. A request that began while the engine was aborting is met by the next round. An engine that cannot abort, or takes no
   weights, finishes its rows instead.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from transferqueue.adapters.protocols import Generator, PartialResult
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.workflows.flow.loop.full_batches import ABORTED, Due, hearing
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job.names import FULL
from transferqueue.workflows.job.stages.drain import abort_while


class Oversampling:
    """The requests of one generating process, and whether their batch is full. Its methods are called from several
    threads at once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._due = 0
        self._running: Counter[int] = Counter()
        """Calls that generate, by the version of their turn."""
        self._changed = threading.Condition()

    @contextmanager
    def stopping(self, engine: Generator) -> Iterator[Due]:
        """Abort the requests of `engine` at each full batch, until the block ends."""
        with hearing(self._context.queue, channel=FULL, then=lambda version: self.stop(engine, version)) as due:
            yield due

    def until_full(self, version: int, rows: Sequence[int], parts: Iterator[PartialResult]) -> Iterator[PartialResult]:
        """Yield the results of `rows`; rows left unfinished by a full batch are released. version: of their turn; -1:
        of an engine that takes no weights.
        """
        with self._changed:
            is_full = self._is_full(version)
            if not is_full:
                self._running[version] += 1
        if is_full:
            yield self._counted(version, PartialResult(columns={}, at=np.array(rows, np.intp), unfinished=True))
            return
        try:
            for part in parts:
                yield self._counted(version, part)
        finally:
            with self._changed:
                self._running[version] -= 1
                if not self._running[version]:
                    del self._running[version]
                self._changed.notify_all()

    def stop(self, engine: Generator, due: int) -> None:
        """The batch that makes the weights `due` is full: abort the requests under older weights. Returns when none
        runs, or the engine cannot."""
        with self._changed:
            self._due = due
        abort_while(engine, lambda: any(map(self._is_full, self._running)), self._changed)

    def _is_full(self, version: int) -> bool:
        return 0 <= version < self._due

    def _counted(self, version: int, part: PartialResult) -> PartialResult:
        """Report the rows of a part that a full batch left unfinished, with their tokens so far."""
        with self._changed:
            if part.unfinished and part.at is not None and self._is_full(version):
                tokens = sum(len(ids) for ids in part.columns.get(BEGUN[0], ()))
                self._context.figures(ABORTED, rows=len(part.at), tokens=tokens)
        return part
