"""The table for event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.aio.awaitable import AwaitableContext
from transferqueue.client.aio.batch import AsyncBatch
from transferqueue.client.aio.loader import AsyncLoader
from transferqueue.client.aio.reservation import AsyncReservation
from transferqueue.client.handles.prefetch import Prefetcher
from transferqueue.client.handles.reservation import reservation_id
from transferqueue.client.handles.table import TableBase
from transferqueue.client.operations import lease, tables
from transferqueue.client.operations.facts import Floats, GivenFacts, Ints, Keys, TagsGiven
from transferqueue.client.operations.rows import Rows
from transferqueue.client.session.run import Operation, T, run_async
from transferqueue.errors import EndOfTable
from transferqueue.limits import TIMEOUT_S_DEFAULT
from transferqueue.policies import Predicate, Task
from transferqueue.schema import Field


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
        rows = await self._drive(tables.put(self._client, self._terms, facts, columns, number, timeout_s))
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
        await self._drive(tables.update(self._client, self._terms, rows, facts, columns, overwrite))

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
        request = lease.lease_request(
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
        limit_s = lease.time_limit(time_limit_s)
        return AwaitableContext(
            lambda: self._drive(lease.lease(self._client, self._terms, request, AsyncBatch, limit_s))
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
        request = lease.lease_request(
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
        limit_s = lease.time_limit(time_limit_s)
        return AsyncLoader(Prefetcher(self._client, self._terms, request, AsyncBatch, prefetch, limit_s))

    def reserve(
        self, rows: int, *, policy_version: int | None = None, timeout_s: float = TIMEOUT_S_DEFAULT
    ) -> AwaitableContext[AsyncReservation]:
        """As `Table.reserve`; awaited, or entered at once."""

        async def make() -> AsyncReservation:
            reserved = await self._drive(tables.reserve(self._terms, rows, policy_version, timeout_s))
            return AsyncReservation(self._client, self._terms, reserved)

        return AwaitableContext(make)

    async def advance(self, version: int, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """As `Table.advance`."""
        await self._drive(tables.advance(self._terms, version, timeout_s))

    async def checkpointed(self, step: int, *, task: str | None = None) -> int:
        """See `Table.checkpointed`."""
        return await self._drive(tables.checkpointed(self._terms, step, task))

    async def rollback(self, step: int, *, task: str | None = None, version: int | None = None) -> int:
        """See `Table.rollback`."""
        return await self._drive(tables.rollback(self._terms, step, task, version))

    async def cursor(self, start: int = 0) -> int:
        """See `Table.cursor`."""
        return await self._drive(tables.cursor(self._terms, start))

    async def seal(self) -> None:
        """As `Table.seal`."""
        await self._drive(tables.seal(self._terms))

    async def read(
        self,
        rows: Any = None,
        *,
        where: Predicate | Iterable[Predicate] = (),
        fields: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> Rows:
        """As `Table.read`."""
        return await self._drive(tables.read(self._client, self._terms, rows, where, fields, limit))

    async def find(self, keys: str | Sequence[str]) -> NDArray[np.int64]:
        """As `Table.find`."""
        return await self._drive(tables.find(self._terms, keys))

    async def drop(self, rows: Any, reason: str) -> int:
        """As `Table.drop`."""
        return await self._drive(tables.drop(self._terms, rows, reason))

    async def delete(self, rows: Any) -> int:
        """As `Table.delete`."""
        return await self._drive(tables.delete(self._terms, rows))

    async def add_task(self, task: Task) -> None:
        """As `Table.add_task`."""
        await self._drive(tables.add_task(self._client, self._terms, task))

    async def add_fields(self, fields: Sequence[Field]) -> None:
        """As `Table.add_fields`."""
        await self._drive(tables.add_fields(self._client, self._terms, fields))

    async def stats(self) -> dict[str, Any]:
        """As `Table.stats`."""
        return await self._drive(tables.observe_table("stats", self.name))

    async def audit(self) -> dict[str, Any]:
        """As `Table.audit`."""
        return await self._drive(tables.observe_table("audit", self.name))

    async def _drive(self, operation: Operation[T]) -> T:
        return await run_async(self._client.connection, operation)
