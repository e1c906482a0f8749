"""Messages that start and watch the writing and restoring of snapshots."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transferqueue.limits import CUT_HOLD_S, SNAPSHOTS_KEPT_MAX
from transferqueue.wire.messages.base import Count, DoneReply, FullPath, Message, Path, Seconds
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.roles import ADMINS


class JobProgress(Message, tag="Working"):
    """A snapshot or restore that was begun. done of total: bytes, about. path: where, under the server's root; ended: all of it is there."""

    work: int
    path: FullPath
    done: int
    total: int
    ended: bool


@request(
    reply=JobProgress,
    roles=ADMINS,
    verb="Queue.snapshot",
    unanswered="if it was begun, it goes on at the server, and another one is Full until it has ended",
)
class SnapshotRequest(Message, tag="Snapshot"):
    """Write all there is now to `path` under the server's root, and keep the newest `keep` there. Answer: Working, at once."""

    path: Path
    keep: Annotated[int, Meta(ge=1, le=SNAPSHOTS_KEPT_MAX)] = 2


@request(reply=JobProgress, roles=ADMINS, verb="Queue.restore", unanswered="if it was begun, it goes on at the server")
class Restore(Message):
    """An empty deployment becomes what the snapshot at `path` (the newest under it) is of. Answer: Working, at once."""

    path: Path


@request(reply=JobProgress, roles=ADMINS, repeat="again", reads=True, verb="Queue.snapshot")
class WatchJob(Message, tag="Follow"):
    """How far a work is, once it is past `done` bytes or has ended. Answer: Working; `Failed` with what ended it."""

    work: Count
    done: Count = 0
    wait_s: Seconds = 0.0


# ---------------------------------------------------------------- one cut over several coordinators

CutId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z", max_length=32)]
"""Names one cut of all coordinators of a deployment. Chosen at random by the client that takes it."""
AnyCut = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z", max_length=32)]
"""A `CutId`, or ""."""


class PartProgress(Message):
    """How far a coordinator's part of a cut is. path: its directory. done of total: bytes, about. cut: its cut; "": not read yet. ready: it waits
    for EndPart, and fails for lack of nothing but time; ended: all of it is there."""

    work: int
    path: FullPath
    done: int
    total: int
    cut: AnyCut
    ready: bool
    ended: bool


@request(reply=DoneReply, roles=ADMINS, repeat="again", verb="Queue.snapshot")
class HoldRequests(Message):
    """Carry out nothing of other sessions, nor what is due by time, until this session takes its part of this cut or ends the hold, at most for
    `hold_s`. Answer: Done, from the moment on from which that is so."""

    cut: CutId
    hold_s: Annotated[float, Meta(gt=0, le=CUT_HOLD_S)]


@request(reply=DoneReply, roles=ADMINS, repeat="again", verb="Queue.snapshot")
class EndHold(Message):
    """The session does not hold for this cut any more. Answer: Done, also if it did not."""

    cut: CutId


@request(reply=PartProgress, roles=ADMINS, verb="Queue.snapshot")
class SnapshotPart(Message):
    """Write all there is now to `path`, as this coordinator's part of `cut`, and end the session's hold, which must last still. `EndPart`
    completes it, or removes it. Answer: PartProgress, at once."""

    path: Path
    cut: CutId


@request(reply=PartProgress, roles=ADMINS, verb="Queue.restore")
class RestorePart(Message):
    """Read this coordinator's part of `cut` ("": of the newest one) at `path`, into an empty deployment. `EndPart` makes it visible, or
    forgets it. Answer: PartProgress, at once."""

    path: Path
    cut: AnyCut = ""


@request(reply=PartProgress, roles=ADMINS, repeat="again", reads=True, verb="Queue.snapshot")
class WatchPart(Message):
    """How far a part is, once it is past `done` bytes, has told its cut, is ready or has ended. A part that is ready and that nobody watches is
    given up. Answer: PartProgress; `Failed` with what ended it."""

    work: Count
    done: Count = 0
    wait_s: Seconds = 0.0


@request(reply=PartProgress, roles=ADMINS, repeat="again", verb="Queue.snapshot")
class EndPart(Message):
    """All parts of the cut are ready: complete this one; or `finish` is false: give it up. keep: all parts are completed, so of the snapshots that
    are older than this part only the newest `keep` - 1 are needed: remove the others (0: none). The work has ended anew when they are gone. Answer:
    PartProgress, at once."""

    work: Count
    finish: bool
    keep: Annotated[int, Meta(ge=0, le=SNAPSHOTS_KEPT_MAX)] = 0


SnapshotRequests = (
    SnapshotRequest | Restore | WatchJob | HoldRequests | EndHold | SnapshotPart | RestorePart | WatchPart | EndPart
)
SnapshotReplies = JobProgress | PartProgress
