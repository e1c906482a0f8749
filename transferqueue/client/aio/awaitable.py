"""A call that a caller awaits, or enters as a context manager at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from transferqueue.errors import UsageError
from transferqueue.errors.text import shown

A = TypeVar("A", bound=AbstractAsyncContextManager[Any])


class AwaitableContext(Coroutine[Any, Any, A]):
    """A call that a caller awaits or enters: ``await table.lease(...)``, ``async with table.lease(...) as batch``.

    It is a coroutine too, so that ``asyncio.create_task`` and task groups take it.
    """

    __slots__ = ("_made", "_make", "_running")

    def __init__(self, make: Callable[[], Coroutine[Any, Any, A]]) -> None:
        self._make = make
        self._made: A | None = None
        self._running: Coroutine[Any, Any, A] | None = None

    def __await__(self) -> Generator[Any, Any, A]:
        return self._make().__await__()

    def send(self, value: Any) -> Any:
        """Go on, as of a coroutine."""
        return self._run().send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an error, as of a coroutine."""
        return self._run().throw(*error)

    def close(self) -> None:
        """Never go on, as of a coroutine."""
        if self._running is not None:
            self._running.close()

    def _run(self) -> Coroutine[Any, Any, A]:
        if self._running is None:
            self._running = self._make()
        return self._running

    async def __aenter__(self) -> A:
        self._made = await self._make()
        await self._made.__aenter__()
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return None if self._made is None else await self._made.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # a type checker finds these mistakes by itself

        def __enter__(self) -> None:
            raise UsageError("an event loop enters this call; write async with instead of with")

        def __exit__(self, *error: object) -> None:
            raise UsageError("an event loop leaves this call; write async with instead of with")

        def __getattr__(self, name: str) -> None:
            if name.startswith(("_", "cr_", "gi_", "ag_")):  # Python and asyncio ask any coroutine for these
                raise AttributeError(name)
            raise UsageError(f"a call that is not awaited has no {name!r}; write (await ...).{name}, or async with")

        def __getitem__(self, name: object) -> None:
            raise UsageError(
                f"a call that is not awaited has no {shown(name)}; write (await ...)[{shown(name)}], or async with"
            )
