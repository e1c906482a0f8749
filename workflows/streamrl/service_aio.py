"""The stream generation service for programs with an event loop; `service` has the rules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.adapters.protocols import Completion, Prompt
from transferqueue.errors import DeadlineExceeded, EndOfTable, NotFound
from transferqueue.workflows.streamrl.service import (
    BURST_ROWS,
    LEASE_S,
    NAME,
    TRAIN,
    Request,
    StreamBase,
    channel_of,
    check,
    terms,
)


class AsyncStream(StreamBase[tq.AsyncBatch]):
    """`CompletionStream` for an event loop: ``async for``, ``async with``; await its methods."""

    def __init__(self, table: tq.AsyncTable, request: int, left: int, burst: int, timeout_s: float | None) -> None:
        super().__init__(table, request, left, burst, timeout_s)
        self._table = table

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Completion:
        """As ``next`` of `CompletionStream`. A cancelled wait takes no sample."""
        if not self._due:
            await self._settle(failed=False)
            if not await self._more():
                raise StopAsyncIteration
            self._open(await self._lease(self._burst, 1))
        return self._due.popleft()

    async def batches(self, rows: int, *, at_least: int = 1) -> AsyncIterator[tq.AsyncBatch]:
        """As `CompletionStream.batches`."""
        await self._settle(failed=False)
        while await self._more():
            yield await self._lease(rows, at_least)

    async def aclose(self) -> None:
        """As `CompletionStream.close`."""
        self._closed = True
        await self._settle(failed=False)
        self._due.clear()

    async def cancel(self) -> int:
        """As `CompletionStream.cancel`."""
        await self.aclose()
        while True:
            rows = await self._live()
            try:
                return await self._table.drop(rows, "cancelled") if len(rows) else 0
            except NotFound:
                continue  # one ended meanwhile: fewer are left

    async def _lease(self, rows: int, at_least: int) -> tq.AsyncBatch:
        try:
            return self._took(await self._table.lease(TRAIN, **self._asking(rows, at_least)))
        except (DeadlineExceeded, EndOfTable) as late:
            self._check_lost(len(await self._live()), late)
            raise

    async def _more(self) -> bool:
        if not self._left and not self._closed:
            self._left = self._to_come(len(await self._live()))
        return self._left > 0 and not self._closed

    async def _live(self) -> NDArray[np.int64]:
        read = await self._table.read(where=self._mine, fields=[])
        return read.rows

    async def _settle(self, *, failed: bool) -> None:
        used, back = self._split(failed)
        if len(used) and self._batch is not None:
            await self._batch.ack(used)
        if len(back) and self._batch is not None:
            await self._batch.release(back)
        self._batch = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._settle(failed=True)
        await self.aclose()


class AsyncStreamService:
    """`StreamService` for an event loop."""

    def __init__(self, queue: tq.AsyncQueue, table: tq.AsyncTable, channel: tq.AsyncWeightChannel) -> None:
        self._queue, self._table, self._channel = queue, table, channel

    @classmethod
    async def create(
        cls,
        queue: tq.AsyncQueue,
        *,
        name: str = NAME,
        groups: bool = False,
        pacing: tq.Pacing | None = None,
        rows_max: int = 1 << 16,
        lease_s: float = LEASE_S,
    ) -> Self:
        """As `StreamService.create`."""
        table = await queue.create_table(
            name, **terms(groups=groups, lease_s=lease_s, pacing=pacing, rows_max=rows_max)
        )
        return cls(queue, table, queue.weights(channel_of(table)))

    @classmethod
    async def join(cls, queue: tq.AsyncQueue, *, name: str = NAME, timeout_s: float = 30.0) -> Self:
        """As `StreamService.join`."""
        table = await queue.table(name, timeout_s=timeout_s)
        check(table)
        return cls(queue, table, queue.weights(channel_of(table)))

    @property
    def table(self) -> tq.AsyncTable:
        """The table of the service."""
        return self._table

    @property
    def channel(self) -> tq.AsyncWeightChannel:
        """The weight channel of the service."""
        return self._channel

    async def update(
        self, weights: Mapping[str, Any], *, version: int | None = None, timeout_s: float | None = None
    ) -> int:
        """As `StreamService.update`."""
        if version is None:
            channel = (await self._queue.stats())["channels"].get(self._channel.name)
            version = 0 if channel is None else channel["newest"] + 1
        await self._channel.publish(version, weights, timeout_s=timeout_s)
        return version

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        scores: Sequence[float] | None = None,
        expected: Sequence[int] | None = None,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """As `StreamService.generate`."""
        request = Request.of(prompts, scores, number, expected)
        if number is not None:
            begun = await self.resume(number, timeout_s=timeout_s)
            if begun.left:
                return begun
        async with self._table.reserve(request.rows, timeout_s=timeout_s) as reservation:
            columns = request.behind((await self._table.stats())["rows_put"])
            await self._table.put(reservation=reservation, timeout_s=timeout_s, **columns)
        return AsyncStream(self._table, request.number, request.rows, request.burst, timeout_s)

    async def resume(self, request: int, *, timeout_s: float | None = None) -> AsyncStream:
        """As `StreamService.resume`."""
        read = await self._table.read(where=tq.Compare("request", "==", request), fields=[])
        burst = max(BURST_ROWS, int(read.group_size.max(initial=0)))
        return AsyncStream(self._table, request, len(read), burst, timeout_s)

    async def seal(self) -> None:
        """As `StreamService.seal`."""
        await self._table.seal()
