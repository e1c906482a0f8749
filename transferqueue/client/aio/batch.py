"""The batch for event loops."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from transferqueue.client.handles.batch import GIVEN_BACK, BatchBase
from transferqueue.client.operations import lease
from transferqueue.client.operations.facts import Floats, GivenFacts, Ints, Keys, TagsGiven
from transferqueue.client.session.run import Operation, T, run_async
from transferqueue.errors import LeaseExpired, TransferQueueError, UsageError


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
        await self._drive(lease.ack(self._lent, rows, facts, columns, step))

    async def drop(self, reason: str, rows: Any = None) -> None:
        """As `Batch.drop`."""
        await self._drive(lease.drop(self._lent, reason, rows))

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
        await self._drive(lease.release(self._lent, rows, failed, reason, facts, columns))

    async def renew(self, lease_s: float | None = None) -> float:
        """As `Batch.renew`."""
        self._lease_s = await self._drive(lease.renew(self._lent, lease_s))
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
        failed, reason = lease.failure(error)
        try:
            await self.release(failed=failed, reason=reason)
        except TransferQueueError as late:  # the first error is the one to see
            error.add_note(f"and its batch could not be released: {late}")
        finally:
            self._lent.end("was released")

    async def _drive(self, operation: Operation[T]) -> T:
        return await run_async(self._lent.client.connection, operation)
