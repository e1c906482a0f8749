"""A batch, used from event loops: rows lent to this worker until it acks or releases them, or the lease expires."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from transferqueue.client.handles.batch import GIVEN_BACK, BatchBase
from transferqueue.client.operations import lease
from transferqueue.client.operations.row_metadata import Floats, GivenFacts, Ints, Keys, TagsGiven
from transferqueue.client.session.operation_runner import Operation, T, run_async
from transferqueue.errors import LeaseExpired, TransferQueueError, UsageError


class AsyncBatch(BatchBase):
    """Rows lent to this worker, with their facts and lazy columns (see `Rows`), and the verbs that end the lease.

    As a context manager: a clean exit acks the rows that are left; an exception releases them as failed, with its text,
    and goes on (a cancellation releases them without counting an attempt). If that ack is refused, because results are
    missing, the rows are released as failed too. A batch that is collected without an ack or a release is released.
    After the end, using a column is `BatchEnded`; views that were taken before stay valid.

    Safe from any event loop, one verb at a time.

    Example:
        >>> import transferqueue as tq
        >>> async with tq.aconnect("embedded") as queue:
        ...     table = await queue.create_table("t", tasks=[tq.Task("double", needs=["x"], gives=["y"])])
        ...     rows = await table.put(x=[1, 2])
        ...     async with table.lease("double", rows=2, timeout_s=10) as batch:
        ...         print(batch.table, batch.task, batch.rows, batch.fields, batch.lease, batch.lease_s, batch.version)
        ...         await batch.ack(y=batch["x"].numpy() * 2)
        t double [0 1] ('x',) 1 60.0 0
        2
        >>> batch.ended
        True
    """

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
    ) -> int:
        """End rows as done. Result columns and facts commit together with the ack, or neither does.

        Columns and facts have one value for each of `rows`, in this order, or one for all. Rows that were dropped
        meanwhile (with their group, as stale, by a delete), or taken back for a refill of their group, are passed over,
        and the others end. After `SchemaError` and `UsageError` the rows are still leased.

        Args:
            rows: ids of the rows that are done; default None: all that are left.
            group_id: refused: the group of a row stays as it was put.
            group_size: refused, as `group_id`.
            ordinal: as of `AsyncTable.put`.
            policy_version: as of `AsyncTable.put`.
            policy_version_max: as of `AsyncTable.put`.
            tokens: as of `AsyncTable.put`.
            priority: as of `AsyncTable.put`.
            key: as of `AsyncTable.put`.
            tags: as of `AsyncTable.put`; they replace all tags of the row.
            step: the trainer's step; the rows are kept until `AsyncTable.checkpointed` covers it, and leased again
                after an `AsyncTable.rollback` to an earlier one. Default -1: they are done at once.
            **columns: values of result fields, by name, as of `AsyncTable.put`.

        Returns:
            The number of rows that ended: all that were named, without those passed over.

        Raises:
            LeaseExpired: the lease is over. Nothing was changed, and other workers have the rows.
            BatchEnded: this worker has ended the batch before.
            NotFound: a row that is not, or no longer, in this batch.
            SchemaError: a column does not fit its field.
            AlreadyExists: a row already has a field that the task does not need (fields that it needs are replaced), or
                another row has the key.
            UsageError: a row would end without a field that the task gives and another task needs (`drop` ends rows
                that have no result); or a part of a group of a task that takes groups.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("double", needs=["x"], gives=["y"])])
            ...     rows = await table.put(x=[1, 2])
            ...     batch = await table.lease("double", rows=2)
            ...     await batch.ack(rows[:1], y=[2])
            ...     await batch.drop("not_needed", rows[1:])
            ...     batch.ended
            1
            1
            True
        """
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
        return await self._run(lease.ack(self._lease, rows, facts, columns, step))

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
    ) -> int:
        """Return rows to ready, so that any worker of the task may lease them.

        Columns and facts say how far an unfinished row is: they replace the values that it had, and commit together
        with the release, or neither does. So any worker of the task may go on where this one stopped. There is one
        value of each for every row, in this order.

        Args:
            rows: ids of rows of the batch; default None: all that are left.
            failed: count the lease as a failed attempt, after which `Retry` of the task applies; default False.
            reason: why it failed, for people; default "".
            policy_version: as of `AsyncTable.put`.
            policy_version_max: as of `AsyncTable.put`.
            tokens: as of `AsyncTable.put`.
            priority: as of `AsyncTable.put`.
            tags: as of `AsyncTable.put`; they replace all tags of the row.
            **columns: values of fields, by name, as of `AsyncTable.put`.

        Returns:
            The number of rows that are ready again. Rows that were dropped meanwhile are passed over, as by `ack`.

        Raises:
            LeaseExpired: the lease is over. Nothing was changed.
            BatchEnded: this worker has ended the batch before.
            NotFound: a row that is not, or no longer, in this batch.
            SchemaError: a column does not fit its field; the rows are still leased.
            UsageError: a part of a group of a task that takes groups, or of a batch that replicas share.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("write", needs=["so_far"])])
            ...     rows = await table.put(so_far=["once"])
            ...     batch = await table.lease("write", rows=1)
            ...     await batch.release(so_far=["once upon"])
            ...     async with table.lease("write", rows=1) as batch:
            ...         batch["so_far"].list()
            1
            ['once upon']
        """
        facts = GivenFacts(
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            tags=tags,
        )
        return await self._run(lease.release(self._lease, rows, failed, reason, facts, columns))

    async def drop(self, reason: str, rows: Any = None) -> int:
        """Drop rows of the batch for every task of the table. `DropGroup` drops the others of their groups with them.

        Args:
            reason: a name that statistics count the rows under, such as ``"too_long"``; at most 256 different ones a
                table.
            rows: ids of rows of the batch; default None: all that are left.

        Returns:
            The number of these rows that ended. Rows that were dropped meanwhile are passed over, as by `ack`.

        Raises:
            LeaseExpired: the lease is over. Nothing was changed.
            BatchEnded: this worker has ended the batch before.
            NotFound: a row that is not, or no longer, in this batch.
            UsageError: an invalid reason, or a part of a group of a task that takes groups.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = await table.put(x=[1, 2])
            ...     async with table.lease("train", rows=2) as batch:
            ...         await batch.drop("too_long", rows[1:])  # the end of the block acks the other
            ...     counts = await table.audit()
            1
            >>> counts.rows_done, counts.dropped
            (1, {'too_long': 1})
        """
        return await self._run(lease.drop(self._lease, reason, rows))

    async def renew(self, lease_s: float | None = None) -> float:
        """Keep the rows for some time from now. The time limit of the batch counts from here.

        The client renews leases by itself; this is for a worker whose batch takes longer than its time limit.

        Args:
            lease_s: seconds from now; default None: as long as the lease was given before.

        Returns:
            The seconds that were granted.

        Raises:
            LeaseExpired: the lease is over, and other workers may have the rows.
            BatchEnded: this worker has ended the batch before.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     rows = await table.put(x=[1, 2])
            ...     async with table.lease("train", rows=2) as batch:
            ...         print(await batch.renew(120))
            120.0
        """
        self._lease_s = await self._run(lease.renew(self._lease, lease_s))
        return self._lease_s

    async def __aenter__(self) -> Self:
        self._check_enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None and not self._lease.ended:
            try:
                await self.ack()
            except UsageError as refused:
                refused.add_note(GIVEN_BACK)
                await self._release_after(refused)
                raise
            except LeaseExpired as late:
                if not self._is_passed_over(late):
                    raise
            except TransferQueueError:
                raise
            except BaseException as interrupted:
                # The ack may be on its way: a release that comes after it changes nothing.
                await self._release_after(interrupted)
                raise
            return False
        if error is None or self._is_passed_over(error):
            return error is not None
        if not self._lease.ended:
            await self._release_after(error)
        return False

    async def _release_after(self, error: BaseException) -> None:
        """The rows are for others, since the block of this batch ends with `error`."""
        failed, reason = lease.failure(error)
        try:
            await self.release(failed=failed, reason=reason)
        except TransferQueueError as late:  # the first error is the one to see
            error.add_note(f"and its batch could not be released: {late}")
        finally:
            self._lease.end("was released")

    async def _run(self, operation: Operation[T]) -> T:
        return await run_async(self._lease.client.connection, operation)
