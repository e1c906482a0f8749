# Written by `python -m tests.sync_api` from client/aio/reservation.py: change it there.
"""Reservations, used from threads: permission to start producing rows, before any work is spent on them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from transferqueue.client.handles.reservation import ReservationBase
from transferqueue.client.operations import tables
from transferqueue.client.session.operation_runner import run_sync


class Reservation(ReservationBase):
    """Permission to start producing `rows` rows, given by `Table.reserve` and used by ``put(reservation=...)``.

    As a context manager it returns at its end the rows that were not put. So does its collection, and the death of the
    process. Rows that were put return when the pacing task is done with them, or when they are dropped.

    Example:
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     pacing = tq.Pacing("train", batch_rows=4, depth=0)
        ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], pacing=pacing)
        ...     with table.reserve(4) as reservation:
        ...         rows = table.put(x=[1, 2, 3], reservation=reservation)
        ...         print(reservation.id, reservation.rows, reservation.left, reservation.version, reservation.refills)
        1 4 1 0 []
    """

    def release(self, rows: int | None = None) -> None:
        """Return rows that will not be produced.

        Args:
            rows: the number of rows; default None: all that are left.

        Raises:
            NotFound: the reservation is used up or was returned.
            UsageError: more rows than are left.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     pacing = tq.Pacing("train", batch_rows=4, depth=0)
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], pacing=pacing)
            ...     reservation = table.reserve(4)
            ...     reservation.release(3)  # only one row will be produced
            >>> reservation.left
            1
        """
        run_sync(self._client.connection, tables.unreserve(self._terms, self.id, rows))
        self._used(self.left if rows is None else rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._give_up()
        elif self.left:
            self.release()
