"""Snapshots of a run's queue beside the checkpoints of its trainer: from them a run goes on whose server's state is
lost, after a reboot for example.

1. A snapshot is taken after each checkpoint, by a thread of its own, while all go on. One that falls due while another
   is written is left out.
2. It is restored when a run goes on and its server has no table. The trainer then goes on from its newest checkpoint.
   If that is newer than the snapshot (the run died between the two), rows of the steps between them are trained once
   more. If there is no snapshot yet, the table begins anew in the data after what that checkpoint has trained
   (`RunFolder.begin_table`).
3. A snapshot that fails is reported in the log of the run, and does not end it: the checkpoint before and its snapshot
   are there still.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import transferqueue as tq
from transferqueue.errors import TransferQueueError
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.job.run.record import CHECKPOINT

NAME: Final = "queue"
"""Name of the snapshots under the server's root."""
SNAPSHOTS: Final = "snapshots"
"""Folder of the snapshots in that of the run."""
_log: Final = logging.getLogger("transferqueue.job")


class QueueSnapshots:
    """Takes a snapshot after each checkpoint, the newest `keep` of them. A context manager: leaving it waits for the
    one that is being written."""

    def __init__(self, queue: tq.Queue, *, keep: int) -> None:
        self._queue, self._keep = queue, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._last: Future[None] | None = None
        self.taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def hear(self, label: str, event: Event) -> None:
        """Begin a snapshot if `event` is a checkpoint and none is being written."""
        if isinstance(event, Figures) and event.kind == CHECKPOINT and (self._last is None or self._last.done()):
            self._last = self._thread.submit(self._take, int(event.values["step"]))

    def _take(self, step: int) -> None:
        try:
            self._queue.snapshot(NAME, keep=self._keep)
            self.taken += 1
        except TransferQueueError as error:
            _log.warning("the snapshot after step %d failed: %s", step, error)


def restore_if_lost(queue: tq.Queue, folder: Path) -> bool:
    """Restore the newest snapshot of the run in `folder` if the server has no table; return whether it did. One that
    was being written when the run died is none. Raises as `Queue.restore`."""
    whole = (path.parent.name.isdigit() for path in (folder / SNAPSHOTS / NAME).glob("*/MANIFEST.json"))
    if queue.tables() or not any(whole):
        return False
    queue.restore(NAME)
    return True
