"""Requests that end or extend leases (ack, release, renew), and their expiry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from transferqueue.errors import AlreadyExists, LeaseExpired, UsageError, listing
from transferqueue.ledger.arrays import NO_ROWS, IntArray, decode_ids, decode_rows, numbered
from transferqueue.ledger.requests.put import check_reason, rows_changed
from transferqueue.ledger.requests.registry import in_table
from transferqueue.ledger.rows import (
    StagedCommit,
    added_columns,
    check_columns,
    check_contents,
    check_no_group_facts,
    check_size,
    check_unset,
    discard,
    reserve_blocks,
    retire,
    write_columns,
)
from transferqueue.ledger.rules.finish import drop_staged, end_lease, finish_rows
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, apply_stale_policy, return_rows
from transferqueue.ledger.rules.required_results import check_required_results
from transferqueue.ledger.rules.retry import lease_failed, work_succeeded
from transferqueue.ledger.rules.work import check_change_work
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.leases import LeaseState
from transferqueue.ledger.tasks.task_state import TaskState
from transferqueue.limits import LEASES_PER_REQUEST_MAX, check_rows
from transferqueue.wire.messages import Ack, AckLeases, DoneReply, ReleaseRequest, Renew, Renewed

LOST_SHOWN_MAX: Final = 8
"""How many ended leases the refusal of an ack of several explains."""

# ---------------------------------------------------------------- ack


@in_table(Ack)
def ack(table: TableState, request: Ack, session: int, now: float) -> DoneReply:
    """End rows of a lease as done, together with their results; or as dropped.

    Rows that were dropped meanwhile, perhaps with their group, are passed over; the answer counts the others.
    """
    lease = table.core.leases.get(request.lease, request.token, table.name, session)
    task = table.tasks[lease.task]
    if request.rows is None and request.columns is None and lease.replicas == 1 and lease.is_whole:
        return _ack_whole(table, task, lease, request, session, now)
    named = lease.positions(None if request.rows is None else decode_rows(request.rows))
    _check_whole_groups(table, task, lease, named, "ack")
    if request.drop:
        check_reason(table, request.drop)
    held = named[lease.held[named]]
    staged = _check_results(table, lease, request, session, named)
    if lease.replicas > 1:
        ended = _ack_replica(table, lease, request, session, staged, now)
        apply_stale_policy(table, ended, now)
        apply_group_and_stale_rules(table, now)
        return DoneReply(lease.left if lease.id in table.core.leases.by_id else int(ended.size))
    if named.size and not held.size:
        return _pass_over(table, lease, named, staged, "it was acked")
    rows = lease.rows[held]
    if task.required_results and not request.drop:
        check_required_results(table, task, () if staged is None else staged.names, rows)
    table.begin(rows.size, columns=0 if staged is None else added_columns(table, staged))
    if staged is not None:
        reserve_blocks(table, staged)
        _commit(table, staged, rows, np.flatnonzero(lease.held[named]), now)
    lease.held[held] = lease.open[named] = False
    _finish_acked(table, task, rows, request, session, now)
    _end_if_empty(table, lease, "it was acked")
    apply_stale_policy(table, rows, now)
    apply_group_and_stale_rules(table, now)
    return DoneReply(rows.size)


def _ack_whole(
    table: TableState, task: TaskState, lease: LeaseState, request: Ack, session: int, now: float
) -> DoneReply:
    """Ack a lease whose rows are all open, without columns: no search is needed."""
    rows = lease.rows
    if request.drop:
        check_reason(table, request.drop)
    elif task.required_results:
        check_required_results(table, task, (), rows)
    table.begin(rows.size)
    _finish_acked(table, task, rows, request, session, now)
    end_lease(table, lease, "it was acked", by_holder=True)
    if table.pacing is not None:
        apply_stale_policy(table, rows, now)
    if table.group_tasks or table.to_drop:
        apply_group_and_stale_rules(table, now)
    return DoneReply(rows.size)


def _check_results(
    table: TableState, lease: LeaseState, request: Ack, session: int, named: IntArray
) -> StagedCommit | None:
    staged = _check_columns(table, lease, request, session, named)
    if staged is None:
        return None
    if request.drop:
        raise UsageError(f"an ack that drops its rows ({request.drop!r}) carries no columns: no task would read them")
    if lease.staged is None:  # else these are not used: the rows get those that came first, whatever they have
        held = lease.rows[named[lease.held[named]]]
        needs = table.tasks[lease.task].task.needs  # the holder has read these, and may put others in their place
        check_unset(table, staged, held, table.rows.pages.index(held), replaces=needs)
    return staged


def _check_columns(
    table: TableState, lease: LeaseState, request: Ack | ReleaseRequest, session: int, named: IntArray
) -> StagedCommit | None:
    """Check the columns that come with the end of a lease, for the rows that it names. None if there are none."""
    if request.columns is None:
        return None
    staged = check_columns(table, request.columns, named.size, session)
    check_no_group_facts(staged)
    if staged.empty:
        return None
    if not named.size:
        raise UsageError(f"lease {lease.id} has no rows left; its end carries no columns")
    check_size(table, staged, named.size)
    check_change_work(table, staged, lease.rows[named])
    check_contents(table, staged, table.rows.pages.index(lease.rows[named[lease.held[named]]]))
    if staged.facts.keys is not None:
        table.rows.check_keys(staged.facts.keys, lease.rows[named])
    return staged


def _commit(table: TableState, staged: StagedCommit, rows: IntArray, chosen: IntArray, now: float) -> None:
    """Make results visible to all tasks. `rows` are the rows `chosen` of those that the ack names."""
    at = table.rows.pages.index(rows)
    whole = chosen.size == staged.rows
    write_columns(table, staged, rows, at, None if whole else chosen)
    discard(table, staged)
    rows_changed(table, staged, rows, at, now)


def _finish_acked(table: TableState, task: TaskState, rows: IntArray, request: Ack, session: int, now: float) -> None:
    detail = f"step {request.step}" if request.step >= 0 else ""
    if task.circuit.failures and rows.size:
        work_succeeded(table, task, now)
    if request.drop:
        table.history.add(now, "acked as dropped", rows, task.task.name, session, request.drop)
        return_rows(table, task, rows, failed=False, now=now)
        table.to_drop.append((rows, request.drop))
        return
    table.history.add(now, "acked", rows, task.task.name, session, detail)
    if request.step > task.counters.checkpoint:
        task.step(rows, table.rows.pages.index(rows), request.step)
    else:
        finish_rows(table, task, rows, now, step=request.step)
    if table.pacing is not None and task is table.pacing_task:
        table.wake_room()
    if table.sealed and (task is table.pacing_task or not task.at_work):
        table.wake_tasks()  # other tasks may now know that no row comes (back) to them
    elif table.sealed:
        table.wake_task(task.task.name)


def _check_whole_groups(table: TableState, task: TaskState, lease: LeaseState, named: IntArray, verb: str) -> None:
    """Raise if the request ends part of a group: the rest would be leased again as less than a whole group."""
    if not isinstance(task, GroupTaskState) or named.size == lease.rows.size:
        return
    left = np.ones(lease.rows.size, np.bool_)
    left[named] = False
    left &= lease.held
    rows = lease.rows[named[lease.held[named]]]
    cut = np.intersect1d(_units(table, rows), _units(table, lease.rows[left]))
    if cut.size:
        raise UsageError(
            f'task "{task.task.name}" takes whole groups: {verb} all rows of {numbered(cut, "group")} together, '
            "or drop single rows"
        )


def _units(table: TableState, rows: IntArray) -> IntArray:
    return table.groups.units(rows, table.rows.pages.index(rows))


def _end_if_empty(table: TableState, lease: LeaseState, why: str) -> None:
    if not lease.open.any():
        end_lease(table, lease, why, by_holder=True)


def _pass_over(
    table: TableState, lease: LeaseState, named: IntArray, staged: StagedCommit | None, why: str
) -> DoneReply:
    """None of the rows that the holder names is leased any more. The lease goes on with its other rows."""
    table.begin(named.size)
    if staged is not None:
        _discard_results(table, staged)
    lease.open[named] = False
    _end_if_empty(table, lease, why)
    return DoneReply(0)


def _discard_results(table: TableState, staged: StagedCommit) -> None:
    """Commit results without references, so that their extent closes."""
    table.core.blocks.commit(staged.placed, table.usage, [0] * len(staged.placed))


# ---------------------------------------------------------------- replicas


def _ack_replica(
    table: TableState, lease: LeaseState, request: Ack, session: int, staged: StagedCommit | None, now: float
) -> IntArray:
    """Record the ack of one replica. The last ack ends the rows. Returns the rows that ended."""
    replica = _replica(lease, session)
    if request.rows is not None and decode_rows(request.rows).size != int(lease.open.sum()):
        raise UsageError(f"lease {lease.id} is shared by {lease.replicas} replicas, who ack all of its rows together")
    if _is_last_ack(lease) and not request.drop:
        results = lease.staged or staged
        names = () if results is None else results.names
        check_required_results(table, table.tasks[lease.task], names, lease.rows[lease.held])
        _check_staged_keys(table, [lease])
    table.begin(lease.rows.size, columns=0 if staged is None else len(staged.names))  # `make_way` adds some
    lease.acked[replica] = None
    lease.dropped_as = lease.dropped_as or request.drop
    if staged is not None and lease.staged is None:
        lease.staged = _stage_results(table, lease, request, staged)
    elif staged is not None:
        _discard_results(table, staged)  # another replica's are used
    if len(lease.acked) == lease.replicas:
        return _commit_last_replica_ack(table, lease, request, session, now)
    return NO_ROWS


def _replica(lease: LeaseState, session: int) -> int:
    """The first replica of the session that has not acked."""
    for replica, holder in lease.holders.items():
        if holder == session and replica not in lease.acked:
            return replica
    raise LeaseExpired(f"lease {lease.id} was acked by this replica before")


def _stage_results(table: TableState, lease: LeaseState, request: Ack, staged: StagedCommit) -> StagedCommit:
    """Add the blocks of results (so that their extent may close) that rows get with the last ack."""
    reserve_blocks(table, staged)
    if request.rows is not None:
        lease.staged_order = lease.positions(decode_rows(request.rows))
    return staged


def _staged_rows(lease: LeaseState) -> tuple[IntArray, IntArray]:
    """The rows that get the staged results, and which of the results they get."""
    order = lease.staged_order if lease.staged_order is not None else np.arange(lease.rows.size)
    chosen = np.flatnonzero(lease.held[order])
    return lease.rows[order[chosen]], chosen


def _check_staged_keys(table: TableState, leases: Sequence[LeaseState]) -> None:
    """Raise if a key among the staged results of these leases, which end, names another row meanwhile."""
    row_of_key: dict[str, int] = {}
    for lease in leases:
        if lease.staged is None or lease.staged.facts.keys is None:
            continue
        rows, chosen = _staged_rows(lease)
        keys = [lease.staged.facts.keys[position] for position in chosen.tolist()]
        table.rows.check_keys(keys, rows)
        for key, row in zip(keys, rows.tolist(), strict=True):
            if key and row_of_key.setdefault(key, row) != row:
                raise AlreadyExists(
                    f"results give key {key!r} to rows {row_of_key[key]} and {row}; a key names one row: ack their "
                    "leases one by one"
                )


def _commit_last_replica_ack(table: TableState, lease: LeaseState, request: Ack, session: int, now: float) -> IntArray:
    task, held = table.tasks[lease.task], lease.rows[lease.held]
    if lease.staged is not None and held.size and not lease.dropped_as:
        rows, chosen = _staged_rows(lease)
        at = table.rows.pages.index(rows)
        _outrank(table, lease.staged, at)
        _commit(table, lease.staged, rows, chosen, now)
        retire(table, table.column_groups.prune(at, lease.staged.names))
        lease.staged = None
    drop_staged(table, lease)
    lease.held[:] = lease.open[:] = False
    final = Ack(request.table, request.lease, request.token, drop=lease.dropped_as, step=request.step)
    _finish_acked(table, task, held, final, session, now)
    end_lease(table, lease, "it was acked by all replicas", by_holder=True)
    return held


def _outrank(table: TableState, staged: StagedCommit, at: IntArray) -> None:
    """Have nothing that the rows got since the results were staged outrank them: the last ack gives the rows their
    values, whatever they had."""
    if not staged.blocks:
        return
    into = [names for parts in staged.parts for names in parts]
    added, ended = table.column_groups.make_way(at, staged.names, into, min(staged.blocks))
    for number, count in added:
        table.core.blocks.refer([number], count)
    retire(table, ended)


# ---------------------------------------------------------------- several leases


@in_table(AckLeases)
def ack_leases(table: TableState, request: AckLeases, session: int, now: float) -> DoneReply:
    """End all rows that these leases of one task still hold as done. Everything is checked before the first row
    ends."""
    leases = _held_leases(table, request, session)
    task = table.tasks[leases[0].task]
    for lease in leases:
        _check_ack_of_lease(table, task, lease, session)
    _check_staged_keys(table, [lease for lease in leases if _is_last_ack(lease)])
    held = sum(lease.left for lease in leases)
    table.begin(held)
    acked = [_ack_lease(table, task, lease, request.step, session, now) for lease in leases]
    apply_stale_policy(table, np.concatenate(acked), now)
    apply_group_and_stale_rules(table, now)
    return DoneReply(held)


def _held_leases(table: TableState, request: AckLeases, session: int) -> list[LeaseState]:
    """The leases that a request names. `LeaseExpired` names all those that the session does not hold."""
    numbers, tokens = decode_ids("the list of leases", request.leases), decode_ids("tokens", request.tokens)
    if numbers.size > LEASES_PER_REQUEST_MAX:
        raise UsageError(
            f"{numbers.size} leases are acked at once; at most {LEASES_PER_REQUEST_MAX} may be: ack them in pieces"
        )
    if not numbers.size or numbers.size != tokens.size or np.unique(numbers).size != numbers.size:
        raise UsageError(
            f"{numbers.size} leases are acked with {tokens.size} tokens; name at least one lease, each once with its "
            "token"
        )
    leases, lost = [], []
    for number, token in zip(numbers.tolist(), tokens.tolist(), strict=True):
        try:
            leases.append(table.core.leases.get(number, token, table.name, session))
        except LeaseExpired as error:
            lost.append(str(error))
    if lost:
        raise LeaseExpired(
            f"{len(lost)} of {numbers.size} leases have ended, so none was acked; ack the others without them. "
            f"{'; '.join(lost[:LOST_SHOWN_MAX])}"
        )
    check_rows(sum(lease.left for lease in leases))
    tasks = dict.fromkeys(lease.task for lease in leases)
    if len(tasks) > 1:
        raise UsageError(f"leases of tasks {listing(tasks)} are acked together; ack the leases of one task at a time")
    return leases


def _check_ack_of_lease(table: TableState, task: TaskState, lease: LeaseState, session: int) -> None:
    """Raise unless an ack without results may end the rows that the lease holds."""
    if lease.replicas > 1:
        _replica(lease, session)
    if task.required_results and _is_last_ack(lease):
        names = () if lease.staged is None else lease.staged.names
        check_required_results(table, task, names, lease.rows[lease.held])


def _is_last_ack(lease: LeaseState) -> bool:
    """Whether the next ack ends the rows as done."""
    return len(lease.acked) + 1 == lease.replicas and not lease.dropped_as


def _ack_lease(table: TableState, task: TaskState, lease: LeaseState, step: int, session: int, now: float) -> IntArray:
    """End the rows that the lease holds, or record the ack of one replica. Returns the rows that ended."""
    request = Ack(table.name, lease.id, lease.token, step=step)
    if lease.replicas > 1:
        return _ack_replica(table, lease, request, session, None, now)
    rows = lease.rows[lease.held]
    lease.held[:] = lease.open[:] = False
    _finish_acked(table, task, rows, request, session, now)
    end_lease(table, lease, "it was acked", by_holder=True)
    return rows


# ---------------------------------------------------------------- release, renew


@in_table(ReleaseRequest)
def release(table: TableState, request: ReleaseRequest, session: int, now: float) -> DoneReply:
    """Make rows of a lease ready again. Columns of the request (partial results) replace those of the rows.

    Rows that were dropped meanwhile are passed over; the answer counts the others.
    """
    lease = table.core.leases.get(request.lease, request.token, table.name, session)
    task = table.tasks[lease.task]
    named = lease.positions(None if request.rows is None else decode_rows(request.rows))
    if lease.replicas > 1 and named.size != int(lease.open.sum()):
        raise UsageError(f"lease {lease.id} is shared by {lease.replicas} replicas; release all of its rows")
    _check_whole_groups(table, task, lease, named, "release")
    staged = _check_progress(table, lease, request, session, named)
    rows = lease.rows[named[lease.held[named]]]
    if staged is not None and not rows.size:
        return _pass_over(table, lease, named, staged, "it was released")
    table.begin(rows.size, columns=0 if staged is None else added_columns(table, staged))
    if staged is not None:
        reserve_blocks(table, staged)
        _commit(table, staged, rows, np.flatnonzero(lease.held[named]), now)
        retire(table, table.column_groups.prune(table.rows.pages.index(rows), staged.names))
    lease.held[named] = lease.open[named] = False
    table.history.add(now, "failed" if request.failed else "released", rows, lease.task, session, request.reason)
    if request.failed:
        lease_failed(table, task, lease, rows, request.reason, now)
    return_rows(table, task, rows, failed=request.failed, now=now)
    _end_if_empty(table, lease, "it was released")
    if staged is not None:
        apply_stale_policy(table, rows, now)
        table.wake_room()
    apply_group_and_stale_rules(table, now)
    return DoneReply(rows.size)


def _check_progress(
    table: TableState, lease: LeaseState, request: ReleaseRequest, session: int, named: IntArray
) -> StagedCommit | None:
    staged = _check_columns(table, lease, request, session, named)
    if staged is None:
        return None
    if lease.replicas > 1:
        raise UsageError(
            f"lease {lease.id} is shared by {lease.replicas} replicas, and one of them cannot say for all how far its "
            "rows are; release them without columns"
        )
    return staged


@in_table(Renew)
def renew(table: TableState, request: Renew, session: int, now: float) -> Renewed:
    """Restart the lease time."""
    lease = table.core.leases.get(request.lease, request.token, table.name, session)
    table.begin()
    lease.length_s = request.lease_s or lease.length_s
    table.core.deadlines.add(lease, now + lease.length_s)
    return Renewed(lease.length_s)


# ---------------------------------------------------------------- ends without a request


def expire_lease(table: TableState, lease: LeaseState, why: str, now: float, *, died: bool = True) -> None:
    """End a lease that expired or lost its holder. `died`: its worker did; an unclaimed share had no worker."""
    task = table.tasks[lease.task]
    claimed = bool(lease.holders)
    rows = lease.rows[lease.held]
    lease.held[:] = lease.open[:] = False
    table.history.add(now, why, rows, lease.task, next(iter(lease.holders.values()), 0))
    if died and claimed:
        task.counters.worker_deaths += rows.size
    return_rows(table, task, rows, failed=False, now=now)
    end_lease(table, lease, why, by_holder=False)
    if lease.share is not None:
        for number in table.shared_batches[lease.task, *lease.share].break_up(lease.id):
            expire_lease(table, table.core.leases.by_id[number], "another rank gave up its batch", now, died=died)
    apply_group_and_stale_rules(table, now)
