"""Calls of the drop-in, written once for threads and for event loops.

A call is a coroutine. It awaits steps, each an operation of the queue's client or a question to the controller. `run`
carries out each step in the calling thread, `arun` in an event loop, where none of them takes a thread. The coroutine
itself does no I/O, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Final, Generic, ParamSpec, TypeVar

from transferqueue.client.client import ClientSession
from transferqueue.client.session.operation_runner import Operation, run_async, run_sync

T = TypeVar("T")
P = ParamSpec("P")
Steps = Coroutine[Any, Any, T]
Ask = Callable[..., Any]
"""Calls a method of the controller by name."""
AsyncAsk = Callable[..., Awaitable[Any]]


class CallStep(Generic[T]):
    """What a call waits for."""

    def __await__(self) -> Generator[CallStep[T], Any, T]:
        answer: T = yield self
        return answer

    def carry_out(self, ask: Ask) -> T:
        """Do it in this thread."""
        raise NotImplementedError

    async def acarry_out(self, ask: AsyncAsk) -> T:
        """Do it in an event loop."""
        raise NotImplementedError


class Operate(CallStep[T]):
    """An operation on the queue."""

    def __init__(self, client: ClientSession, operation: Operation[T]) -> None:
        self._client, self._operation = client, operation

    def carry_out(self, ask: Ask) -> T:
        """Run the operation."""
        return run_sync(self._client.connection, self._operation)

    async def acarry_out(self, ask: AsyncAsk) -> T:
        """Run the operation."""
        return await run_async(self._client.connection, self._operation)


class Question(CallStep[Any]):
    """A question to the controller."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self._name, self._arguments = name, arguments

    def carry_out(self, ask: Ask) -> Any:
        """Ask."""
        return ask(self._name, *self._arguments)

    async def acarry_out(self, ask: AsyncAsk) -> Any:
        """Ask."""
        return await ask(self._name, *self._arguments)


def no_controller(name: str, *arguments: Any) -> Any:
    """An `Ask` for calls that ask nothing."""
    raise NotImplementedError(f"there is no controller for {name}")


def run(steps: Steps[T], ask: Ask = no_controller) -> T:
    """Return the result of a call, in this thread."""
    go, sent = steps.send, None
    while True:
        try:
            step = go(sent)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            go, sent = steps.send, step.carry_out(ask)
        except BaseException as error:  # noqa: BLE001  (raised in the call, which may go on)
            go, sent = steps.throw, error


async def arun(steps: Steps[T], ask: AsyncAsk) -> T:
    """`run` for an event loop."""
    go, sent = steps.send, None
    while True:
        try:
            step = go(sent)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            go, sent = steps.send, await step.acarry_out(ask)
        except BaseException as error:  # noqa: BLE001  (as in `run`)
            go, sent = steps.throw, error


def named(wrapper: Callable[P, T], function: Callable[..., Any], prefix: str = "") -> Callable[P, T]:
    """The wrapper with the name and text of the function."""
    wraps(function)(wrapper)
    wrapper.__name__ = wrapper.__qualname__ = prefix + function.__name__
    if prefix:
        wrapper.__doc__ = f"`{function.__name__}`, for any event loop."
    return wrapper


ASYNC: Final = "async_"
