"""The reservation for event loops."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from transferqueue.client.handles.reservation import ReservationBase
from transferqueue.client.operations import tables
from transferqueue.client.session.run import run_async


class AsyncReservation(ReservationBase):
    """`Reservation` for an event loop."""

    async def release(self, rows: int | None = None) -> None:
        """As `Reservation.release`."""
        await run_async(self._client.connection, tables.unreserve(self._terms, self.id, rows))
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
