"""Snapshots and restores: start a job at each coordinator, then follow all jobs to their ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.operation_runner import Operation, request_reply
from transferqueue.errors import TransferQueueError, UsageError
from transferqueue.errors.text import shown
from transferqueue.limits import SNAPSHOTS_KEPT_MAX, check_path
from transferqueue.wire import messages as m
from transferqueue.wire.answers.snapshots import StoredSnapshot

T = TypeVar("T")
Path = str | os.PathLike[str]
SNAPSHOT_S: Final = 600.0
"""Default timeout of a snapshot or a restore."""
Progress = Callable[[int, int], object]
"""Called with bytes done and about how many in all, in ascending order."""
_NUMBER: Final = re.compile(r"[0-9]{6,}")


def snapshot(
    clients: Sequence[ClientSession], path: Path, keep: int, timeout_s: float | None, progress: Progress | None
) -> SnapshotCalls:
    """Write a snapshot of each coordinator."""
    path = check_path("path", path)
    kept = checks.whole("keep", keep, least=1, most=SNAPSHOTS_KEPT_MAX)
    requests = {client: m.SnapshotRequest(path=each, keep=kept) for client, each in _directories(path, clients).items()}
    return SnapshotCalls(requests, timeout_s, progress)


def restore(
    clients: Sequence[ClientSession], path: Path, timeout_s: float | None, progress: Progress | None
) -> SnapshotCalls:
    """Restore the newest snapshot of each coordinator."""
    directories = _directories(check_path("path", path), clients)
    requests = {client: m.Restore(path=each) for client, each in directories.items()}
    return SnapshotCalls(requests, timeout_s, progress)


def _directories(path: str, clients: Sequence[ClientSession]) -> dict[ClientSession, str]:
    """Where each coordinator has its snapshots: `path`. Several may have the same root, so each has a directory in
    it."""
    if len(clients) == 1:
        return {clients[0]: path}
    parent, name = os.path.split(path)
    within, number = (parent, name) if _NUMBER.fullmatch(name) else (path, "")
    return {client: os.path.join(within, f"{client.seat.number}-of-{client.seat.of}", number) for client in clients}


class SnapshotCalls:
    """One job at each coordinator: `begin` each, then `follow` each. All share one deadline."""

    def __init__(
        self,
        requests: Mapping[ClientSession, m.SnapshotRequest | m.Restore],
        timeout_s: float | None,
        progress: Progress | None,
    ) -> None:
        if progress is not None and not callable(progress):
            raise UsageError(
                f"progress={shown(progress)} is {type(progress).__name__}; give a function of (bytes done, bytes in "
                "all)"
            )
        self._requests, self._timeout_s, self._progress = requests, timeout_s, progress
        self._deadline: Deadline | None = None
        self._jobs: dict[ClientSession, m.JobProgress] = {}

    @property
    def stored(self) -> list[StoredSnapshot]:
        """The snapshot of each coordinator, in the order of their numbers."""
        return [
            StoredSnapshot(path=job.path, made_at=datetime.fromtimestamp(job.made_at, UTC) if job.made_at else None)
            for job in self._jobs.values()
        ]

    def begin(self, client: ClientSession) -> Operation[None]:
        """Begin the job of one coordinator."""
        self._deadline = self._deadline or (yield from checks.within(self._timeout_s))
        self._jobs[client] = yield from self._naming(client, request_reply(self._requests[client], m.JobProgress))

    def follow(self, client: ClientSession) -> Operation[None]:
        """Wait for the end of the job of one coordinator. With timeout_s=0 nothing is waited for."""
        if self._deadline is None:
            raise UsageError("no job has begun")
        while not (job := self._jobs[client]).ended and self._timeout_s != 0:
            request = m.WatchJob(work=job.work, done=job.done, wait_s=self._deadline.left())
            self._jobs[client] = yield from self._naming(client, request_reply(request, m.JobProgress))
            if self._progress is not None:
                jobs = self._jobs.values()
                self._progress(sum(each.done for each in jobs), sum(each.total for each in jobs))

    def _naming(self, client: ClientSession, operation: Operation[T]) -> Operation[T]:
        """Carry out an operation. Where there are several coordinators, an error names its own, and what the others
        do."""
        try:
            return (yield from operation)
        except TransferQueueError as error:
            if len(self._requests) == 1:
                raise
            others = ", ".join(str(other.seat) for other in self._jobs if other is not client)
            also = f"; coordinators {others} go on with theirs" if others else ""
            raise type(error)(f"coordinator {client.seat} at {client.address}: {error}{also}") from error
