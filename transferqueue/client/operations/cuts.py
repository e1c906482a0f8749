"""One snapshot of several coordinators, and its restore. Coordinators do not speak to each other: this client, which has a session with each, leads.

A snapshot: each coordinator holds (`HoldRequests`); when all do, each takes its part, and goes on. When all parts are written, each completes its own.
A restore: each coordinator reads its part; when all have the same cut and all bytes of it, each makes its tables visible. If one fails before that, all
give up, and nothing is changed anywhere. docs/decisions/0050 has the rules and what they do not cover.

Steps are generators without I/O: each yields a session and an operation, and gets its result, or the error that it raised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from typing import Any, Final, TypeVar

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.snapshot import Progress
from transferqueue.client.session.calls import Deadline, timeout
from transferqueue.client.session.run import Operation, request_reply
from transferqueue.errors import DeadlineExceeded, NotFound, TransferQueueError, UsageError
from transferqueue.limits import CUT_HOLD_S, SNAPSHOTS_KEPT_MAX, check_path
from transferqueue.wire import messages as m

T = TypeVar("T")
Steps = Generator[tuple[ClientSession, Operation[Any]], Any, T]
Parts = dict[ClientSession, m.PartProgress]
ROUND_S: Final = 1.0
"""Longest wait at one coordinator before the others are asked again, so that none takes its client for dead."""
_NUMBER: Final = re.compile(r"[0-9]{6,}")


def snapshot_of_all(
    clients: Sequence[ClientSession],
    path: str | os.PathLike[str],
    keep: int,
    cut: str,
    timeout_s: float | None,
    progress: Progress | None,
) -> Steps[str]:
    """Write a snapshot of several coordinators at one moment. Returns the paths of its parts, joined by commas. cut: its id, 32 digits."""
    path = check_path("path", path)
    kept = max(checks.whole("keep", keep, least=1, most=SNAPSHOTS_KEPT_MAX), 2)
    deadline = yield from _begun(clients, timeout_s)
    held: list[ClientSession] = []
    parts: Parts = {}
    try:
        for client in clients:
            yield from _ask(client, m.HoldRequests(cut, CUT_HOLD_S), m.DoneReply)
            held.append(client)
        for client in clients:
            request = m.SnapshotPart(part_path(path, client), cut)
            parts[client] = yield from _ask(client, request, m.PartProgress)
        yield from _until_ready(parts, deadline, progress)
    except TransferQueueError:
        yield from _quietly([(client, m.EndHold(cut)) for client in held if client not in parts])
        yield from _give_up(parts)
        raise
    paths = yield from _complete(parts, deadline)
    yield from _remove_older(parts, kept, deadline)
    return paths


def restore_of_all(
    clients: Sequence[ClientSession], path: str | os.PathLike[str], timeout_s: float | None, progress: Progress | None
) -> Steps[str]:
    """Restore the newest snapshot of which every coordinator has its part. Returns the paths of the parts, joined by commas."""
    path = check_path("path", path)
    deadline = yield from _begun(clients, timeout_s)
    parts: Parts = {}
    try:
        parts = yield from _parts_of_one_cut(clients, path, deadline)
        yield from _until_ready(parts, deadline, progress)
    except TransferQueueError:
        yield from _give_up(parts)
        raise
    return (yield from _complete(parts, deadline))


def part_path(path: str | os.PathLike[str], client: ClientSession) -> str:
    """Where a coordinator keeps its parts: a directory of its own in `path`, since several may have the same root."""
    parent, name = os.path.split(os.fspath(path))
    own = f"{client.seat.number}-of-{client.seat.of}"
    return os.path.join(parent, own, name) if _NUMBER.fullmatch(name) else os.path.join(parent, name, own)


# ---------------------------------------------------------------- which cut is restored


def _parts_of_one_cut(
    clients: Sequence[ClientSession], path: str | os.PathLike[str], deadline: Deadline
) -> Steps[Parts]:
    """Begin to read the parts of the newest cut that all have. `NotFound` says who lacks which."""
    parts: Parts = {}
    try:
        parts = yield from _begin_restores(clients, path, "", deadline, parts)
        newest = list(dict.fromkeys(part.cut for part in parts.values()))
        if len(newest) == 1:
            return parts
    except TransferQueueError:
        yield from _give_up(parts)
        raise
    found = "; ".join(f"{_name(client)} has cut {part.cut} at {part.path}" for client, part in parts.items())
    yield from _give_up(parts)
    lacking = []
    for cut in newest:
        parts = {}
        try:
            return (yield from _begin_restores(clients, path, cut, deadline, parts))
        except NotFound as error:
            lacking.append(str(error))
            yield from _give_up(parts)
        except TransferQueueError:
            yield from _give_up(parts)
            raise
    raise NotFound(
        f"snapshot {os.fspath(path)} is not whole: the newest parts are of different cuts ({found}), and none of these is at all "
        f"coordinators: {'; '.join(lacking)}"
    )


def _begin_restores(
    clients: Sequence[ClientSession], path: str | os.PathLike[str], cut: str, deadline: Deadline, parts: Parts
) -> Steps[Parts]:
    """Begin to read these parts, which are put into `parts`, and wait until each has told its cut."""
    for client in clients:
        parts[client] = yield from _ask(client, m.RestorePart(part_path(path, client), cut), m.PartProgress)
    while unknown := [client for client, part in parts.items() if not part.cut]:
        yield from _watch(parts, unknown, deadline)
    return parts


# ---------------------------------------------------------------- parts


def _begun(clients: Sequence[ClientSession], timeout_s: float | None) -> Steps[Deadline]:
    if timeout(timeout_s) == 0:
        raise UsageError(
            "timeout_s=0 with several coordinators: this call itself completes the parts when all are ready; give it the time that this takes"
        )
    deadline = yield clients[0], checks.within(timeout_s)
    return _as(deadline, Deadline)


def _until_ready(parts: Parts, deadline: Deadline, progress: Progress | None) -> Steps[None]:
    while waiting := [client for client, part in parts.items() if not (part.ready or part.ended)]:
        yield from _watch(parts, waiting, deadline)
        if progress is not None:
            progress(sum(part.done for part in parts.values()), sum(part.total for part in parts.values()))


def _complete(parts: Parts, deadline: Deadline) -> Steps[str]:
    """All parts are ready: complete each. One that cannot be reached does not keep the others from theirs."""
    failed: TransferQueueError | None = None
    for client, part in list(parts.items()):
        try:
            parts[client] = yield from _ask(client, m.EndPart(part.work, finish=True), m.PartProgress)
        except TransferQueueError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    while waiting := [client for client, part in parts.items() if not part.ended]:
        yield from _watch(parts, waiting, deadline)
    return ",".join(part.path for part in parts.values())


def _remove_older(parts: Parts, keep: int, deadline: Deadline) -> Steps[None]:
    """The cut is whole, so older ones may go. What fails leaves them to the next one."""
    yield from _quietly([(client, m.EndPart(part.work, finish=True, keep=keep)) for client, part in parts.items()])
    left = dict(parts)
    while left and not deadline.over:
        for client, part in list(left.items()):
            wait_s = min(deadline.left(), ROUND_S)
            try:
                ended = yield client, request_reply(m.WatchPart(part.work, part.total + 1, wait_s), m.PartProgress)
            except DeadlineExceeded:
                continue
            except TransferQueueError:
                del left[client]
                continue
            if ended.ended:
                del left[client]


def _give_up(parts: Parts) -> Steps[None]:
    """Give all parts up, and wait until their jobs have ended, so that others can begin. What fails is over anyway."""
    yield from _quietly([(client, m.EndPart(part.work, finish=False)) for client, part in parts.items()])
    yield from _quietly([(client, m.WatchPart(part.work, part.total + 1, ROUND_S)) for client, part in parts.items()])


def _watch(parts: Parts, waiting: Sequence[ClientSession], deadline: Deadline) -> Steps[None]:
    """Ask each coordinator how far it is; those in `waiting` may answer later. `DeadlineExceeded` after the deadline."""
    if deadline.over:
        listed = "; ".join(
            f"{parts[client].path}: {parts[client].done:,} of {parts[client].total:,} bytes" for client in waiting
        )
        raise DeadlineExceeded(
            f"these parts were not there within {deadline.wait_s:g} s: {listed}; all parts are given up: give more time"
        )
    for client, part in list(parts.items()):
        wait_s = min(deadline.left(), ROUND_S) if client in waiting else 0.0
        parts[client] = yield client, _watched(client, part, wait_s)


def _watched(client: ClientSession, part: m.PartProgress, wait_s: float) -> Operation[m.PartProgress]:
    done = max(part.done, 1) if part.cut else 0
    try:
        return (yield from request_reply(m.WatchPart(part.work, done, wait_s), m.PartProgress))
    except DeadlineExceeded as error:
        if wait_s == 0:
            raise _of(client, error) from error
        return part
    except TransferQueueError as error:
        raise _of(client, error) from error


def _ask(client: ClientSession, request: m.Request, kind: type[T]) -> Steps[T]:
    reply = yield client, _named(client, request)
    return _as(reply, kind)


def _named(client: ClientSession, request: m.Request) -> Operation[m.Message]:
    """Send a request. An error names the coordinator."""
    try:
        return (yield from request_reply(request, m.Message))
    except TransferQueueError as error:
        raise _of(client, error) from error


def _quietly(requests: Sequence[tuple[ClientSession, m.Request]]) -> Steps[None]:
    """Send each request to its coordinator. Errors are ignored: the coordinator ends by itself what it is not told to end."""
    for client, request in requests:
        try:
            yield client, request_reply(request, m.Message)
        except TransferQueueError:
            continue


def _of(client: ClientSession, error: TransferQueueError) -> TransferQueueError:
    return type(error)(f"{_name(client)}: {error}")


def _name(client: ClientSession) -> str:
    return f"coordinator {client.seat} at {client.address}"


def _as(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise UsageError(f"{type(value).__name__} is no {kind.__name__}")
    return value
