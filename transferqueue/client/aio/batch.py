"""A batch, used from event loops: rows lent to this worker until it acks or releases them, or the lease expires."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from transferqueue.client.handles.batch import GIVEN_BACK, BatchBase
from transferqueue.client.operations import lease
from transferqueue.client.operations.facts import Floats, GivenFacts, Ints, Keys, TagsGiven
from transferqueue.client.session.run import Operation, T, run_async
from transferqueue.errors import LeaseExpired, TransferQueueError, UsageError


class AsyncBatch(BatchBase):
    """Rows lent to this worker, their facts and lazy columns (see `Rows`), and the verbs that end the lease.

    As a context manager: a clean exit acks the rows that are left; an exception releases them as failed, with
    its text (a cancellation releases them without counting an attempt), and goes on. If that ack is refused, because
    results are missing, the rows are released as failed too. A batch that is collected without either is released.
    After the end its columns are `BatchEnded`; views taken before stay valid.

    Safe from any event loop, one verb at a time.
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
    ) -> None:
        """The rows are done. Result columns and facts commit together with the ack, or neither does.

        rows: ids of those that are done; None: all that are left. Columns and facts have one value for each, in this
        order, or one for all; they are given as to `AsyncTable.put`. step: the trainer's; the rows are then kept until
        `AsyncTable.checkpointed` covers it, and given out again by an `AsyncTable.rollback` to an earlier one; -1: they
        are done at once. `LeaseExpired` if the lease is over: nothing was changed, and the rows are somebody else's.
        `SchemaError` if a column does not fit: still leased. Rows that were dropped meanwhile, or taken back for a
        refill of their group, are left out; if all were: `LeaseExpired`. `UsageError` if a row would end without a
        field that the task gives and another task needs: still leased; `drop` ends rows that have no result.
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
        await self._run(lease.ack(self._lease, rows, facts, columns, step))

    async def drop(self, reason: str, rows: Any = None) -> None:
        """The rows (None: all that are left) end as dropped with this reason, for every task of the table."""
        await self._run(lease.drop(self._lease, reason, rows))

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
        """The rows (None: all that are left) go back to ready. failed: counts as an attempt, with `reason`.

        Columns and facts say how far an unfinished row is: they replace what it had, and commit together with the
        release, or neither does. So any worker of the task may go on where this one stopped. One row of each for every
        row, in this order. `LeaseExpired` and `SchemaError` as of `ack`.

        Example:
            >>> import transferqueue as tq
            >>> async with tq.aconnect("embedded") as queue:
            ...     table = await queue.create_table("t", tasks=[tq.Task("write", needs=["so_far"])])
            ...     rows = await table.put(so_far=["once"])
            ...     batch = await table.lease("write", rows=1)
            ...     await batch.release(so_far=["once upon"])
            ...     async with table.lease("write", rows=1) as batch:
            ...         batch["so_far"].list()
            ['once upon']
        """
        facts = GivenFacts(
            policy_version=policy_version,
            policy_version_max=policy_version_max,
            tokens=tokens,
            priority=priority,
            tags=tags,
        )
        await self._run(lease.release(self._lease, rows, failed, reason, facts, columns))

    async def renew(self, lease_s: float | None = None) -> float:
        """Keep the rows for `lease_s` seconds from now (None: the task's). Returns how long that is.

        `LeaseExpired` if it is too late.
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
