"""One running snapshot or restore: its progress, and how its thread learns that it must end."""

from __future__ import annotations

from pathlib import Path

from transferqueue.errors import TransferQueueError
from transferqueue.wire import messages as m


class SnapshotJob:
    """One snapshot or restore. `done` and `total` are bytes. `reported` is `done` at the last wake-up of its watchers.
    `made_at`: when the snapshot was made, in seconds since 1970; 0: unknown so far."""

    def __init__(self, number: int, path: Path, total: int) -> None:
        self.number, self.path, self.total = number, path, total
        self.done = self.reported = 0
        self.made_at = 0.0
        self.ended = False
        self.error: TransferQueueError | None = None
        self._given_up: TransferQueueError | None = None

    def expect_twice(self, nbytes: int) -> None:
        """A restore reads all files twice: to compare checksums, and to load them."""
        self.total = 2 * nbytes

    def give_up(self, error: TransferQueueError) -> None:
        """Have the thread end the job with this error."""
        self._given_up = self._given_up or error

    def check_wanted(self) -> None:
        """Raise the error of `give_up`, if it was called."""
        if self._given_up is not None:
            raise self._given_up

    def reply(self) -> m.JobProgress:
        """The progress of the job."""
        return m.JobProgress(self.number, str(self.path), self.done, self.total, self.ended, self.made_at)
