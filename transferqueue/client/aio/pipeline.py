"""A pipeline, used from event loops: puts, updates and acks of which several are in flight, in order."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.aio.batch import AsyncBatch
from transferqueue.client.aio.reservation import AsyncReservation
from transferqueue.client.handles.batch import lease_of
from transferqueue.client.handles.pipeline import PipelineBase, PromiseBase, facts_among
from transferqueue.client.handles.reservation import reservation_id
from transferqueue.client.operations import commit, lease
from transferqueue.client.operations.continues import continues_of
from transferqueue.client.operations.rows import RowsBase
from transferqueue.client.session.operation_runner import COMMITS, Operation, T, run_async
from transferqueue.errors import TransferQueueError


class AsyncPromise(PromiseBase[T]):
    """The result of one call of a pipeline."""

    __slots__ = ("_pipeline",)

    def __init__(self, pipeline: AsyncPipeline) -> None:
        super().__init__()
        self._pipeline = pipeline

    async def result(self) -> T:
        """Wait until the server has answered this call and those before it, and return its result.

        Returns:
            The value that the call returns outside a pipeline.

        Raises:
            TransferQueueError: the error that the call was refused with.
        """
        await self._pipeline._settle(self)
        return self.outcome()


class AsyncPipeline(PipelineBase[AsyncPromise[Any]]):
    """Puts, updates and acks of which several are in flight. Made by `AsyncTable.pipeline`.

    Each call copies its columns, sends its commit, and returns a promise without waiting for the answer. The server
    carries the commits out in the order of the calls, each whole or not at all, and each once, also if the connection
    is lost meanwhile. When `calls` or `bytes` are in flight, the next call first waits until half of them are answered.

    An error is raised by `result` of its promise, else by the next call (which is not made then), by `drain`, or at the
    end of the block: it concerns its own call alone, and those after it are carried out. A call whose commit has to be
    made again, since a shard was lost, or a put that waits for room, may come after later ones. An exception that
    leaves the block waits for the calls in flight, and their errors are added to it as notes; a cancellation does not
    wait.

    Not for several tasks at once: each makes its own.

    Example:
        >>> import transferqueue as tq
        >>> async with tq.aconnect("embedded") as queue:
        ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        ...     async with table.pipeline(calls=64) as pipeline:
        ...         promises = [await pipeline.put(x=[number]) for number in range(200)]
        ...     figures = await table.stats()
        >>> figures.rows_live
        200
    """

    async def put(
        self,
        table: Any = None,
        /,
        *,
        reservation: AsyncReservation | None = None,
        parent: Any = None,
        continued: Iterable[str] | None = None,
        timeout_s: float | None = None,
        **columns: Any,
    ) -> AsyncPromise[NDArray[np.int64]]:
        """Add rows, as `AsyncTable.put`, without waiting for the answer.

        Args:
            table: as of `AsyncTable.put`; default None.
            reservation: as of `AsyncTable.put`; default None.
            parent: as of `AsyncTable.put`; default None.
            continued: as of `AsyncTable.put`; default None.
            timeout_s: seconds that the server waits for room; default None: no limit; 0: not at all.
            **columns: columns and facts, as of `AsyncTable.put`. Their values are copied before the call returns.

        Returns:
            The promise of the row ids.

        Raises:
            SchemaError: a column does not fit its field, as far as the client knows it.
            UsageError: the pipeline is used outside its block.
            TransferQueueError: an earlier call failed; then this one is not made.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     async with table.pipeline() as pipeline:
            ...         promise = await pipeline.put(x=[1, 2])
            ...         rows = await promise.result()
            >>> rows.tolist()
            [0, 1]
        """
        facts, columns = facts_among(columns)
        if table is not None:
            facts, columns = facts.with_table(table, columns)
        number = 0 if reservation is None else reservation_id(self._terms, reservation)
        used = None if reservation is None else reservation._used
        continues = continues_of(parent, continued)
        return await self._start(
            commit.put(
                self._client, self._terms, facts, columns, number, timeout_s, used, continues=continues, refers=False
            )
        )

    async def update(
        self, /, rows: Any, *, overwrite: bool = False, if_unchanged: RowsBase | None = None, **columns: Any
    ) -> AsyncPromise[None]:
        """Give existing rows more columns or facts, as `AsyncTable.update`, without waiting for the answer.

        Args:
            rows: as of `AsyncTable.update`.
            overwrite: as of `AsyncTable.update`; default False.
            if_unchanged: as of `AsyncTable.update`; default None.
            **columns: columns and facts, as of `AsyncTable.update`. Their values are copied before the call returns.

        Returns:
            The promise of None.

        Raises:
            SchemaError: a column does not fit its field, as far as the client knows it.
            UsageError: the pipeline is used outside its block.
            TransferQueueError: an earlier call failed; then this one is not made.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = await table.put(x=[1, 2])
            ...     async with table.pipeline() as pipeline:
            ...         promise = await pipeline.update(rows, note=["first", "second"])
            ...     read = await table.read(rows)
            ...     read["note"].list()
            ['first', 'second']
        """
        facts, columns = facts_among(columns)
        return await self._start(
            commit.update(self._client, self._terms, rows, facts, columns, overwrite, if_unchanged, refers=False)
        )

    async def ack(self, batch: AsyncBatch, /, rows: Any = None, *, step: int = -1, **columns: Any) -> AsyncPromise[int]:
        """End rows of a batch as done, as `AsyncBatch.ack`, without waiting for the answer, with which the batch ends.

        Args:
            batch: the batch, leased by this connection.
            rows: as of `AsyncBatch.ack`; default None: all that are left.
            step: as of `AsyncBatch.ack`; default -1.
            **columns: columns and facts, as of `AsyncBatch.ack`. Their values are copied before the call returns.

        Returns:
            The promise of the number of rows that ended.

        Raises:
            LeaseExpired: the lease is known to be over.
            BatchEnded: this worker has ended the batch before.
            SchemaError: a column does not fit its field, as far as the client knows it.
            UsageError: the pipeline is used outside its block.
            TransferQueueError: an earlier call failed; then this one is not made.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = await table.put(x=[1, 2])
            ...     batch = await table.lease("train", rows=2)
            ...     async with table.pipeline() as pipeline:
            ...         promise = await pipeline.ack(batch)
            >>> batch.ended
            True
        """
        facts, columns = facts_among(columns)
        return await self._start(lease.ack(lease_of(batch), rows, facts, columns, step, refers=False))

    async def drain(self) -> None:
        """Wait until all calls are answered.

        Raises:
            TransferQueueError: the first error of a call that was not raised before; others are added to it as notes.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     async with table.pipeline() as pipeline:
            ...         promise = await pipeline.put(x=[1, 2])
            ...         await pipeline.drain()
            ...         print(len(pipeline), "calls in flight")
            0 calls in flight
        """
        while self._in_flight:
            await self._finish_oldest()
        self._raise_unseen()

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if error is not None and not isinstance(error, Exception):
            self._abandon()
            return
        try:
            await self.drain()
        except TransferQueueError as failed:
            if error is None:
                raise
            error.add_note(f"a call of the pipeline failed too: {type(failed).__name__}: {failed}")

    async def _start(self, operation: Operation[T]) -> AsyncPromise[T]:
        self._check_open()
        if self._is_full():
            while self._is_half_full():
                await self._finish_oldest()
        self._raise_unseen()
        promise: AsyncPromise[T] = AsyncPromise(self)
        promise.started(await run_async(self._client.connection, operation, pipelined=COMMITS))
        self._add(promise)
        return promise

    async def _settle(self, promise: AsyncPromise[Any]) -> None:
        while promise._held is not None:
            await self._finish_oldest()
        if promise in self._failed:
            self._failed.remove(promise)

    async def _finish_oldest(self) -> None:
        promise, held = self._take_oldest()
        try:
            value = await run_async(self._client.connection, held.operation, answer=held.answer, deadline=held.deadline)
        except TransferQueueError as error:
            promise.fail(error)
            self._failed.append(promise)
        except BaseException:
            promise.fail(held.unknown())
            raise
        else:
            promise.settle(value)
