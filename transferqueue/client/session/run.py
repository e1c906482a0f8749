"""Operations and the two ways to drive them.

An operation is a generator: it yields requests and is sent their replies, or thrown the errors they were
refused with. It begins with the time that its caller gave it, if any (`Within`). Bulk copying it yields too, as `BlockingWork`, so that an event loop can do it in a thread. It does
no I/O and knows no thread or loop (decision 7), so the sync and the async front cannot differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

import msgspec

from transferqueue.client.session.connection import Connection
from transferqueue.client.session.deadline import Deadline
from transferqueue.errors import InternalError, ProtocolError, TransferQueueError
from transferqueue.limits import MIB
from transferqueue.wire import messages as m

T = TypeVar("T")
R = TypeVar("R", bound=m.Message)
E = TypeVar("E", bound=TransferQueueError)

INLINE_WORK_BYTES: Final = 4 * MIB
"""An event loop copies up to this much itself (under a millisecond); a thread takes what is more."""


class BlockingWork(msgspec.Struct, frozen=True):
    """Something to carry out that takes time in proportion to `nbytes`.

    abandon: of work that waits for others, and so never belongs into an event loop: has `run` end soon.
    bound: of such work too: tells it the deadline of the caller, before `run`.
    """

    nbytes: int
    run: Callable[[], None]
    abandon: Callable[[], None] | None = None
    bound: Callable[[Deadline], None] | None = None


class Within(msgspec.Struct, frozen=True):
    """The caller gave this operation so many seconds, from now on. Whoever drives it answers with the `Deadline`, and keeps it."""

    wait_s: float


Operation = Generator[m.Request | BlockingWork | Within, Any, T]


def request_reply(request: m.Request, kind: type[R]) -> Operation[R]:
    """The reply to `request`, which is a `kind`."""
    reply = yield request
    if not isinstance(reply, kind):
        raise ProtocolError(f"{m.tag_of(request)} was answered with {m.tag_of(reply)}, not {m.tag_of(kind)}")
    return reply


def run_sync(connection: Connection, operation: Operation[T]) -> T:
    """Run an operation in this thread."""
    step: Callable[[Any], m.Request | BlockingWork | Within] = operation.send
    given: Any = None
    deadline: Deadline | None = None
    try:
        while True:
            try:
                wanted = step(given)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except TransferQueueError as error:
                raise trimmed(error) from error.__cause__
            try:
                if isinstance(wanted, Within):
                    given = deadline = Deadline(connection.clock, wanted.wait_s)
                elif isinstance(wanted, BlockingWork):
                    given = _bounded(wanted, deadline).run()  # type: ignore[func-returns-value]
                else:
                    given = connection.call(wanted, deadline)
                step = operation.send
            except BaseException as error:  # noqa: BLE001  (thrown into the operation, which cleans up and raises it)
                step, given = operation.throw, error
    finally:
        given = (
            None  # an error knows this frame, and so what was put: if the frame knew it too, both would stay for long
        )


async def run_async(connection: Connection, operation: Operation[T]) -> T:
    """Run an operation in this event loop."""
    step: Callable[[Any], m.Request | BlockingWork | Within] = operation.send
    given: Any = None
    deadline: Deadline | None = None
    try:
        while True:
            try:
                wanted = step(given)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except TransferQueueError as error:
                raise trimmed(error) from error.__cause__
            try:
                if isinstance(wanted, Within):
                    given = deadline = Deadline(connection.clock, wanted.wait_s)
                elif isinstance(wanted, BlockingWork):
                    given = await _work(_bounded(wanted, deadline))  # type: ignore[func-returns-value]
                else:
                    given = await connection.acall(wanted, deadline)
                step = operation.send
            except BaseException as error:  # noqa: BLE001  (thrown into the operation, which cleans up and raises it)
                step, given = operation.throw, error
    finally:
        given = None  # as in `run_sync`


def trimmed(error: E) -> E:
    """The error without the frames of this package that it passed: its text is complete, and what helps is the caller's own
    line, which comes first then. A defect of the queue keeps them."""
    return error if isinstance(error, InternalError) else error.with_traceback(None)


def _bounded(work: BlockingWork, deadline: Deadline | None) -> BlockingWork:
    if deadline is not None and work.bound is not None:
        work.bound(deadline)
    return work


async def _work(work: BlockingWork) -> None:
    """Carry it out. A cancelled caller still waits for a copy to end: its memory is given back after that."""
    if work.nbytes <= INLINE_WORK_BYTES and work.abandon is None:
        work.run()
        return
    running = asyncio.get_running_loop().run_in_executor(None, work.run)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        if work.abandon is not None:
            work.abandon()
        await asyncio.wait([running])
        raise
