"""An asyncio event loop in a background thread, for engines and servers that are asynchronous, used by methods that
block."""

from __future__ import annotations

import asyncio
import queue as queues
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from transferqueue.adapters.protocols import Completion, Completions
from transferqueue.errors import DeadlineExceeded, Disconnected

T = TypeVar("T")

CANCEL_S: Final = 10.0
"""Time that cancelled coroutines get to end."""


class BackgroundLoop:
    """A running event loop in a thread of its own, called from other threads.

    Args:
        name: of the thread, and of the loop's owner in error texts.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check(self) -> None:
        """Raise `Disconnected` after `close`."""
        if self._closed:
            raise Disconnected(f"the {self._name} was closed")

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop. Returns at once.

        Args:
            coroutine: to run.

        Returns:
            The future of its result.

        Raises:
            Disconnected: the loop was closed.
        """
        if self._closed:
            coroutine.close()
            self.check()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Run a coroutine on the loop and return its result. Blocks.

        Args:
            coroutine: to run.
            timeout_s: seconds until it is cancelled.
            what: the beginning of the text of `DeadlineExceeded`.

        Raises:
            DeadlineExceeded: it did not end in time.
            Disconnected: the loop was closed.
        """
        waiting = self.submit(coroutine)
        try:
            return waiting.result(timeout_s)
        except TimeoutError as error:
            if waiting.done() and not waiting.cancelled():
                raise  # the coroutine's own
            waiting.cancel()
            raise DeadlineExceeded(f"{what} after {timeout_s:g} s") from error

    def close(self) -> None:
        """Cancel the coroutines on the loop, wait at most 10 s for them, and stop the loop and its thread.

        A second call does nothing.
        """
        if not self._closed:
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
            wait([ending], timeout=CANCEL_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def as_finished(
        self, jobs: Sequence[Callable[[], Coroutine[Any, Any, Completion]]], timeout_s: float
    ) -> Completions:
        """Run all jobs at once, and yield each result when it is ready.

        The first job that raises ends all others, and its error is raised. Closing the iterator cancels the jobs that
        are left.

        Args:
            jobs: functions without arguments that return coroutines.
            timeout_s: seconds until all must be finished.

        Raises:
            DeadlineExceeded: not all were finished in time.
            Disconnected: the loop was closed.
        """
        deadline = time.monotonic() + timeout_s
        finished: queues.SimpleQueue[Completion | BaseException] = queues.SimpleQueue()
        running = self.submit(_run_all(jobs, finished))
        try:
            for _ in jobs:
                yield _next(finished, deadline, timeout_s)
        finally:
            running.cancel()


async def _cancel_all() -> None:
    running = asyncio.all_tasks() - {asyncio.current_task()}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _run_all(
    jobs: Sequence[Callable[[], Coroutine[Any, Any, Completion]]],
    finished: queues.SimpleQueue[Completion | BaseException],
) -> None:
    async def one(job: Callable[[], Coroutine[Any, Any, Completion]]) -> None:
        finished.put(await job())

    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(one(job))
    except* Exception as failures:  # noqa: BLE001  (raised where the completions are awaited)
        finished.put(failures.exceptions[0])


def _next(finished: queues.SimpleQueue[Completion | BaseException], deadline: float, timeout_s: float) -> Completion:
    try:
        result = finished.get(timeout=max(0.0, deadline - time.monotonic()))
    except queues.Empty as error:
        raise DeadlineExceeded(f"the request was not finished after {timeout_s:g} s") from error
    if isinstance(result, BaseException):
        raise result
    return result
