"""The base of `Reservation` and `AsyncReservation`: the rows that are left, and their return."""

from __future__ import annotations

import weakref
from typing import ClassVar

from transferqueue.client.client import ClientSession
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import UsageError
from transferqueue.errors.text import counted, shown
from transferqueue.storage.elements.process_bound import ProcessBound
from transferqueue.storage.memory.private_pages import when_gone
from transferqueue.wire import messages as m


class _ReservationRemainder:
    """Number of rows that were neither put nor returned yet. Its own object, so that a finalizer can hold it without
    the reservation."""

    __slots__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = rows


class ReservationBase(ProcessBound):
    """A reservation without the verbs that talk to the server."""

    _remedy: ClassVar[str] = "pass queue.address, and reserve where the rows are put"

    def __init__(self, client: ClientSession, terms: TableInfo, reserved: m.Reserved) -> None:
        self._client, self._terms, self._reserved = client, terms, reserved
        self._left = _ReservationRemainder(reserved.rows)
        self._unreserve = m.Unreserve(table=terms.name, reservation=reserved.reservation)
        weakref.finalize(self, _return_at_collection, client, self._left, self._unreserve)
        left, unreserve = self._left, self._unreserve
        when_gone(self, lambda: _return_at_collection(client, left, unreserve))

    def __repr__(self) -> str:
        table = self._terms.name
        return (
            f"<{type(self).__name__} of {counted(self.rows, 'row')} of table {table!r} at version {self.version}, "
            f"{self.left} left>"
        )

    @property
    def id(self) -> int:
        """Its number, as `transferqueue inspect` shows it."""
        return self._reserved.reservation

    @property
    def rows(self) -> int:
        """Rows that may be produced, `refills` included."""
        return self._reserved.rows

    @property
    def left(self) -> int:
        """Rows of these that were neither put nor returned yet."""
        return self._left.rows

    @property
    def version(self) -> int:
        """The table's clock at the grant; weights of this version or newer are in bound."""
        return self._reserved.version

    @property
    def refills(self) -> list[tuple[int, int]]:
        """Groups that lack members, as pairs (group_id, missing rows). Their rows are part of `rows`."""
        return list(self._reserved.refills)

    def _used(self, rows: int) -> None:
        """Count rows of the reservation that were put or returned."""
        self._left.rows = max(0, self._left.rows - rows)

    def _give_up(self) -> None:
        """Return the rows that are left without waiting for an answer: after an error, the caller sees that error
        alone."""
        _return_at_collection(self._client, self._left, self._unreserve)


def _return_at_collection(client: ClientSession, left: _ReservationRemainder, unreserve: m.Unreserve) -> None:
    """Return the rows that are left. Runs in finalizers too. If an interrupt makes it run twice, the server ignores the
    second."""
    if left.rows:
        client.connection.post(unreserve)
        left.rows = 0


def reservation_id(terms: TableInfo, reservation: ReservationBase) -> int:
    """The number of the reservation for a put. `UsageError` if it is of another table."""
    if not isinstance(reservation, ReservationBase) or reservation._terms is not terms:
        raise UsageError(
            f'reservation {shown(reservation)} is not one of table "{terms.name}"; give one that its reserve() returned'
        )
    return reservation.id
