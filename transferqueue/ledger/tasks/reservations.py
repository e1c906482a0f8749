"""Reservations of a table, and the rule that says how far production may run ahead of consumption.

With pacing, `reserve(n)` is granted while:

    outstanding + new <= (depth + 1) * batch_rows                      and
    clock + (outstanding + new - 1) // batch_rows - version <= max_staleness

`outstanding` counts rows that the pacing task is not done with: reserved and not yet put, put and not done, and
*refills*, which are members that a group asks for again. Refills were admitted before, so `new = n - refills`. So a
group is completed even if other rows have taken the places of its members meanwhile, and `outstanding` may exceed the
first bound by that many rows. The second line asks whether a row that is started now, and trained after all outstanding
rows, would still be within the staleness bound.

Resident and reserved rows together never exceed `limits.rows`. So a put under a reservation always finds room, and a
put without one waits for unreserved rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transferqueue.errors import Impossible
from transferqueue.errors.text import counted
from transferqueue.policies import Pacing


@dataclass(slots=True)
class ReservationState:
    """Rows that a session may still put. `refills`: how many of them are members of each group."""

    id: int
    session: int
    left: int
    version: int
    refills: dict[int, int]


@dataclass(slots=True, eq=False)
class FlowControl:
    """Reservations of one table, and the refills of its groups.

    Args:
        refills: group -> members that the next `reserve` gets.
        promised: group -> members that open reservations will put.
    """

    reservations: dict[int, ReservationState] = field(default_factory=dict)
    reserved: int = 0
    refills: dict[int, int] = field(default_factory=dict)
    promised: dict[int, int] = field(default_factory=dict)

    # ------------------------------------------------------------ reservations

    def open(self, number: int, session: int, rows: int, version: int) -> ReservationState:
        """Add a reservation. It takes up to `rows` refills."""
        reservation = ReservationState(number, session, rows, version, self._take_refills(rows))
        self.reservations[number] = reservation
        self.reserved += rows
        return reservation

    def _take_refills(self, rows: int) -> dict[int, int]:
        taken: dict[int, int] = {}
        for group in list(self.refills):
            if not rows:
                break
            count = min(rows, self.refills[group])
            rows -= count
            taken[group] = count
            _set(self.refills, group, self.refills[group] - count)
            _set(self.promised, group, self.promised.get(group, 0) + count)
        return taken

    def use(self, reservation: ReservationState, rows: int, groups: list[tuple[int, int]]) -> None:
        """Subtract `rows` that were put, or will not be. `groups`: members put, by group."""
        reservation.left -= rows
        self.reserved -= rows
        for group, count in groups:
            filled = min(count, reservation.refills.get(group, 0))
            if filled:
                _set(reservation.refills, group, reservation.refills[group] - filled)
                _set(self.promised, group, self.promised[group] - filled)
        if not reservation.left:
            self.close(reservation)

    def close(self, reservation: ReservationState) -> None:
        """Remove a reservation. Its unused refills go to the next one."""
        del self.reservations[reservation.id]
        self.reserved -= reservation.left
        reservation.left = 0
        for group, count in reservation.refills.items():
            _set(self.promised, group, self.promised[group] - count)
            _set(self.refills, group, self.refills.get(group, 0) + count)
        reservation.refills = {}

    def of(self, session: int) -> list[ReservationState]:
        """Reservations of a session."""
        return [reservation for reservation in self.reservations.values() if reservation.session == session]

    # ------------------------------------------------------------ refills

    @property
    def refill_rows(self) -> int:
        """Number of refills that no reservation has taken."""
        return sum(self.refills.values())

    def ask_refills(self, group: int, more: int, absent: int) -> None:
        """Ask for `more` members of a group that lacks `absent`, never for more than it lacks."""
        lacking = absent - self.promised.get(group, 0)
        _set(self.refills, group, max(0, min(self.refills.get(group, 0) + more, lacking)))

    def limit_refills(self, group: int, absent: int) -> None:
        """Reduce the refills of a group that lacks only `absent` members now."""
        if group in self.refills:
            _set(self.refills, group, max(0, min(self.refills[group], absent - self.promised.get(group, 0))))

    def forget(self, group: int) -> None:
        """Remove the refills of a group that has ended."""
        self.refills.pop(group, None)
        if self.promised.pop(group, 0):
            for reservation in self.reservations.values():
                reservation.refills.pop(group, None)


def _set(counts: dict[int, int], key: int, count: int) -> None:
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)


# ---------------------------------------------------------------- admission


def check_reserve(table: str, pacing: Pacing | None, rows_max: int, rows: int, version: int, clock: int) -> None:
    """Raise if this reservation could never be granted."""
    most = min(rows_max, pacing.rows_ahead_max) if pacing else rows_max
    if rows > most:
        rule = f"({pacing.depth} + 1) * {pacing.batch_rows} rows may be ahead and " if pacing else ""
        raise Impossible(
            f'{counted(rows, "row")} can never be reserved in table "{table}": {rule}{rows_max} rows fit; reserve at '
            f"most {most}"
        )
    if pacing is None or pacing.max_staleness is None:
        return
    behind = clock + (rows - 1) // pacing.batch_rows - version
    if behind > pacing.max_staleness:
        raise Impossible(
            f'{counted(rows, "row")} of version {version} can never be trained in table "{table}": with clock {clock} '
            "the last of "
            f"them would be {counted(behind, 'version')} behind, above max_staleness {pacing.max_staleness}; use newer "
            f"weights"
        )


def why_not(pacing: Pacing | None, outstanding: int, new: int, version: int, clock: int) -> str:
    """Why `new` rows cannot be granted now; "" if they can."""
    if pacing is None or not new:
        return ""
    if outstanding + new > pacing.rows_ahead_max:
        ahead = f'{outstanding} of {counted(pacing.rows_ahead_max, "row", "is", "are")} ahead of task "{pacing.task}"'
        more = f"; {new} more would make {outstanding + new}" if outstanding < pacing.rows_ahead_max else ""
        return f"{ahead} (depth {pacing.depth:g}, batch_rows {pacing.batch_rows}){more}"
    if pacing.max_staleness is None:
        return ""
    behind = clock + (outstanding + new - 1) // pacing.batch_rows - version
    if behind > pacing.max_staleness:
        return (
            f"they would be trained at version {version + behind}, {counted(behind, 'version')} after theirs, since "
            f"{counted(outstanding, 'row', 'is', 'are')} ahead: above max_staleness {pacing.max_staleness}"
        )
    return ""
