"""Snapshots and restores: start the job at the server, then follow it to its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.session.run import Operation, request_reply
from transferqueue.errors import UsageError
from transferqueue.limits import SNAPSHOTS_KEPT_MAX, check_path
from transferqueue.text import shown
from transferqueue.wire import messages as m

SNAPSHOT_S: Final = 600.0
"""Default timeout of a snapshot or a restore."""
Progress = Callable[[int, int], object]
"""Called with bytes done and about how many in all, in ascending order."""


def snapshot(
    client: ClientSession, path: str | os.PathLike[str], keep: int, timeout_s: float | None, progress: Progress | None
) -> Operation[str]:
    """Write a snapshot. Returns its path."""
    request = m.SnapshotRequest(
        path=check_path("path", path), keep=checks.whole("keep", keep, least=1, most=SNAPSHOTS_KEPT_MAX)
    )
    return (yield from _followed(client, request, timeout_s, progress))


def restore(
    client: ClientSession, path: str | os.PathLike[str], timeout_s: float | None, progress: Progress | None
) -> Operation[str]:
    """Restore a snapshot. Returns its path."""
    return (yield from _followed(client, m.Restore(path=check_path("path", path)), timeout_s, progress))


def _followed(
    client: ClientSession, request: m.SnapshotRequest | m.Restore, timeout_s: float | None, progress: Progress | None
) -> Operation[str]:
    if progress is not None and not callable(progress):
        raise UsageError(
            f"progress={shown(progress)} is {type(progress).__name__}; give a function of (bytes done, bytes in all)"
        )
    deadline = yield from checks.within(timeout_s)
    work = yield from request_reply(request, m.JobProgress)
    while not work.ended and timeout_s != 0:
        work = yield from request_reply(
            m.WatchJob(work=work.work, done=work.done, wait_s=deadline.left()), m.JobProgress
        )
        if progress is not None:
            progress(work.done, work.total)
    return work.path
