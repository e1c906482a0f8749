"""Requests of flow control: reserve, unreserve, advance, seal."""

from __future__ import annotations

from transferqueue.errors import DeadlineExceeded, Full, NotFound, Sealed, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import IntArray, tally
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.requests.registry import in_table
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, apply_stale_policy
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.reservations import ReservationState, check_reserve, why_not
from transferqueue.ledger.tasks.task_state import LEASED, READY, TaskState
from transferqueue.policies import HoldClock
from transferqueue.wire.messages import AdvanceClock, DoneReply, Reserve, Reserved, Seal, Unreserve

VERSION_MAX = 1 << 53
"""Highest version, as for rows: exact as int64 and as float64."""


@in_table(Reserve)
def reserve(table: TableState, request: Reserve, session: int, now: float) -> Reserved | Blocked:
    """Answer a `Reserve`."""
    if table.sealed:
        raise Sealed(f'table "{table.name}" is sealed; no row may enter it, so none can be reserved')
    version = table.clock if request.policy_version < 0 else request.policy_version
    check_reserve(table.name, table.pacing, table.limits.rows, request.rows, version, table.clock)
    if why := why_reserve_waits(table, request):
        if request.wait_s > 0:
            return Blocked((("room", table.name), ("table", table.name)))
        raise Full(f'{counted(request.rows, "row")} cannot be reserved in table "{table.name}" now: {why}')
    table.begin()
    table.core.last_reservation += 1
    reservation = table.flow.open(table.core.last_reservation, session, request.rows, version)
    return Reserved(reservation.id, reservation.left, version, list(reservation.refills.items()))


def why_reserve_waits(table: TableState, request: Reserve) -> str:
    """Why the rows cannot be reserved now; "" if they can."""
    version = table.clock if request.policy_version < 0 else request.policy_version
    new = request.rows - min(request.rows, table.flow.refill_rows)
    if why := why_not(table.pacing, table.outstanding, new, version, table.clock):
        return why
    held = table.rows_resident + table.flow.reserved
    if new and held + request.rows > table.limits.rows:
        return (
            f"{held} of {counted(table.limits.rows, 'row', 'is', 'are')} resident or reserved; {request.rows} more "
            f"would make {held + request.rows}"
        )
    return ""


def reservation_of(table: TableState, number: int, session: int) -> ReservationState:
    """The open reservation with this number. `NotFound` if the session has none."""
    reservation = table.flow.reservations.get(number)
    if reservation is None or reservation.session != session:
        raise NotFound(
            f'reservation {number} of table "{table.name}" is used up, was returned, or is not of this session'
        )
    return reservation


@in_table(Unreserve)
def unreserve(table: TableState, request: Unreserve, session: int, now: float) -> DoneReply:
    """Release rows of a reservation that will not be produced."""
    reservation = reservation_of(table, request.reservation, session)
    if request.rows > reservation.left:
        raise UsageError(
            f"reservation {reservation.id} has {counted(reservation.left, 'row')} left; {request.rows} cannot be "
            "returned"
        )
    count = request.rows or reservation.left
    table.begin()
    if count == reservation.left:
        table.flow.close(reservation)
    else:
        table.flow.use(reservation, count, [])
    table.wake_room()
    return DoneReply(count)


@in_table(AdvanceClock)
def advance(table: TableState, request: AdvanceClock, session: int, now: float) -> DoneReply | Blocked:
    """Advance the policy version clock of the table to `version`."""
    if table.pacing is not None and table.pacing.channel is not None:
        raise UsageError(
            f'the clock of table "{table.name}" is weight channel "{table.pacing.channel}"; publish a version there'
        )
    if request.version > VERSION_MAX:
        raise UsageError(f"version {request.version} is above {VERSION_MAX}; versions count trainer steps")
    if request.version < table.clock:
        raise UsageError(
            f'the clock of table "{table.name}" is {table.clock}; it never goes back to {request.version}: give a '
            "higher number"
        )
    if why := why_clock_is_held(table, request.version):
        if request.wait_s > 0:
            return Blocked((("clock", table.name), ("table", table.name)))
        raise DeadlineExceeded(why)
    table.begin(table.rows.pages.resident)
    set_clock(table, request.version, now)
    return DoneReply()


def why_clock_is_held(table: TableState, version: int) -> str:
    """Why the clock may not advance to `version` now; "" if it may."""
    pacing, pacing_task = table.pacing, table.pacing_task
    if pacing is None or pacing_task is None or table.versions is None or not isinstance(pacing.on_stale, HoldClock):
        return ""
    bound = version - (pacing.max_staleness or 0)
    held = 0
    for rows in table.versions.below(bound):
        at = table.rows.pages.index(rows)
        held += int((pacing_task.state.a[at] <= READY).sum()) + _unclaimed_rows(table, pacing_task, at)
    if not held:
        return ""
    return (
        f'the clock of table "{table.name}" is held at {table.clock}: {counted(held, "row")} of versions below {bound} '
        f'would be stale at {version} (max_staleness {pacing.max_staleness}) and task "{pacing.task}" has not had them'
    )


def _unclaimed_rows(table: TableState, pacing_task: TaskState, at: IntArray) -> int:
    """How many of the rows are in shares that no rank has claimed, and thus undelivered."""
    if not table.shared_batches:
        return 0
    leases = table.core.leases.by_id
    holds = pacing_task.hold.a[at[pacing_task.state.a[at] == LEASED]]
    return sum(count for number, count in tally(holds) if not leases[number].holders)


def set_clock(table: TableState, version: int, now: float) -> None:
    """Advance the clock, and apply the stale policy to rows that are over the bound now."""
    if version <= table.clock:
        return
    table.clock = version
    if table.versions is not None:
        stale: IntArray = table.versions.take_below(table.oldest_fresh_version)
        apply_stale_policy(table, stale, now)
    table.wake_room()
    apply_group_and_stale_rules(table, now)


@in_table(Seal)
def seal(table: TableState, request: Seal, session: int, now: float) -> DoneReply:
    """Let no more rows enter. Rules for incomplete groups apply; waiting consumers get the rest, or the end."""
    if table.sealed:
        raise Sealed(f'table "{table.name}" is sealed already; leave this call out')
    table.begin(table.rows.pages.resident)
    table.sealed = True
    for task in table.group_tasks:
        task.changed.update(dict.fromkeys(task.forming))
    for number in [*table.flow.refills, *table.flow.promised]:
        table.flow.forget(number)
    apply_group_and_stale_rules(table, now)
    table.wake_tasks()
    table.wake_room()
    return DoneReply(table.rows_live)
