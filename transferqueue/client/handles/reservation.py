"""What the reservations of both APIs share: the rows that are left, and their return."""

from __future__ import annotations

import weakref
from typing import ClassVar

from transferqueue.client.client import ClientSession
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import UsageError
from transferqueue.storage.elements.process_bound import Staying
from transferqueue.storage.memory.private_pages import when_gone
from transferqueue.wire import messages as m


class _ReservationRemainder:
    """Rows of a reservation that were neither put nor returned yet; apart from it, for its finalizer."""

    __slots__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = rows


class ReservationBase(Staying):
    """What the reservations of both fronts share."""

    elsewhere: ClassVar[str] = "pass queue.address, and reserve where the rows are put"

    def __init__(self, client: ClientSession, terms: TableInfo, reserved: m.Reserved) -> None:
        self._client, self._terms, self._reserved = client, terms, reserved
        self._left = _ReservationRemainder(reserved.rows)
        self._unasked = m.Unreserve(table=terms.name, reservation=reserved.reservation)
        weakref.finalize(self, _give_up, client, self._left, self._unasked)
        left, unasked = self._left, self._unasked
        when_gone(self, lambda: _give_up(client, left, unasked))

    def __repr__(self) -> str:
        table = self._terms.name
        return f"<{type(self).__name__} of {self.rows} rows of table {table!r} at version {self.version}, {self.left} left>"

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
        """The table's clock when this was granted; weights of this version or newer are in bound."""
        return self._reserved.version

    @property
    def refills(self) -> list[tuple[int, int]]:
        """Members of groups that are asked for again: (group_id, how many are missing). Part of `rows`."""
        return list(self._reserved.refills)

    def used(self, rows: int) -> None:
        """`rows` of it were put or returned."""
        self._left.rows = max(0, self._left.rows - rows)

    def give_up(self) -> None:
        """Return what is left without waiting for an answer, as after an error, which is the one to see."""
        _give_up(self._client, self._left, self._unasked)


def _give_up(client: ClientSession, left: _ReservationRemainder, unasked: m.Unreserve) -> None:
    """Return what is left, in a finalizer too. Returned twice, because an interrupt came between, it is refused to nobody."""
    if left.rows:
        client.connection.post(unasked)
        left.rows = 0


def reservation_id(terms: TableInfo, reservation: ReservationBase | None) -> int:
    """The number that a put names; 0 for none."""
    if reservation is None:
        return 0
    if not isinstance(reservation, ReservationBase) or reservation._terms is not terms:
        raise UsageError(
            f'reservation {reservation!r} is not one of table "{terms.name}"; give what its reserve() returned'
        )
    return reservation.id
