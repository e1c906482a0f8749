"""Requests that add or remove rows and columns: put, update, drop, delete, free columns."""

from __future__ import annotations

from transferqueue.errors import Full, Impossible, ProtocolError, Sealed, UsageError
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import Index, IntArray, agreed, decode, decode_rows, numbered
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.requests.flow_control import reservation_of
from transferqueue.ledger.requests.registry import HasTables, carries_out, in_table
from transferqueue.ledger.rows import (
    LIVE,
    StagedCommit,
    added_columns,
    append_rows,
    check_columns,
    check_contents,
    check_no_group_facts,
    check_size,
    check_unset,
    reserve_blocks,
    retire,
    write_columns,
)
from transferqueue.ledger.rules.column_ends import check_not_needed, free_values
from transferqueue.ledger.rules.continuation import continue_rows
from transferqueue.ledger.rules.explain import explain_room
from transferqueue.ledger.rules.finish import drop_rows, free_rows
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, apply_stale_policy
from transferqueue.ledger.rules.optimistic_update import check_unchanged
from transferqueue.ledger.rules.requeue import wait_again
from transferqueue.ledger.rules.work import check_change_work, check_end_work, check_put_work
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.reservations import ReservationState
from transferqueue.ledger.tasks.task_state import LEASED, PENDING
from transferqueue.limits import REASONS_MAX, ROW_NS, VALUE_NS, check_name, check_rows, check_work
from transferqueue.wire.messages import (
    ContinueRequest,
    Delete,
    DoneReply,
    Drop,
    FreeColumns,
    PutRequest,
    PutRows,
    Update,
)

# ---------------------------------------------------------------- put


@carries_out(PutRequest)
@carries_out(ContinueRequest)
def put(state: HasTables, request: PutRequest, session: SessionState, call: int) -> PutRows | Blocked:
    """Add rows. A late retry is recognised by its client and call, while the pages of its rows exist."""
    table = state.table(request.table)
    before = table.known_puts.find(session.client, call)
    if before is not None:
        return _reply_to_retry(table, request, before)
    if table.sealed:
        raise Sealed(
            f'table "{table.name}" is sealed; it takes no further rows; put before the seal, or into another table'
        )
    staged = _check_put(table, request, session.id)
    if type(request) is ContinueRequest:
        continue_rows(table, staged, request, state.now)
    reservation = _check_reservation(table, request, session.id) if request.reservation else None
    if reservation is None and (why := no_room(table, request.rows, staged.nbytes)):
        if request.wait_s > 0:
            return Blocked((("room", table.name), ("table", table.name)))
        raise Full(explain_room(table, why, state.now))
    table.begin(request.rows, new=request.rows, columns=added_columns(table, staged))
    first = table.rows.pages.next_row
    _add_rows(table, staged, session.id, state.now)
    if reservation is not None:
        _use_reservation(table, reservation, staged)
    if table.flow.refills:
        limit_refills(table)
    if session.client and call > 0:
        table.known_puts.add(session.client, call, first, request.rows)
    if table.group_tasks or table.to_drop:
        apply_group_and_stale_rules(table, state.now)
    return _put_rows(table, first, request)


def _put_rows(table: TableState, first: int, request: PutRequest) -> PutRows:
    """The answer of a put, with how many of its rows are over the staleness bound already."""
    versions = request.columns.facts.policy_version
    if versions is None or (fresh_from := table.oldest_fresh_version) <= 0:
        return PutRows(first, request.rows)
    numbers = decode("policy_version", versions, "<i8", request.rows)
    stale = int(((numbers >= 0) & (numbers < fresh_from)).sum())
    return PutRows(first, request.rows, stale, fresh_from if stale else 0)


def _reply_to_retry(table: TableState, request: PutRequest, before: tuple[int, int]) -> PutRows:
    first, rows = before
    if rows != request.rows:
        raise ProtocolError(
            f'this call put {rows} rows into table "{table.name}" before, and now {request.rows}; a call id names one '
            "request"
        )
    return _put_rows(table, first, request)


def _check_put(table: TableState, request: PutRequest, session: int) -> StagedCommit:
    check_rows(request.rows)
    if request.rows > table.limits.rows:
        raise Impossible(
            f'a put of {request.rows} rows can never enter table "{table.name}", which holds at most '
            f"{table.limits.rows}: {request.rows} > {table.limits.rows}"
        )
    staged = check_columns(table, request.columns, request.rows, session)
    check_size(table, staged, request.rows if request.reservation else 1)
    if "group_id" in staged.facts.numbers:
        numbers = staged.facts.numbers
        table.groups.check_put(table.name, numbers["group_id"], numbers["group_size"], _group_rows_max(table))
    if staged.facts.keys is not None:
        table.rows.check_keys(staged.facts.keys, None)
    check_put_work(table, staged)
    return staged


def _group_rows_max(table: TableState) -> int:
    """Size above which a group can never be whole: in the table, or among the rows that may be outstanding."""
    if table.pacing and isinstance(table.pacing_task, GroupTaskState):
        return min(table.limits.rows, table.pacing.rows_ahead_max)
    return table.limits.rows


def _check_reservation(table: TableState, request: PutRequest, session: int) -> ReservationState:
    reservation = reservation_of(table, request.reservation, session)
    if request.rows > reservation.left:
        raise UsageError(
            f"reservation {reservation.id} has {counted(reservation.left, 'row')} left; the put has {request.rows}: "
            "reserve more first"
        )
    return reservation


def no_room(table: TableState, rows: int, nbytes: int) -> str:
    """Why rows without a reservation cannot enter now; "" if they can."""
    resident = table.rows_resident
    if resident + table.flow.reserved + rows > table.limits.rows:
        return (
            f"{counted(rows, 'row', 'does', 'do')} not fit: {resident} {'is' if resident == 1 else 'are'} resident and "
            f"{table.flow.reserved} reserved, of at most {table.limits.rows}"
        )
    most = None if table.limits.bytes is None else table.limits.bytes_max
    if most is not None and nbytes and table.usage.bytes + nbytes > most:
        return f"{nbytes} bytes do not fit: {table.usage.bytes} are in use, of at most {most}"
    return ""


def _add_rows(table: TableState, staged: StagedCommit, session: int, now: float) -> None:
    ids, at = append_rows(table, staged, len(table.tasks), now)
    table.rows_put += staged.rows
    table.history.add(now, "put", ids, session=session)
    _introduce_rows(table, staged, ids, at, now)


def _introduce_rows(table: TableState, staged: StagedCommit, ids: IntArray, where: Index, now: float) -> None:
    """Add new rows to groups, tasks and the staleness index."""
    numbers = staged.facts.numbers
    if "group_id" in numbers:
        table.groups.add(ids, numbers["group_id"], numbers["group_size"])
    names = frozenset(staged.names)
    for task in table.tasks.values():
        complete = task.needs <= names
        task.arrive(ids, where, complete=complete, now=now)
        if complete:
            table.core.effects.wake("task", table.name, task.task.name)
    if "policy_version" in numbers:
        rows = table.rows
        rows.stamped.a[where] = table.clock
        if table.versions is not None:
            table.versions.file(ids, numbers["policy_version"])
            apply_stale_policy(table, ids, now)


def _use_reservation(table: TableState, reservation: ReservationState, staged: StagedCommit) -> None:
    groups = staged.facts.numbers.get("group_id")
    counts = [] if groups is None else table.groups.counts(groups)
    table.flow.use(reservation, staged.rows, counts)


def limit_refills(table: TableState) -> None:
    """Ask for no more refills than each group lacks."""
    for number in list(table.flow.refills):
        group = table.groups.get(number)
        if group is not None:
            table.flow.limit_refills(number, group.size - group.present)


# ---------------------------------------------------------------- update


@in_table(Update)
def update(table: TableState, request: Update, session: int, now: float) -> DoneReply:
    """Add columns or facts to live rows."""
    rows = decode_rows(request.rows)
    staged = check_columns(table, request.columns, rows.size, session)
    at = table.rows.live_places(rows)
    if request.if_unchanged is not None:
        check_unchanged(table, request.if_unchanged, rows, at)
    check_no_group_facts(staged)
    check_size(table, staged, rows.size)
    if not request.overwrite:
        check_unset(table, staged, rows, at)
    check_contents(table, staged, at)
    if staged.facts.keys is not None:
        table.rows.check_keys(staged.facts.keys, rows)
    if staged.empty:
        return DoneReply(rows.size)
    check_change_work(table, staged, rows)
    table.begin(rows.size, columns=added_columns(table, staged))
    reserve_blocks(table, staged)
    write_columns(table, staged, rows, at)
    if request.overwrite:
        retire(table, table.column_groups.prune(at, staged.names))
        table.wake_room()
    table.history.add(now, "updated", rows, session=session, detail=", ".join(staged.names))
    rows_changed(table, staged, rows, at, now)
    apply_stale_policy(table, rows, now)
    apply_group_and_stale_rules(table, now)
    return DoneReply(rows.size)


def rows_changed(table: TableState, staged: StagedCommit, rows: IntArray, at: IntArray, now: float) -> None:
    """Update tasks after columns or facts of live rows were written: rows become ready, or are ranked again.

    If a new version makes rows stale, the caller applies the stale policy afterwards.
    """
    names, facts = frozenset(staged.names), frozenset(staged.facts.numbers)
    for task in table.tasks.values():
        if task.ranker.ranked_by & facts or (task.views and (staged.facts or staged.inline)):
            task.rerank(rows, at)
            table.wake_task(task.task.name)
        if task.needs & names:
            _complete_rows(table, task.task.name, rows, at, now)
    if "policy_version" in facts:
        _record_versions(table, rows, at, table.rows.version.a[at])
        if table.versions is not None:
            table.wake_room()


def _record_versions(table: TableState, rows: IntArray, at: Index, versions: IntArray) -> None:
    """Record the clock at which rows got their policy version. It separates staleness in flight from staleness in the
    queue.
    """
    table.rows.stamped.a[at] = table.clock
    if table.versions is not None:
        table.versions.file(rows, versions)


def _complete_rows(table: TableState, name: str, rows: IntArray, at: IntArray, now: float) -> None:
    task = table.tasks[name]
    ready = (task.state.a[at] == PENDING) & task.completed(at)
    if ready.all():
        task.complete(rows, at, now)
    elif ready.any():
        task.complete(rows[ready], at[ready], now)
    else:
        return
    table.wake_task(name)


# ---------------------------------------------------------------- drop, delete, free columns


def check_reason(table: TableState, reason: str) -> None:
    """Raise unless rows may be dropped with this reason."""
    check_name("reason", reason)
    if reason not in table.rows_dropped and len(table.rows_dropped) >= REASONS_MAX:
        raise UsageError(
            f'reason "{reason}" would be number {REASONS_MAX + 1} of table "{table.name}"; at most {REASONS_MAX} are '
            "counted: use few reasons, and tags for detail"
        )


@in_table(Drop)
def drop(table: TableState, request: Drop, session: int, now: float) -> DoneReply:
    """Drop rows for every task, leased or not."""
    rows = _rows_to_end(table, request.rows)
    check_reason(table, request.reason)
    table.rows.live_places(rows)
    table.begin(rows.size)
    drop_rows(table, rows, request.reason, now)
    apply_group_and_stale_rules(table, now)
    return DoneReply(rows.size)


def _rows_to_end(table: TableState, named: bytes) -> IntArray:
    rows = decode_rows(named)
    check_end_work(table, rows)
    return rows


@in_table(Delete)
def delete(table: TableState, request: Delete, session: int, now: float) -> DoneReply:
    """Free rows. Live rows are dropped as "deleted" first. A table with `Recorded` frees them when a file contains
    them."""
    rows = _rows_to_end(table, request.rows)
    at = table.rows.places(rows)
    for task in table.tasks.values():
        leased = task.state.a[at] == LEASED
        if leased.any():
            raise UsageError(
                f'{numbered(rows[leased])} of table "{table.name}" {agreed(rows[leased], "is", "are")} leased by task '
                f'"{task.task.name}"; wait for its ack, or drop it'
            )
    table.begin(rows.size)
    drop_rows(table, rows[table.rows.pages.fate.a[at] == LIVE], "deleted", now)
    apply_group_and_stale_rules(table, now)
    at, resident = table.rows.pages.find(rows)
    if resident.any() and table.record is None:
        free_rows(table, rows[resident], at[resident])
        table.wake_room()
    return DoneReply(rows.size)


@in_table(FreeColumns)
def free_columns(table: TableState, request: FreeColumns, session: int, now: float) -> DoneReply:
    """Free columns of rows that live on. Values that a row does not have are no error."""
    rows, fields = decode_rows(request.rows), list(dict.fromkeys(request.fields))
    at = table.rows.places(rows)
    if not fields:
        raise UsageError("free_columns without fields frees nothing; name at least one, or delete the rows")
    check_work(
        f"the end of {counted(len(fields), 'field')} of {rows.size:,} rows",
        rows.size,
        (ROW_NS + VALUE_NS * len(fields)) * rows.size,
    )
    for name in fields:
        if name not in table.rows.fields:
            raise table.rows.unknown_field(name)
    if request.again:
        _check_no_groups(table, fields)
    else:
        check_not_needed(table, fields, rows, at)
    chosen = {name: table.rows.has_all(at, table.rows.mask((name,))) for name in fields}
    table.begin(rows.size, columns=len(fields))
    freed = free_values(table, chosen, rows, now, session=session)
    if request.again:
        table.rows.clear_fields(
            at, table.rows.mask(fields)
        )  # as if they were not written yet: a task may be declared that needs them
        live = table.rows.pages.fate.a[at] == LIVE
        for name, had in chosen.items():
            wait_again(table, name, rows[had & live])
        apply_stale_policy(table, rows[live], now)
    apply_group_and_stale_rules(table, now)
    return DoneReply(freed)


def _check_no_groups(table: TableState, fields: list[str]) -> None:
    for task in table.group_tasks:
        for name in fields:
            if name in task.needs:
                raise UsageError(
                    f'task "{task.task.name}" of table "{table.name}" takes whole groups and needs "{name}": it cannot '
                    "wait for single members again; free the column without again, when the task is done with the rows"
                )
