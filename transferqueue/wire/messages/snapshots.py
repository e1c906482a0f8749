"""Messages that start and watch the writing and restoring of snapshots."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transferqueue.limits import SNAPSHOTS_KEPT_MAX
from transferqueue.wire.messages.base import Count, FullPath, Message, Path, Seconds
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.roles import ADMINS


class JobProgress(Message, tag="Working"):
    """The progress of a snapshot or restore: about `done` of `total` bytes.

    Args:
        path: under the server's root.
        ended: it is complete.
        made_at: when the snapshot was made, in seconds since 1970; 0: unknown so far.
    """

    work: int
    path: FullPath
    done: int
    total: int
    ended: bool
    made_at: float = 0.0


@request(
    reply=JobProgress,
    roles=ADMINS,
    verb="Queue.snapshot",
    unanswered="if it was begun, it goes on at the server, and another one is Full until it has ended",
)
class SnapshotRequest(Message, tag="Snapshot"):
    """Write the state to `path` under the server's root, and keep the newest `keep` snapshots there. Answer: Working,
    at once."""

    path: Path
    keep: Annotated[int, Meta(ge=1, le=SNAPSHOTS_KEPT_MAX)] = 2


@request(reply=JobProgress, roles=ADMINS, verb="Queue.restore", unanswered="if it was begun, it goes on at the server")
class Restore(Message):
    """Fill an empty deployment from the snapshot at `path` (the newest under it). Answer: Working, at once."""

    path: Path


@request(reply=JobProgress, roles=ADMINS, repeat="again", reads=True, verb="Queue.snapshot")
class WatchJob(Message, tag="Follow"):
    """Waits until a job is past `done` bytes or has ended. Answer: Working; `Failed` with the error that ended it."""

    work: Count
    done: Count = 0
    wait_s: Seconds = 0.0


SnapshotRequests = SnapshotRequest | Restore | WatchJob
SnapshotReplies = JobProgress
