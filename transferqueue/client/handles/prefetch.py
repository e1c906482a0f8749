"""Prefetch batches in one event loop, for the loaders of both APIs.

1. At most `prefetch` batches are being fetched or are ready. They are leased one after the other, and taken in that
   order.
2. A fetch leases the rows and gathers each column in a thread, so that `take` copies nothing.
3. The client renews the lease of a ready batch at each third, like any other, so at least two thirds are left when it
   is taken. Its time limit counts from the last `take`: if the consumer hangs, its ready batches expire too. A batch
   whose lease was lost is skipped: others have its rows.
4. A caller's wait begins with its `take`. A fetch waits as long for rows on its own; then it pauses until its batch is
   asked for, and waits for the rest of that caller's time.
5. An error of a fetch is raised by the `take` that would have returned its batch; the next `take` continues.
   `EndOfTable` is final.
6. Closing releases the batches that were not taken, without counting an attempt. A cancelled `take` takes nothing.
7. No task outlives its loader: `aclose` returns, and `EndOfTable` is raised, after all fetches have ended.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec

from transferqueue.client.client import ClientSession
from transferqueue.client.handles.batch import BatchBase
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations import lease
from transferqueue.client.operations.lease import BatchLease, LeaseSpec
from transferqueue.client.session.operation_runner import INLINE_WORK_BYTES, BlockingWork, Operation, run_async
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import DeadlineExceeded, EndOfTable, UsageError
from transferqueue.errors.on_failure import OnFailure
from transferqueue.wire import messages as m

B = TypeVar("B", bound=BatchBase)


class PrefetchedLease(NamedTuple, Generic[B]):
    """A batch and its lease."""

    lease: BatchLease
    batch: B

    def release(self) -> None:
        """Release the rows of a batch that no caller takes."""
        lease = self.lease
        if not lease.ended:
            reason = "its loader was closed"
            lease.client.connection.post(
                m.ReleaseRequest(table=lease.table, lease=lease.number, token=lease.token, reason=reason)
            )
            lease.end("was released when its loader was closed")


class PrefetchSlot(Generic[B]):
    """One batch that is leased when the slots before it are, and loaded."""

    def __init__(
        self,
        client: ClientSession,
        turn: asyncio.Lock,
        lease: Callable[[float], Operation[PrefetchedLease[B]]],
        wait_s: float,
    ) -> None:
        self._client, self._turn, self._lease = client, turn, lease
        self._wait_s = wait_s
        self._asked = asyncio.Event()
        self._until = math.inf
        self.task = asyncio.create_task(self._fetch())
        self.task.add_done_callback(_retrieve_error)

    def ask(self) -> None:
        """A caller waits for this batch from now on (rule 4)."""
        self._until = self._client.clock() + self._wait_s
        self._asked.set()

    def stop(self) -> None:
        """End the fetch of a batch that no caller takes, or release the batch."""
        if not self.task.done():
            self.task.cancel()
        elif not self.task.cancelled() and self.task.exception() is None:
            self.task.result().release()

    async def _fetch(self) -> PrefetchedLease[B]:
        async with self._turn:
            return await self._leased()

    async def _leased(self) -> PrefetchedLease[B]:
        wait_s = self._wait_s
        while True:
            try:
                return await run_async(self._client.connection, _loaded(self._lease(wait_s)))
            except DeadlineExceeded:
                if self._asked.is_set() and self._client.clock() >= self._until:
                    raise
            await self._asked.wait()
            wait_s = max(0.0, self._until - self._client.clock())


class Prefetcher(Generic[B]):
    """Prefetches batches of one lease request (see the module).

    Args:
        client: session that leases.
        terms: of the table.
        spec: the lease request.
        make: makes a batch of the API.
        prefetch: the most batches that are fetched or ready.
    """

    def __init__(
        self,
        client: ClientSession,
        terms: TableInfo,
        spec: LeaseSpec,
        make: Callable[[BatchLease, m.Leased], B],
        prefetch: int,
    ) -> None:
        self._client, self._terms, self._spec, self._make = client, terms, spec, make
        self._prefetch = checks.positive("prefetch", prefetch)
        self._fetches: deque[PrefetchSlot[B]] = deque()
        self._running: set[asyncio.Task[PrefetchedLease[B]]] = set()
        """The fetches that have not ended, those that were stopped included: a loop itself holds its tasks by weak
        references."""
        self._turn, self._taking = asyncio.Lock(), asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: EndOfTable | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """What it loads, for error texts."""
        return f'loader of task "{self._spec.request.task}" (table "{self._terms.name}")'

    async def take(self) -> B:
        """The next batch. Waits up to the request's time; raises what its fetching raised, `EndOfTable` at the end."""
        async with self._taking:
            while True:
                prefetched = await self._next()
                if prefetched is not None:
                    return prefetched.batch

    async def aclose(self) -> None:
        """Release the batches that were not taken, and end each waiting `take` with an error. Again: nothing."""
        self._close()
        await self._have_ended()
        async with self._taking:
            pass

    def abandon(self) -> None:
        """Close from a finalizer, in any thread, without waiting."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._close)
            except RuntimeError:  # the loop has ended, and its tasks with it
                return

    async def _next(self) -> PrefetchedLease[B] | None:
        """The next batch; None if its lease was lost before it was taken."""
        self._fill()
        fetch = self._fetches[0]
        fetch.ask()
        try:
            prefetched = await asyncio.shield(fetch.task)
        except asyncio.CancelledError:
            self._check()
            raise
        except EndOfTable as end:
            self._end = end
            self._drop_fetches()
            await self._have_ended()
            raise
        except BaseException:
            self._fetches.popleft()
            raise
        self._fetches.popleft()
        self._fill()
        if prefetched.lease.overdue:
            prefetched.release()
            return None
        for waiting in (prefetched, *self._ready()):
            waiting.lease.restart()
        prefetched.batch._goes_on = True
        return prefetched

    def _ready(self) -> Iterator[PrefetchedLease[B]]:
        """The batches that are ready and not taken."""
        for fetch in self._fetches:
            task = fetch.task
            if task.done() and not task.cancelled() and task.exception() is None and not task.result().lease.overdue:
                yield task.result()

    def _fill(self) -> None:
        self._check()
        self._loop = asyncio.get_running_loop()
        while len(self._fetches) < self._prefetch:
            fetch = PrefetchSlot(self._client, self._turn, self._lease, self._spec.request.wait_s)
            self._running.add(fetch.task)
            fetch.task.add_done_callback(self._running.discard)
            self._fetches.append(fetch)

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"the {self.name} is closed; make another one")
        if self._end is not None:
            raise self._end.with_traceback(None)

    def _lease(self, wait_s: float) -> Operation[PrefetchedLease[B]]:
        spec = self._spec._replace(request=msgspec.structs.replace(self._spec.request, wait_s=wait_s))
        return lease.lease(
            self._client, self._terms, spec, lambda lease, leased: PrefetchedLease(lease, self._make(lease, leased))
        )

    def _close(self) -> None:
        self._closed = True
        self._drop_fetches()

    def _drop_fetches(self) -> None:
        while self._fetches:
            self._fetches.popleft().stop()

    async def _have_ended(self) -> None:
        """Wait until the fetches that were stopped have ended, which is at once, or when a copy of columns has been
        made."""
        if self._running:
            await asyncio.wait(self._running.copy())


def _loaded(lease: Operation[PrefetchedLease[B]]) -> Operation[PrefetchedLease[B]]:
    """Lease a batch and load its columns. If that fails, release it."""
    prefetched = yield from lease
    with OnFailure(prefetched.release):
        yield BlockingWork(INLINE_WORK_BYTES + 1, lambda: _load(prefetched.batch))
    return prefetched


def _load(batch: BatchBase) -> None:
    for name in batch.fields:
        batch[name].load()


def _retrieve_error(task: asyncio.Task[PrefetchedLease[B]]) -> None:
    """Retrieve the error of a fetch that no caller awaits, so that the loop does not log it."""
    if not task.cancelled():
        task.exception()
