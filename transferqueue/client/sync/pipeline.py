# Written by `python -m tests.sync_api` from client/aio/pipeline.py: change it there.
"""A pipeline, used from threads: puts, updates and acks of which several are in flight, in order."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from transferqueue.client.handles.batch import lease_of
from transferqueue.client.handles.pipeline import PipelineBase, PromiseBase, facts_among
from transferqueue.client.handles.reservation import reservation_id
from transferqueue.client.operations import commit, lease
from transferqueue.client.operations.continues import continues_of
from transferqueue.client.operations.rows import RowsBase
from transferqueue.client.session.operation_runner import COMMITS, Operation, T, run_sync
from transferqueue.client.sync.batch import Batch
from transferqueue.client.sync.reservation import Reservation
from transferqueue.errors import TransferQueueError


class Promise(PromiseBase[T]):
    """The result of one call of a pipeline."""

    __slots__ = ("_pipeline",)

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline

    def result(self) -> T:
        """Wait until the server has answered this call and those before it, and return its result.

        Returns:
            The value that the call returns outside a pipeline.

        Raises:
            TransferQueueError: the error that the call was refused with.
        """
        self._pipeline._settle(self)
        return self.outcome()


class Pipeline(PipelineBase[Promise[Any]]):
    """Puts, updates and acks of which several are in flight. Made by `Table.pipeline`.

    Each call copies its columns, sends its commit, and returns a promise without waiting for the answer. The server
    carries the commits out in the order of the calls, each whole or not at all, and each once, also if the connection
    is lost meanwhile. When `calls` or `bytes` are in flight, the next call first waits until half of them are answered.

    An error is raised by `result` of its promise, else by the next call (which is not made then), by `drain`, or at the
    end of the block: it concerns its own call alone, and those after it are carried out. A call whose commit has to be
    made again, since a shard was lost, or a put that waits for room, may come after later ones. An exception that
    leaves the block waits for the calls in flight, and their errors are added to it as notes; an interrupt does not
    wait.

    Not for several tasks at once: each makes its own.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        ...     with table.pipeline(calls=64) as pipeline:
        ...         promises = [pipeline.put(x=[number]) for number in range(200)]
        ...     figures = table.stats()
        >>> figures.rows_live
        200
    """

    def put(
        self,
        table: Any = None,
        /,
        *,
        reservation: Reservation | None = None,
        parent: Any = None,
        continued: Iterable[str] | None = None,
        timeout_s: float | None = None,
        **columns: Any,
    ) -> Promise[NDArray[np.int64]]:
        """Add rows, as `Table.put`, without waiting for the answer.

        Args:
            table: as of `Table.put`; default None.
            reservation: as of `Table.put`; default None.
            parent: as of `Table.put`; default None.
            continued: as of `Table.put`; default None.
            timeout_s: seconds that the server waits for room; default None: no limit; 0: not at all.
            **columns: columns and facts, as of `Table.put`. Their values are copied before the call returns.

        Returns:
            The promise of the row ids.

        Raises:
            SchemaError: a column does not fit its field, as far as the client knows it.
            UsageError: the pipeline is used outside its block.
            TransferQueueError: an earlier call failed; then this one is not made.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     with table.pipeline() as pipeline:
            ...         promise = pipeline.put(x=[1, 2])
            ...         rows = promise.result()
            >>> rows.tolist()
            [0, 1]
        """
        facts, columns = facts_among(columns)
        if table is not None:
            facts, columns = facts.with_table(table, columns)
        number = 0 if reservation is None else reservation_id(self._terms, reservation)
        used = None if reservation is None else reservation._used
        continues = continues_of(parent, continued)
        return self._start(
            commit.put(
                self._client, self._terms, facts, columns, number, timeout_s, used, continues=continues, refers=False
            )
        )

    def update(
        self, /, rows: Any, *, overwrite: bool = False, if_unchanged: RowsBase | None = None, **columns: Any
    ) -> Promise[None]:
        """Give existing rows more columns or facts, as `Table.update`, without waiting for the answer.

        Args:
            rows: as of `Table.update`.
            overwrite: as of `Table.update`; default False.
            if_unchanged: as of `Table.update`; default None.
            **columns: columns and facts, as of `Table.update`. Their values are copied before the call returns.

        Returns:
            The promise of None.

        Raises:
            SchemaError: a column does not fit its field, as far as the client knows it.
            UsageError: the pipeline is used outside its block.
            TransferQueueError: an earlier call failed; then this one is not made.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     with table.pipeline() as pipeline:
            ...         promise = pipeline.update(rows, note=["first", "second"])
            ...     read = table.read(rows)
            ...     read["note"].list()
            ['first', 'second']
        """
        facts, columns = facts_among(columns)
        return self._start(
            commit.update(self._client, self._terms, rows, facts, columns, overwrite, if_unchanged, refers=False)
        )

    def ack(self, batch: Batch, /, rows: Any = None, *, step: int = -1, **columns: Any) -> Promise[int]:
        """End rows of a batch as done, as `Batch.ack`, without waiting for the answer, with which the batch ends.

        Args:
            batch: the batch, leased by this connection.
            rows: as of `Batch.ack`; default None: all that are left.
            step: as of `Batch.ack`; default -1.
            **columns: columns and facts, as of `Batch.ack`. Their values are copied before the call returns.

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
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = table.put(x=[1, 2])
            ...     batch = table.lease("train", rows=2)
            ...     with table.pipeline() as pipeline:
            ...         promise = pipeline.ack(batch)
            >>> batch.ended
            True
        """
        facts, columns = facts_among(columns)
        return self._start(lease.ack(lease_of(batch), rows, facts, columns, step, refers=False))

    def drain(self) -> None:
        """Wait until all calls are answered.

        Raises:
            TransferQueueError: the first error of a call that was not raised before; others are added to it as notes.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     with table.pipeline() as pipeline:
            ...         promise = pipeline.put(x=[1, 2])
            ...         pipeline.drain()
            ...         print(len(pipeline), "calls in flight")
            0 calls in flight
        """
        while self._in_flight:
            self._finish_oldest()
        self._raise_unseen()

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        if error is not None and not isinstance(error, Exception):
            self._abandon()
            return
        try:
            self.drain()
        except TransferQueueError as failed:
            if error is None:
                raise
            error.add_note(f"a call of the pipeline failed too: {type(failed).__name__}: {failed}")

    def _start(self, operation: Operation[T]) -> Promise[T]:
        self._check_open()
        if self._is_full():
            while self._is_half_full():
                self._finish_oldest()
        self._raise_unseen()
        promise: Promise[T] = Promise(self)
        promise.started(run_sync(self._client.connection, operation, pipelined=COMMITS))
        self._add(promise)
        return promise

    def _settle(self, promise: Promise[Any]) -> None:
        while promise._held is not None:
            self._finish_oldest()
        if promise in self._failed:
            self._failed.remove(promise)

    def _finish_oldest(self) -> None:
        promise, held = self._take_oldest()
        try:
            value = run_sync(self._client.connection, held.operation, answer=held.answer, deadline=held.deadline)
        except TransferQueueError as error:
            promise.fail(error)
            self._failed.append(promise)
        except BaseException:
            promise.fail(held.unknown())
            raise
        else:
            promise.settle(value)
