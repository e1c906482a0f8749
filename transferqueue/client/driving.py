"""Operations and the two ways to drive them.

An operation is a generator: it yields requests and is sent their replies, or thrown the errors they were
refused with. Bulk copying it yields too, as `Work`, so that an event loop can do it in a thread. It does
no I/O and knows no thread or loop (decision 7), so the sync and the async front cannot differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

import msgspec

from transferqueue.client.connection import Connection
from transferqueue.errors import ProtocolError
from transferqueue.limits import MIB
from transferqueue.wire import messages as m

T = TypeVar("T")
R = TypeVar("R", bound=m.Message)

INLINE_WORK_BYTES: Final = 4 * MIB
"""An event loop copies up to this much itself (under a millisecond); a thread takes what is more."""


class Work(msgspec.Struct, frozen=True):
    """Something to carry out that takes time in proportion to `nbytes`.

    abandon: of work that waits for others, and so never belongs into an event loop: has `run` end soon.
    """

    nbytes: int
    run: Callable[[], None]
    abandon: Callable[[], None] | None = None


Operation = Generator[m.Request | Work, Any, T]


def ask(request: m.Request, kind: type[R]) -> Operation[R]:
    """The reply to `request`, which is a `kind`."""
    reply = yield request
    if not isinstance(reply, kind):
        raise ProtocolError(f"{type(request).__name__} was answered with {type(reply).__name__}, not {kind.__name__}")
    return reply


def drive(connection: Connection, operation: Operation[T]) -> T:
    """Run an operation in this thread."""
    step: Callable[[Any], m.Request | Work] = operation.send
    given: Any = None
    try:
        while True:
            try:
                wanted = step(given)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                given = wanted.run() if isinstance(wanted, Work) else connection.call(wanted)  # type: ignore[func-returns-value]
                step = operation.send
            except BaseException as error:  # noqa: BLE001  (thrown into the operation, which cleans up and raises it)
                step, given = operation.throw, error
    finally:
        given = (
            None  # an error knows this frame, and so what was put: if the frame knew it too, both would stay for long
        )


async def adrive(connection: Connection, operation: Operation[T]) -> T:
    """Run an operation in this event loop."""
    step: Callable[[Any], m.Request | Work] = operation.send
    given: Any = None
    try:
        while True:
            try:
                wanted = step(given)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                given = await (_work(wanted) if isinstance(wanted, Work) else connection.acall(wanted))
                step = operation.send
            except BaseException as error:  # noqa: BLE001  (thrown into the operation, which cleans up and raises it)
                step, given = operation.throw, error
    finally:
        given = None  # as in `drive`


async def _work(work: Work) -> None:
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
