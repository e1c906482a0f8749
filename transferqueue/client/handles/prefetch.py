"""Batches fetched ahead of their use, in one event loop: what the loaders of both fronts share.

Rules:

1. At most `prefetch` batches are on their way or wait. They are leased one after the other, and handed over in that order.
2. Fetching is leasing and bringing the rows of each column together, off the loop: whoever takes the batch copies nothing more.
3. A batch that waits is kept as any batch is (see `keeping`): renewed at each third of its lease, so that who takes it has two
   thirds left. Its time limit is counted from when the loader was last asked for a batch; so what waits for a consumer that
   hangs goes back too. One that was lost (the server said so) is passed over: its rows are for others now.
4. A caller's wait begins when it asks. A fetch looks for rows that long on its own; then it rests until it is asked for, and
   waits on for what that caller's time still allows.
5. An error is raised where its batch would have come; asking again goes on. `EndOfTable` is the end.
6. What was not handed over when this closes is released, not failed. A cancelled `take` takes nothing.
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
from transferqueue.client.session.run import INLINE_WORK_BYTES, BlockingWork, Operation, run_async
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import DeadlineExceeded, EndOfTable, UsageError
from transferqueue.wire import messages as m

B = TypeVar("B", bound=BatchBase)


class PrefetchedLease(NamedTuple, Generic[B]):
    """A batch, and the lease that it is made of."""

    lent: BatchLease
    batch: B

    def hand_back(self) -> None:
        """Nobody takes it: its rows are ready again."""
        lent = self.lent
        if not lent.ended:
            reason = "its loader was closed"
            lent.client.connection.post(
                m.ReleaseRequest(table=lent.table, lease=lent.lease, token=lent.token, reason=reason)
            )
            lent.end("was released when its loader was closed")


class PrefetchSlot(Generic[B]):
    """One batch: leased in its turn, and loaded."""

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
        self.task.add_done_callback(_see)

    def ask(self) -> None:
        """Somebody waits for this batch, from now on (rule 4)."""
        self._until = self._client.clock() + self._wait_s
        self._asked.set()

    def stop(self) -> None:
        """Nobody will have it."""
        if not self.task.done():
            self.task.cancel()
        elif not self.task.cancelled() and self.task.exception() is None:
            self.task.result().hand_back()

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
    """Batches of one lease request, fetched ahead (see the rules above). make: what a batch is, to its front."""

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
        self._turn, self._taking = asyncio.Lock(), asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: EndOfTable | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """What it loads, for people."""
        return f'loader of task "{self._spec.request.task}" (table "{self._terms.name}")'

    async def take(self) -> B:
        """The next batch. Waits up to the request's time; raises what its fetching raised, `EndOfTable` at the end."""
        async with self._taking:
            while True:
                found = await self._next()
                if found is not None:
                    return found.batch

    async def aclose(self) -> None:
        """Release what was not taken; whoever waits in `take` is told. Again: nothing."""
        tasks = [fetch.task for fetch in self._fetches]
        self._close()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._taking:
            pass

    def abandon(self) -> None:
        """The same from a finalizer, in any thread; nobody waits for it."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._close)
            except RuntimeError:  # the loop has ended, and its tasks with it
                return

    async def _next(self) -> PrefetchedLease[B] | None:
        """The next batch; None: it was lost while it waited."""
        self._fill()
        fetch = self._fetches[0]
        fetch.ask()
        try:
            found = await asyncio.shield(fetch.task)
        except asyncio.CancelledError:
            self._check()
            raise
        except EndOfTable as end:
            self._end = end
            self._drop_fetches()
            raise
        except BaseException:
            self._fetches.popleft()
            raise
        self._fetches.popleft()
        self._fill()
        if found.lent.overdue:
            found.hand_back()
            return None
        for waiting in (found, *self._waiting()):
            waiting.lent.restart()
        found.batch._goes_on = True
        return found

    def _waiting(self) -> Iterator[PrefetchedLease[B]]:
        """The batches that are here, and that nobody has taken."""
        for fetch in self._fetches:
            task = fetch.task
            if task.done() and not task.cancelled() and task.exception() is None and not task.result().lent.overdue:
                yield task.result()

    def _fill(self) -> None:
        self._check()
        self._loop = asyncio.get_running_loop()
        while len(self._fetches) < self._prefetch:
            self._fetches.append(PrefetchSlot(self._client, self._turn, self._lease, self._spec.request.wait_s))

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"the {self.name} is closed; make another one")
        if self._end is not None:
            raise self._end.with_traceback(None)

    def _lease(self, wait_s: float) -> Operation[PrefetchedLease[B]]:
        spec = self._spec._replace(request=msgspec.structs.replace(self._spec.request, wait_s=wait_s))
        return lease.lease(
            self._client, self._terms, spec, lambda lent, leased: PrefetchedLease(lent, self._make(lent, leased))
        )

    def _close(self) -> None:
        self._closed = True
        self._drop_fetches()

    def _drop_fetches(self) -> None:
        while self._fetches:
            self._fetches.popleft().stop()


def _loaded(lease: Operation[PrefetchedLease[B]]) -> Operation[PrefetchedLease[B]]:
    """A batch with its columns loaded; if that fails, its rows go back."""
    found = yield from lease
    try:
        yield BlockingWork(INLINE_WORK_BYTES + 1, lambda: _load(found.batch))
    except BaseException:
        found.hand_back()
        raise
    return found


def _load(batch: BatchBase) -> None:
    for name in batch.fields:
        batch[name].load()


def _see(task: asyncio.Task[PrefetchedLease[B]]) -> None:
    """An error that nobody asked for is no news of the loop's."""
    if not task.cancelled():
        task.exception()
