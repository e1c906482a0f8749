"""Operations, and how the two APIs run them.

An operation is a generator. It yields requests; the runner sends each, and sends its reply back into the generator or
throws the error that it was refused with. An operation with a timeout first yields `StartDeadline` and gets its
deadline. It yields copies of many bytes as `BlockingWork`, which an event loop runs in a thread. It does no I/O and
knows no thread or loop (docs/decisions/calls.md), so the two APIs cannot differ.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, Generic, TypeVar, overload

import msgspec

from transferqueue.client.session.calls import Deadline
from transferqueue.client.session.connection import Connection
from transferqueue.client.session.deferred_interrupts import DeferredInterrupts
from transferqueue.client.session.discard_reply import in_doubt
from transferqueue.errors import InternalError, ProtocolError, TransferQueueError, Unreachable
from transferqueue.limits import MIB
from transferqueue.wire import messages as m

T = TypeVar("T")
R = TypeVar("R", bound=m.Message)
E = TypeVar("E", bound=TransferQueueError)

INLINE_WORK_BYTES: Final = 4 * MIB
"""An event loop copies up to this much itself (under a millisecond), and has a thread copy more."""


class BlockingWork(msgspec.Struct, frozen=True):
    """Work whose time is in proportion to `nbytes`.

    `abandon` and `bound` are for work that waits for other processes, and so never runs in an event loop: `abandon`
    makes `run` end soon; `bound` is called before `run` with the deadline of the caller.
    """

    nbytes: int
    run: Callable[[], None]
    abandon: Callable[[], None] | None = None
    bound: Callable[[Deadline], None] | None = None


UNINTERRUPTED: Final = BlockingWork(0, lambda: None)
"""Yielded before an operation takes something without a request: as after any other work, no interrupt comes in the
steps that follow."""


class StartDeadline(msgspec.Struct, frozen=True):
    """The operation has `wait_s` seconds from now. The runner answers with the `Deadline`, and ends waits by it."""

    wait_s: float


Operation = Generator[m.Request | BlockingWork | StartDeadline, Any, T]


def request_reply(request: m.Request, kind: type[R]) -> Operation[R]:
    """Send `request`, and check that its reply is a `kind`."""
    reply = yield request
    if not isinstance(reply, kind):
        raise unexpected(request, reply, kind)
    return reply


def unexpected(request: m.Request, reply: m.Reply, kind: type[m.Message]) -> ProtocolError:
    """The error for a reply that is no `kind`."""
    return ProtocolError(f"{m.tag_of(request)} was answered with {m.tag_of(reply)}, not {m.tag_of(kind)}")


COMMITS: Final = (m.PutRequest, m.Update, m.Ack)
"""Requests that a pipeline does not wait for."""


class PipelinedOperation(Generic[T]):
    """An operation whose commit is on its way.

    `answer` waits for the reply and returns it, or raises the refusal of the commit. `abandon` gives the reply up.
    `nbytes` is the size of the columns that it commits.
    """

    __slots__ = ("_request", "abandon", "answer", "deadline", "nbytes", "operation")

    def __init__(
        self,
        operation: Operation[T],
        request: m.Request,
        started: tuple[Callable[..., Any], Callable[[], object]],
        deadline: Deadline | None,
    ) -> None:
        self.operation, self._request, self.deadline = operation, request, deadline
        self.answer, self.abandon = started
        columns = request.columns if isinstance(request, m.PutRequest | m.Update | m.Ack) else None
        self.nbytes = 0
        if columns is not None:
            self.nbytes = sum([block.nbytes for block in columns.blocks])
            self.nbytes += sum([len(value.data) for value in columns.inline])

    def unknown(self) -> Unreachable:
        """The error of a call whose answer is given up."""
        return Unreachable(f"the answer to {m.tag_of(self._request)} was not waited for{in_doubt(self._request)}")


@overload
def run_sync(
    connection: Connection,
    operation: Operation[T],
    *,
    answer: Callable[[DeferredInterrupts], Any] | None = None,
    deadline: Deadline | None = None,
) -> T: ...


@overload
def run_sync(
    connection: Connection, operation: Operation[T], *, pipelined: tuple[type[m.Message], ...]
) -> T | PipelinedOperation[T]: ...


def run_sync(
    connection: Connection,
    operation: Operation[T],
    *,
    pipelined: tuple[type[m.Message], ...] = (),
    answer: Callable[[DeferredInterrupts], Any] | None = None,
    deadline: Deadline | None = None,
) -> T | PipelinedOperation[T]:
    """Run an operation in this thread to its end, or until it sends a request that is one of `pipelined`, for which it
    does not wait.

    Once the operation has got something (a reply, memory), an interrupt comes in its waits and its `BlockingWork`, and
    before this returns, but not in its own steps, where it would be lost.

    Args:
        connection: to the server.
        operation: the operation.
        pipelined: kinds of requests that are not waited for; default: none.
        answer: waits for the reply of an operation that was held, before anything else; default None.
        deadline: of an operation that was held; default None.
    """
    step: Callable[[Any], m.Request | BlockingWork | StartDeadline] = operation.send
    sent: Any = None
    interrupts = DeferredInterrupts()
    if answer is not None:
        try:
            sent = answer(interrupts)
        except BaseException as error:  # noqa: BLE001  (thrown into the operation, as below)
            interrupts.begin()
            step, sent = operation.throw, error
    try:
        while True:
            try:
                wanted = step(sent)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except TransferQueueError as error:
                raise trimmed(error) from error.__cause__
            try:
                interrupts.end()
                if isinstance(wanted, StartDeadline):
                    sent = deadline = Deadline(connection.clock, wanted.wait_s)
                elif isinstance(wanted, BlockingWork):
                    sent = _bounded(wanted, deadline).run()  # type: ignore[func-returns-value]
                    interrupts.begin()
                elif pipelined and isinstance(wanted, pipelined):
                    return PipelinedOperation(operation, wanted, connection.start(wanted, deadline), deadline)
                else:
                    sent = connection.call(wanted, deadline, interrupts)
                step = operation.send
            except BaseException as error:  # noqa: BLE001  (thrown into the operation, which cleans up and raises it)
                interrupts.begin()
                step, sent = operation.throw, error
    finally:
        interrupts.end()
        sent = None  # an error holds this frame: a frame that held it too would keep the caller's values


@overload
async def run_async(
    connection: Connection,
    operation: Operation[T],
    *,
    answer: Callable[[], Awaitable[Any]] | None = None,
    deadline: Deadline | None = None,
) -> T: ...


@overload
async def run_async(
    connection: Connection, operation: Operation[T], *, pipelined: tuple[type[m.Message], ...]
) -> T | PipelinedOperation[T]: ...


async def run_async(
    connection: Connection,
    operation: Operation[T],
    *,
    pipelined: tuple[type[m.Message], ...] = (),
    answer: Callable[[], Awaitable[Any]] | None = None,
    deadline: Deadline | None = None,
) -> T | PipelinedOperation[T]:
    """`run_sync` for an event loop."""
    step: Callable[[Any], m.Request | BlockingWork | StartDeadline] = operation.send
    sent: Any = None
    interrupts = DeferredInterrupts()  # ended before each await, so other tasks do not see them
    if answer is not None:
        try:
            sent = await answer()
            interrupts.begin()
        except BaseException as error:  # noqa: BLE001  (thrown into the operation, as below)
            interrupts.begin()
            step, sent = operation.throw, error
    try:
        while True:
            try:
                wanted = step(sent)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except TransferQueueError as error:
                raise trimmed(error) from error.__cause__
            try:
                interrupts.end()
                if isinstance(wanted, StartDeadline):
                    sent = deadline = Deadline(connection.clock, wanted.wait_s)
                elif isinstance(wanted, BlockingWork):
                    sent = await _work(_bounded(wanted, deadline))  # type: ignore[func-returns-value]
                    interrupts.begin()
                elif pipelined and isinstance(wanted, pipelined):
                    return PipelinedOperation(operation, wanted, connection.astart(wanted, deadline), deadline)
                else:
                    sent = await connection.acall(wanted, deadline, interrupts)
                step = operation.send
            except BaseException as error:  # noqa: BLE001  (thrown into the operation, which cleans up and raises it)
                interrupts.begin()
                step, sent = operation.throw, error
    finally:
        interrupts.end()
        sent = None  # as in `run_sync`


def trimmed(error: E) -> E:
    """The error without the frames of this package: its text says everything, and the traceback then begins with the
    caller's line. An `InternalError` keeps them."""
    return error if isinstance(error, InternalError) else error.with_traceback(None)


def _bounded(work: BlockingWork, deadline: Deadline | None) -> BlockingWork:
    if deadline is not None and work.bound is not None:
        work.bound(deadline)
    return work


async def _work(work: BlockingWork) -> None:
    """Run it. A cancelled caller still waits until a copy has ended, since its memory is returned after that."""
    if work.nbytes <= INLINE_WORK_BYTES and work.abandon is None:
        work.run()
        return
    import asyncio

    running = asyncio.get_running_loop().run_in_executor(None, work.run)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        if work.abandon is not None:
            work.abandon()
        await asyncio.wait([running])
        raise
