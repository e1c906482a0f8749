"""The asynchronous front: the same names as the synchronous one, awaitable. What is not said here is said there.

A cancelled wait is an interrupted one: nothing is stranded, and the connection stays usable. Values over
`INLINE_WORK_BYTES` are copied in a thread; the caller must not change them before the call returns.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.handles import weights as weighing
from transferqueue.client.handles.coordinators import QueueBase
from transferqueue.client.handles.prefetch import Prefetcher
from transferqueue.client.operations import lease as leasing
from transferqueue.client.operations import publish as composing
from transferqueue.client.operations import snapshot
from transferqueue.client.operations import tables as verbs
from transferqueue.client.operations.facts import Floats, GivenFacts, Ints, Keys, TagsGiven
from transferqueue.client.operations.rows import Rows
from transferqueue.client.operations.snapshot import SNAPSHOT_S, Progress
from transferqueue.client.session.run import Operation, T, run_async
from transferqueue.client.sync.batch import GIVEN_BACK, BatchBase
from transferqueue.client.sync.loader import AsyncLoader
from transferqueue.client.sync.reservation import ReservationBase, reservation_id
from transferqueue.client.sync.table import TableBase
from transferqueue.errors import EndOfTable, LeaseExpired, TransferQueueError, UsageError
from transferqueue.limits import TIMEOUT_S_DEFAULT, Limits
from transferqueue.policies import Acked, Pacing, Predicate, Retention, Task
from transferqueue.schema import Field
from transferqueue.storage.elements.process_bound import Staying

A = TypeVar("A", bound=AbstractAsyncContextManager[Any])


class AwaitableContext(Coroutine[Any, Any, A]):
    """Something that is awaited, or entered at once: ``await table.lease(...)``, ``async with table.lease(...) as batch``.

    A coroutine too, so that ``asyncio.create_task`` and task groups take it.
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


class AsyncBatch(BatchBase):
    """`Batch` for an event loop: ``async with``, and its verbs are awaited. Columns and facts are the same."""

    async def ack(
        self,
        /,
        rows: Any = None,
        *,
        group_id: Ints = None,
        group_size: Ints = None,
        ordinal: Ints = None,
        policy_version: Ints = None,
        policy_version_max: Ints = None,
        tokens: Ints = None,
        priority: Floats = None,
        key: Keys = None,
        tags: TagsGiven = None,
        step: int = -1,
        **columns: Any,
    ) -> None:
        """As `Batch.ack`."""
        facts = GivenFacts(
            group_id=group_id,
            group_size=group_size,
            ordinal=ordinal,
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            key=key,
            tags=tags,
        )
        await self._drive(leasing.ack(self._lent, rows, facts, columns, step))

    async def drop(self, reason: str, rows: Any = None) -> None:
        """As `Batch.drop`."""
        await self._drive(leasing.drop(self._lent, reason, rows))

    async def release(
        self,
        /,
        rows: Any = None,
        *,
        failed: bool = False,
        reason: str = "",
        policy_version: Ints = None,
        policy_version_max: Ints = None,
        tokens: Ints = None,
        priority: Floats = None,
        tags: TagsGiven = None,
        **columns: Any,
    ) -> None:
        """As `Batch.release`."""
        facts = GivenFacts(
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            tags=tags,
        )
        await self._drive(leasing.release(self._lent, rows, failed, reason, facts, columns))

    async def renew(self, lease_s: float | None = None) -> float:
        """As `Batch.renew`."""
        self._lease_s = await self._drive(leasing.renew(self._lent, lease_s))
        return self._lease_s

    async def __aenter__(self) -> Self:
        self._check_enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None and not self._lent.ended:
            try:
                await self.ack()
            except UsageError as refused:
                refused.add_note(GIVEN_BACK)
                await self._give_back(refused)
                raise
            except LeaseExpired as late:
                if not self._is_passed_over(late):
                    raise
            return False
        if error is None or self._is_passed_over(error):
            return error is not None
        if not self._lent.ended:
            await self._give_back(error)
        return False

    async def _give_back(self, error: BaseException) -> None:
        """As `Batch._give_back`."""
        failed, reason = leasing.failure(error)
        try:
            await self.release(failed=failed, reason=reason)
        except TransferQueueError as late:  # the first error is the one to see
            error.add_note(f"and its batch could not be released: {late}")
        finally:
            self._lent.end("was released")

    async def _drive(self, operation: Operation[T]) -> T:
        return await run_async(self._lent.client.connection, operation)


class AsyncReservation(ReservationBase):
    """`Reservation` for an event loop."""

    async def release(self, rows: int | None = None) -> None:
        """As `Reservation.release`."""
        await run_async(self._client.connection, verbs.unreserve(self._terms, self.id, rows))
        self.used(self.left if rows is None else rows)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.give_up()
        elif self.left:
            await self.release()


class AsyncTable(TableBase):
    """`Table` for an event loop."""

    async def put(
        self,
        table: Any = None,
        /,
        *,
        group_id: Ints = None,
        group_size: Ints = None,
        ordinal: Ints = None,
        policy_version: Ints = None,
        policy_version_max: Ints = None,
        tokens: Ints = None,
        priority: Floats = None,
        key: Keys = None,
        tags: TagsGiven = None,
        reservation: AsyncReservation | None = None,
        timeout_s: float | None = TIMEOUT_S_DEFAULT,
        **columns: Any,
    ) -> NDArray[np.int64]:
        """As `Table.put`."""
        facts = GivenFacts(
            group_id=group_id,
            group_size=group_size,
            ordinal=ordinal,
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            key=key,
            tags=tags,
        )
        facts, columns = facts.with_table(table, columns)
        number = reservation_id(self._terms, reservation)
        rows = await self._drive(verbs.put(self._client, self._terms, facts, columns, number, timeout_s))
        if reservation is not None:
            reservation.used(len(rows))
        return rows

    async def update(
        self,
        /,
        rows: Any,
        *,
        overwrite: bool = False,
        group_id: Ints = None,
        group_size: Ints = None,
        ordinal: Ints = None,
        policy_version: Ints = None,
        policy_version_max: Ints = None,
        tokens: Ints = None,
        priority: Floats = None,
        key: Keys = None,
        tags: TagsGiven = None,
        **columns: Any,
    ) -> None:
        """As `Table.update`."""
        facts = GivenFacts(
            group_id=group_id,
            group_size=group_size,
            ordinal=ordinal,
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            key=key,
            tags=tags,
        )
        await self._drive(verbs.update(self._client, self._terms, rows, facts, columns, overwrite))

    def lease(
        self,
        task: str,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        groups: int | None = None,
        at_least: int | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
        where: Predicate | Iterable[Predicate] = (),
        lease_s: float | None = None,
        time_limit_s: float | None = None,
        fields: Sequence[str] | None = None,
        rank: int = 0,
        world: int = 1,
        replica: tuple[int, int] | None = None,
    ) -> AwaitableContext[AsyncBatch]:
        """As `Table.lease`: ``batch = await table.lease(...)``, or ``async with table.lease(...) as batch``."""
        request = leasing.lease_request(
            self.name,
            task,
            rows=rows,
            tokens=tokens,
            groups=groups,
            at_least=at_least,
            timeout_s=timeout_s,
            where=where,
            lease_s=lease_s,
            fields=fields,
            rank=rank,
            world=world,
            replica=replica,
        )
        limit_s = leasing.time_limit(time_limit_s)
        return AwaitableContext(
            lambda: self._drive(leasing.lease(self._client, self._terms, request, AsyncBatch, limit_s))
        )

    async def leases(
        self,
        task: str,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        groups: int | None = None,
        at_least: int | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
        where: Predicate | Iterable[Predicate] = (),
        lease_s: float | None = None,
        time_limit_s: float | None = None,
        fields: Sequence[str] | None = None,
        rank: int = 0,
        world: int = 1,
        replica: tuple[int, int] | None = None,
    ) -> AsyncIterator[AsyncBatch]:
        """As `Table.leases`: ``async for batch in table.leases(...): async with batch: ...``."""
        while True:
            try:
                batch = await self.lease(
                    task,
                    rows=rows,
                    tokens=tokens,
                    groups=groups,
                    at_least=at_least,
                    timeout_s=timeout_s,
                    where=where,
                    lease_s=lease_s,
                    time_limit_s=time_limit_s,
                    fields=fields,
                    rank=rank,
                    world=world,
                    replica=replica,
                )
            except EndOfTable:
                return
            batch._goes_on = True
            yield batch
            del batch  # the caller's alone

    def loader(
        self,
        task: str,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        groups: int | None = None,
        at_least: int | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
        where: Predicate | Iterable[Predicate] = (),
        lease_s: float | None = None,
        time_limit_s: float | None = None,
        fields: Sequence[str] | None = None,
        rank: int = 0,
        world: int = 1,
        replica: tuple[int, int] | None = None,
        prefetch: int = 2,
    ) -> AsyncLoader:
        """As `Table.loader`: ``async for batch in table.loader(...): async with batch: ...``; `aclose` ends it early."""
        request = leasing.lease_request(
            self.name,
            task,
            rows=rows,
            tokens=tokens,
            groups=groups,
            at_least=at_least,
            timeout_s=timeout_s,
            where=where,
            lease_s=lease_s,
            fields=fields,
            rank=rank,
            world=world,
            replica=replica,
        )
        limit_s = leasing.time_limit(time_limit_s)
        return AsyncLoader(Prefetcher(self._client, self._terms, request, AsyncBatch, prefetch, limit_s))

    def reserve(
        self, rows: int, *, policy_version: int | None = None, timeout_s: float = TIMEOUT_S_DEFAULT
    ) -> AwaitableContext[AsyncReservation]:
        """As `Table.reserve`; awaited, or entered at once."""

        async def make() -> AsyncReservation:
            reserved = await self._drive(verbs.reserve(self._terms, rows, policy_version, timeout_s))
            return AsyncReservation(self._client, self._terms, reserved)

        return AwaitableContext(make)

    async def advance(self, version: int, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """As `Table.advance`."""
        await self._drive(verbs.advance(self._terms, version, timeout_s))

    async def checkpointed(self, step: int, *, task: str | None = None) -> int:
        """See `Table.checkpointed`."""
        return await self._drive(verbs.checkpointed(self._terms, step, task))

    async def rollback(self, step: int, *, task: str | None = None, version: int | None = None) -> int:
        """See `Table.rollback`."""
        return await self._drive(verbs.rollback(self._terms, step, task, version))

    async def cursor(self, start: int = 0) -> int:
        """See `Table.cursor`."""
        return await self._drive(verbs.cursor(self._terms, start))

    async def seal(self) -> None:
        """As `Table.seal`."""
        await self._drive(verbs.seal(self._terms))

    async def read(
        self,
        rows: Any = None,
        *,
        where: Predicate | Iterable[Predicate] = (),
        fields: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> Rows:
        """As `Table.read`."""
        return await self._drive(verbs.read(self._client, self._terms, rows, where, fields, limit))

    async def find(self, keys: str | Sequence[str]) -> NDArray[np.int64]:
        """As `Table.find`."""
        return await self._drive(verbs.find(self._terms, keys))

    async def drop(self, rows: Any, reason: str) -> int:
        """As `Table.drop`."""
        return await self._drive(verbs.drop(self._terms, rows, reason))

    async def delete(self, rows: Any) -> int:
        """As `Table.delete`."""
        return await self._drive(verbs.delete(self._terms, rows))

    async def add_task(self, task: Task) -> None:
        """As `Table.add_task`."""
        await self._drive(verbs.add_task(self._client, self._terms, task))

    async def add_fields(self, fields: Sequence[Field]) -> None:
        """As `Table.add_fields`."""
        await self._drive(verbs.add_fields(self._client, self._terms, fields))

    async def stats(self) -> dict[str, Any]:
        """As `Table.stats`."""
        return await self._drive(verbs.observe_table("stats", self.name))

    async def audit(self) -> dict[str, Any]:
        """As `Table.audit`."""
        return await self._drive(verbs.observe_table("audit", self.name))

    async def _drive(self, operation: Operation[T]) -> T:
        return await run_async(self._client.connection, operation)


class AsyncWeightChannel(Staying, weighing.WeightChannelBase):
    """`WeightChannel` for an event loop."""

    elsewhere: ClassVar[str] = (
        "pass queue.address and the name of the channel, and open it there: tq.connect(address).weights(name)"
    )

    async def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        adapter: str | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        """As `WeightChannel.publish`."""
        await self._drive(composing.publish(self._client, self._name, self._keep, version, tensors, adapter, timeout_s))

    async def mirror(self, weights: weighing.Weights, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """As `WeightChannel.mirror`."""
        await self._drive(weighing.mirror(self._client, self._name, self._keep, weights, timeout_s))

    async def pull(
        self,
        above: int = -1,
        *,
        version: int | None = None,
        since: weighing.Weights | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> weighing.Weights:
        """As `WeightChannel.pull`."""
        return await self._drive(weighing.pull(self._client, self._name, above, version, since, timeout_s))

    async def applied(self, version: int) -> None:
        """As `WeightChannel.applied`."""
        await self._drive(weighing.applied(self._name, version))

    @asynccontextmanager
    async def turn(
        self, *, at_once: int = 1, length_s: float = weighing.TURN_S, timeout_s: float = TIMEOUT_S_DEFAULT
    ) -> AsyncGenerator[None]:
        """As `WeightChannel.turn`."""
        await self._drive(weighing.take_turn(self._name, at_once, length_s, timeout_s))
        try:
            yield
        finally:
            await self._drive(weighing.end_turn(self._name))

    async def _drive(self, operation: Operation[T]) -> T:
        return await run_async(self._client.connection, operation)


class AsyncQueue(QueueBase):
    """`Queue` for event loops, any of them and several at once; what `transferqueue.aconnect` gives."""

    async def create_table(
        self,
        name: str,
        *,
        fields: Sequence[Field] = (),
        tasks: Sequence[Task] = (),
        limits: Limits = Limits(),  # noqa: B008  (frozen)
        pacing: Pacing | None = None,
        retention: Retention = Acked(),  # noqa: B008  (frozen)
        exist_ok: bool = False,
        replicas: int = 1,
        extra_fields: bool | None = None,
    ) -> AsyncTable:
        """As `Queue.create_table`."""
        client = self._of(name)
        operation = verbs.create_table(
            client, name, fields, tasks, limits, pacing, retention, exist_ok, replicas, extra_fields
        )
        return AsyncTable(client, await run_async(client.connection, operation))

    async def table(self, name: str, timeout_s: float | None = None) -> AsyncTable:
        """As `Queue.table`."""
        client = self._of(name)
        return AsyncTable(client, await run_async(client.connection, verbs.open_table(client, name, timeout_s)))

    async def tables(self) -> list[str]:
        """As `Queue.tables`."""
        return sorted([name for found in await self._each(verbs.tables) for name in found])

    async def drop_table(self, name: str, *, empty: bool = False) -> None:
        """As `Queue.drop_table`."""
        client = self._of(name)
        await run_async(client.connection, verbs.drop_table(client, name, empty))

    def weights(self, channel: str, keep: int = 2) -> AsyncWeightChannel:
        """As `Queue.weights`; not awaited."""
        return AsyncWeightChannel(self._of(channel), *weighing.channel_name(channel, keep))

    async def stats(self) -> dict[str, Any]:
        """As `Queue.stats`."""
        return self._together(await self._each(lambda: self._look("stats")))

    async def audit(self) -> dict[str, Any]:
        """As `Queue.audit`."""
        return self._together(await self._each(lambda: verbs.observe("audit")))

    async def doctor(self, table: str | None = None) -> dict[str, Any]:
        """As `Queue.doctor`."""
        if table:
            return await run_async(self._of(table).connection, verbs.observe("doctor", table))
        return self._together(await self._each(lambda: self._look("doctor")))

    async def inspect(self, table: str, row: int) -> dict[str, Any]:
        """As `Queue.inspect`."""
        return await run_async(self._of(table).connection, verbs.observe("row", table, row))

    async def sessions(self) -> dict[str, Any]:
        """As `Queue.sessions`."""
        return self._together(await self._each(lambda: self._look("sessions")))

    async def drain_shard(self, number: int) -> None:
        """See `Queue.drain_shard`."""
        await run_async(self._client.connection, verbs.drain_shard(number))

    async def snapshot(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 2,
        timeout_s: float = SNAPSHOT_S,
        progress: Progress | None = None,
    ) -> str:
        """See `Queue.snapshot`."""
        client = self._client
        return await run_async(client.connection, snapshot.snapshot(client, path, keep, timeout_s, progress))

    async def restore(
        self, path: str | os.PathLike[str], *, timeout_s: float = SNAPSHOT_S, progress: Progress | None = None
    ) -> str:
        """See `Queue.restore`."""
        client = self._client
        return await run_async(client.connection, snapshot.restore(client, path, timeout_s, progress))

    async def close(self) -> None:
        """As `Queue.close`."""
        for client in self._clients:
            await asyncio.to_thread(client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _each(self, asking: Callable[[], Operation[T]]) -> list[T]:
        """What each coordinator answers, one after the other."""
        return [await run_async(client.connection, asking()) for client in self._clients]
