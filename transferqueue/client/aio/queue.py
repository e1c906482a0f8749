"""The queue for event loops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from transferqueue.client.aio.table import AsyncTable
from transferqueue.client.aio.weight_channel import AsyncWeightChannel
from transferqueue.client.handles.coordinators import QueueBase
from transferqueue.client.operations import snapshot, tables
from transferqueue.client.operations.snapshot import SNAPSHOT_S, Progress
from transferqueue.client.operations.weights import channel_name
from transferqueue.client.session.run import Operation, T, run_async
from transferqueue.limits import Limits
from transferqueue.policies import Acked, Pacing, Retention, Task
from transferqueue.schema import Field


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
        operation = tables.create_table(
            client, name, fields, tasks, limits, pacing, retention, exist_ok, replicas, extra_fields
        )
        return AsyncTable(client, await run_async(client.connection, operation))

    async def table(self, name: str, timeout_s: float | None = None) -> AsyncTable:
        """As `Queue.table`."""
        client = self._of(name)
        return AsyncTable(client, await run_async(client.connection, tables.open_table(client, name, timeout_s)))

    async def tables(self) -> list[str]:
        """As `Queue.tables`."""
        return sorted([name for found in await self._each(tables.tables) for name in found])

    async def drop_table(self, name: str, *, empty: bool = False) -> None:
        """As `Queue.drop_table`."""
        client = self._of(name)
        await run_async(client.connection, tables.drop_table(client, name, empty))

    def weights(self, channel: str, keep: int = 2) -> AsyncWeightChannel:
        """As `Queue.weights`; not awaited."""
        return AsyncWeightChannel(self._of(channel), *channel_name(channel, keep))

    async def stats(self) -> dict[str, Any]:
        """As `Queue.stats`."""
        return self._together(await self._each(lambda: self._look("stats")))

    async def audit(self) -> dict[str, Any]:
        """As `Queue.audit`."""
        return self._together(await self._each(lambda: tables.observe("audit")))

    async def doctor(self, table: str | None = None) -> dict[str, Any]:
        """As `Queue.doctor`."""
        if table:
            return await run_async(self._of(table).connection, tables.observe("doctor", table))
        return self._together(await self._each(lambda: self._look("doctor")))

    async def inspect(self, table: str, row: int) -> dict[str, Any]:
        """As `Queue.inspect`."""
        return await run_async(self._of(table).connection, tables.observe("row", table, row))

    async def sessions(self) -> dict[str, Any]:
        """As `Queue.sessions`."""
        return self._together(await self._each(lambda: self._look("sessions")))

    async def drain_shard(self, number: int) -> None:
        """See `Queue.drain_shard`."""
        await run_async(self._client.connection, tables.drain_shard(number))

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
