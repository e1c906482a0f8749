"""Lease: ready rows go to one worker, or as shares of one batch to the ranks and replicas of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from transferqueue.errors import DeadlineExceeded, EndOfTable, Impossible, UsageError, listing
from transferqueue.errors.text import counted
from transferqueue.ledger.arrays import NO_ROWS, Index, IntArray, decode_int64s, tally
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.requests.registry import HasTables, carries_out
from transferqueue.ledger.requests.reply_rows import (
    ReplyPlaces,
    are_awaited,
    await_bytes,
    complete_fields,
    describe_rows,
    places_of,
    values_named,
)
from transferqueue.ledger.rules.explain import explain_lease, explain_stranded
from transferqueue.ledger.rules.groups_and_staleness import apply_group_and_stale_rules, can_be_requeued, return_rows
from transferqueue.ledger.rules.lease_selection import ChosenUnits, check_groups_fit, choose, first_units, tokens_of
from transferqueue.ledger.rules.required_results import stranded
from transferqueue.ledger.rules.work import check_lease_work
from transferqueue.ledger.session_state import SessionState
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.leases import LeaseState
from transferqueue.ledger.tasks.predicates import check_where
from transferqueue.ledger.tasks.shared_batches import SharedBatches, shares
from transferqueue.ledger.tasks.task_state import LEASED, READY, RETRYING, TaskState
from transferqueue.limits import NODES_MAX, REPLICAS_MAX, ROWS_PER_REQUEST_MAX, SPANS_AWAITED_MAX
from transferqueue.policies import AckedColumns
from transferqueue.wire.messages import Leased, LeaseRequest, OrdinalsEnded


@carries_out(LeaseRequest)
def lease(
    state: HasTables, request: LeaseRequest, session: SessionState, call: int
) -> Leased | OrdinalsEnded | Blocked:
    """Answer with rows, with awaited ordinals that have ended, or `Blocked`; raises `EndOfTable`, or
    `DeadlineExceeded` if the request does not wait.
    """
    (table, task), now = state.task(request.table, request.task), state.now
    _check_request(table, task, request)
    if request.world > 1 or request.replicas > 1:
        reply = _claim_share(table, task, request, session.id, now)
    else:
        reply = _lease_units(table, task, request, session.id, now)
    if reply is not None:
        return reply
    if (ended := _ended_spans(table, request)).size:
        return OrdinalsEnded(ended.tobytes())
    if table.sealed:
        held = _rows_held(table, task, session.id) if request.but_held else 0
        _raise_if_ended(table, task, request, held, now)
    if request.wait_s > 0:
        keys = ("task", table.name, task.task.name), ("table", table.name)
        return Blocked((*keys, ("room", table.name)) if request.awaited else keys)  # the end of a row makes room
    raise DeadlineExceeded(explain_lease(table, task, request, now))


# ---------------------------------------------------------------- checks


def _check_request(table: TableState, task: TaskState, request: LeaseRequest) -> None:
    if bool(request.rows) + bool(request.tokens) + bool(request.groups) != 1:
        units = [name for name in ("rows", "tokens", "groups") if getattr(request, name)]
        raise UsageError(
            f"a lease names exactly one of rows, tokens and groups, above 0; this names {' and '.join(units) or 'none'}"
        )
    if request.groups and task.task.groups is None:
        raise UsageError(
            f'task "{task.task.name}" does not take groups (declare it with groups=Complete(...)); lease rows or tokens'
        )
    budget = request.rows or request.tokens or request.groups
    if request.at_least > budget:
        unit = "rows" if request.rows else "tokens" if request.tokens else "groups"
        raise UsageError(f"at_least={request.at_least} is above {unit}={budget}; it is the least of that number")
    if request.rank or request.replica or request.world > 1 or request.replicas > 1:
        _check_peers(request)
    _check_possible(table, task, request)
    if request.awaited:
        _check_awaited(request)
    if request.where:
        check_where(table.rows, request.where, table.expected_fields())
    for name in request.fields or ():
        if name not in table.rows.fields and name not in table.expected_fields():
            raise table.rows.unknown_field(name)
    if request.fields and isinstance(table.retention, AckedColumns):
        _check_not_freed(table, task, request.fields)


def _check_not_freed(table: TableState, task: TaskState, fields: Sequence[str]) -> None:
    """Raise if the task asks for a field whose value may be freed before the task is done with the row."""
    for name in fields:
        holders = table.holders.get(name, ())
        if holders and task.task.name not in holders and name not in task.task.gives and name not in table.rows.inline:
            raise UsageError(
                f'task "{task.task.name}" does not need field "{name}", which table "{table.name}" frees as soon as '
                f"{listing(holders)} {'is' if len(holders) == 1 else 'are'} done with a row (retention AckedColumns); "
                f'add it to the needs of "{task.task.name}"'
            )


def _check_peers(request: LeaseRequest) -> None:
    for index, size in (("rank", "world"), ("replica", "replicas")):
        number, count = getattr(request, index), getattr(request, size)
        if number >= count:
            raise UsageError(f"{index}={number} is not below {size}={count}; {index}s are 0 to {count - 1}")
        if count > REPLICAS_MAX:
            raise Impossible(f"{size}={count} is above {REPLICAS_MAX}, the most sessions there can be")


def _check_awaited(request: LeaseRequest) -> None:
    ordinals = decode_int64s("awaited", request.awaited)
    if ordinals.size % 2 or ordinals.size > 2 * SPANS_AWAITED_MAX:
        raise UsageError(
            f"awaited has {ordinals.size} ordinals; give the first and the last of each span, of at most "
            f"{SPANS_AWAITED_MAX}"
        )
    least = np.concatenate([[0], ordinals[:-1] + 1]) - np.arange(ordinals.size) % 2
    if (ordinals < least).any():
        at = int((ordinals < least).argmax())
        raise UsageError(
            f"awaited names {ordinals[at]} after {ordinals[at - 1] if at else 'nothing'}; ordinals are 0 or more, and "
            "spans ascend without overlap"
        )
    if request.world > 1:
        raise UsageError(
            f"awaited is of world={request.world} ranks, which get shares of one batch; let one rank lease for all"
        )


def _check_possible(table: TableState, task: TaskState, request: LeaseRequest) -> None:
    if request.rows > ROWS_PER_REQUEST_MAX:
        raise Impossible(f"rows={request.rows} is above {ROWS_PER_REQUEST_MAX}, the most that one lease may have")
    least = request.at_least or request.rows
    if request.rows and least > table.limits.rows and not table.sealed:
        raise Impossible(
            f'a lease of {least} rows can never be filled: table "{table.name}" holds at most '
            f"{counted(table.limits.rows, 'row')}; "
            "ask for fewer, or set at_least"
        )
    if task.ranker.equal_counts and task.task.groups is None and request.rows % request.world:
        raise Impossible(
            f"rows={request.rows} cannot be split in equal counts over world={request.world}: "
            f"{request.rows} % {request.world} = {request.rows % request.world}; use a multiple, or "
            "TokenBalanced(equal_counts=False)"
        )
    if request.groups and task.ranker.equal_counts and request.groups % request.world:
        raise Impossible(
            f"groups={request.groups} cannot be split in equal counts over world={request.world}; use a multiple, or "
            "TokenBalanced(equal_counts=False)"
        )
    if request.rows and request.rows < request.world:
        raise Impossible(f"rows={request.rows} cannot give each of world={request.world} ranks a row")
    if table.group_tasks:
        check_groups_fit(table, task, request)
    check_lease_work(table, request)


def _ended_spans(table: TableState, request: LeaseRequest) -> IntArray:
    """The awaited spans whose rows have all ended."""
    if not request.awaited:
        return NO_ROWS
    spans = np.frombuffer(request.awaited, "<i8").reshape(-1, 2)
    ended: IntArray = spans[table.ordinals.have_ended(spans)]
    return ended


def _rows_held(table: TableState, task: TaskState, session: int) -> int:
    """Number of rows of the task that the session has on lease."""
    leases = table.core.leases.of(session)
    return sum(lease.left for lease in leases if lease.table == table.name and lease.task == task.task.name)


def _raise_if_ended(table: TableState, task: TaskState, request: LeaseRequest, held: int, now: float) -> None:
    """Raise if the sealed table can give this request no further row: `EndOfTable`, or `Impossible` if pending rows
    remain. `held` are leased rows that do not come again; the caller ends them before it gets the error of pending
    ones.
    """
    if task.counts[LEASED] > held or task.counts[RETRYING] or can_be_requeued(table, task):
        return
    if task.counts[READY] and not (request.where and not first_units(table, task.queue(request.where), 1).size):
        return
    if task.final or (held and stranded(table, task)):
        but = f" but for {counted(held, 'row')} that this session holds" if held else ""
        raise EndOfTable(f'table "{table.name}" is sealed and task "{task.task.name}" has drained it{but}')
    if stranded(table, task):
        raise Impossible(explain_stranded(table, task, now))


# ---------------------------------------------------------------- one worker


def _lease_units(
    table: TableState, task: TaskState, request: LeaseRequest, session: int, now: float
) -> Leased | Blocked | None:
    choice = choose(table, task, request)
    if choice is None:
        return None
    choice, at, places = _cut(table, task, choice, request)
    if table.core.blocks.cold is not None and (waits := await_bytes(table, places)) is not None:
        return waits
    table.begin(choice.rows.size)
    choice.queue.taken(choice.count)
    lease = _open_lease(table, task, choice.rows, request, now)
    task.lease(lease.rows, at, lease.id)
    table.core.leases.hold(lease, session, 0)
    return _lease_reply(table, lease, at, request, session, now, places)


def _cut(
    table: TableState, task: TaskState, choice: ChosenUnits, request: LeaseRequest
) -> tuple[ChosenUnits, Index, ReplyPlaces]:
    """As many of the chosen units, from the first on, as one reply may name with all that their rows continue; the
    first alone, whatever it needs. Their positions and places."""
    at = table.rows.pages.where(choice.rows)
    fields = _reply_fields(table, task.task.needs, at, request)
    places = places_of(table, at, fields, NODES_MAX if choice.count > 1 else math.inf)
    if (fit := places.fit) is None:
        return choice, at, places
    units = fit if choice.sizes is None else int(np.cumsum(choice.sizes).searchsorted(fit, "right"))
    choice = _first_units(table, choice, max(units, 1), request)
    at = table.rows.pages.where(choice.rows)
    return choice, at, places_of(table, at, fields)


def _first_units(table: TableState, choice: ChosenUnits, units: int, request: LeaseRequest) -> ChosenUnits:
    """The first of the units, since a reply may name no more. `UsageError` if these are fewer than was asked for."""
    choice = choice.first(units)
    sizes = np.ones(units, np.int64) if choice.sizes is None else choice.sizes
    unit, amount = ("rows", choice.rows.size) if request.rows else ("groups", units)
    if request.tokens:
        unit, amount = "tokens", int(tokens_of(table, choice.rows, sizes).sum())
    if not choice.final and not 0 < request.at_least <= amount:
        raise UsageError(
            f"the rows of this lease continue others, and one reply names at most {NODES_MAX:,} stored values: "
            f"{amount} {unit} fit; ask for {unit}={amount}, for at_least={amount} or less, or for fewer fields"
        )
    return choice


def _open_lease(table: TableState, task: TaskState, rows: IntArray, request: LeaseRequest, now: float) -> LeaseState:
    """Open a lease of the rows, without a holder. The caller marks the rows as leased."""
    length = request.lease_s or task.task.lease_s
    lease = table.core.leases.open(table.name, task.task.name, rows, length, now)
    lease.replicas = request.replicas
    task.circuit.begin(lease.id)
    table.core.deadlines.add(lease, now + length)
    return lease


def _lease_reply(
    table: TableState,
    lease: LeaseState,
    at: Index,
    request: LeaseRequest,
    session: int,
    now: float,
    places: ReplyPlaces | None = None,
) -> Leased:
    fields = _reply_fields(table, table.tasks[lease.task].task.needs, at, request)
    content, blocks = describe_rows(table, lease.rows, at, fields, places)
    table.core.blocks.pin(session, blocks)
    table.history.add(now, "leased", lease.rows, lease.task, session, f"lease {lease.id}")
    if table.pacing and table.pacing.task == lease.task:
        table.core.effects.wake("clock", table.name)
        _count_staleness(table, at)
    return Leased(lease.id, lease.token, lease.length_s, table.clock, content)


def _reply_fields(table: TableState, needs: Sequence[str], at: Index, request: LeaseRequest) -> Sequence[str]:
    """The fields of a reply to the request. `needs`: those of the task, which every ready row has."""
    whole = request.fields is None or tuple(request.fields) == needs
    return needs if whole else complete_fields(table, at, request.fields or ())


def _count_staleness(table: TableState, at: Index) -> None:
    """Count how many versions behind the clock leased rows are, and where they fell behind. Rows without a version do
    not count.
    """
    version = table.rows.version.a[at]
    has_version = version >= 0
    version = version[has_version]
    lag = np.maximum(table.clock - version, 0)
    in_flight = np.clip(table.rows.stamped.a[at][has_version] - version, 0, lag)
    _add_counts(table.staleness, lag)
    _add_counts(table.staleness_in_flight, in_flight)
    _add_counts(table.staleness_in_queue, lag - in_flight)


def _add_counts(counts: dict[int, int], lags: IntArray) -> None:
    for lag, count in tally(lags):
        counts[lag] = counts.get(lag, 0) + count


# ---------------------------------------------------------------- ranks and replicas


def _claim_share(
    table: TableState, task: TaskState, request: LeaseRequest, session: int, now: float
) -> Leased | Blocked | None:
    key = (task.task.name, request.world, request.replicas)
    shared = table.shared_batches.get(key) or SharedBatches(request.world, request.replicas)
    claim = shared.waiting(request)
    if claim is None:
        choice = choose(table, task, request)
        if choice is None:
            return None
        choice, units_of_rank = _share_out(table, task, choice, request)
        table.begin(choice.rows.size)
        table.shared_batches[key] = shared
        claim = shared.make(request, _make_shares(table, task, choice, units_of_rank, request, now))
        table.wake_task(task.task.name)
        table.core.writing = False  # the batch is there, whether or not this rank can have its share now
    number, batch = claim
    lease = table.core.leases.by_id[batch.shares[request.rank]]
    if table.core.blocks.cold is not None and lease.reply is None:
        at = table.rows.pages.index(lease.rows[lease.held])
        fields = _reply_fields(table, task.task.needs, at, request)
        if (waits := await_bytes(table, places_of(table, at, fields))) is not None:
            return waits
    reply = _join_share(table, lease, request, session, now)
    shared.claim(number, request.rank, request.replica)
    return reply


def is_loading(table: TableState, lease: LeaseState) -> bool:
    """Whether the lease is a share that no rank has claimed because its blocks are being loaded from a disk."""
    if table.core.blocks.cold is None or lease.share is None or lease.holders:
        return False
    at = table.rows.pages.index(lease.rows[lease.held])
    return are_awaited(table, places_of(table, at, table.tasks[lease.task].task.needs))


def _share_out(
    table: TableState, task: TaskState, choice: ChosenUnits, request: LeaseRequest
) -> tuple[ChosenUnits, list[IntArray]]:
    """The units of each rank, by position; fewer of the first if one rank's reply would name too much. A single unit of
    a rank may need whatever it does."""
    chosen = choice
    while True:
        sizes = np.ones(chosen.count, np.int64) if chosen.sizes is None else chosen.sizes
        units_of_rank = shares(
            tokens_of(table, chosen.rows, sizes), request.world, equal_counts=task.ranker.equal_counts
        )
        if not table.usage.continued:
            return chosen, units_of_rank
        at = table.rows.pages.where(chosen.rows)
        named = values_named(table, at, _reply_fields(table, task.task.needs, at, request))
        named = np.add.reduceat(named, np.cumsum(sizes) - sizes)
        most = max(int(named[units].sum()) if units.size > 1 else 0 for units in units_of_rank)
        if most <= NODES_MAX:
            break
        count = min(chosen.count - 1, chosen.count * NODES_MAX // most)
        chosen = chosen.first(max(count - count % request.world, request.world))
    if chosen is not choice:
        _first_units(table, choice, chosen.count, request)
    return chosen, units_of_rank


def _make_shares(
    table: TableState,
    task: TaskState,
    choice: ChosenUnits,
    units_of_rank: list[IntArray],
    request: LeaseRequest,
    now: float,
) -> list[int]:
    choice.queue.taken(choice.count)
    sizes = np.ones(choice.count, np.int64) if choice.sizes is None else choice.sizes
    rows, counts = _rows_of(choice, sizes, np.concatenate(units_of_rank))
    ends = np.cumsum([0, *map(len, units_of_rank)])
    ends = np.concatenate([[0], np.cumsum(counts)])[ends]
    leases = [_open_lease(table, task, rows[first:end], request, now) for first, end in pairwise(ends.tolist())]
    numbers = [lease.id for lease in leases]
    task.lease(rows, table.rows.pages.index(rows), np.repeat(numbers, np.diff(ends)))
    for lease in leases:
        lease.share = (request.world, request.replicas)
    return numbers


def _rows_of(choice: ChosenUnits, sizes: IntArray, units: IntArray) -> tuple[IntArray, IntArray]:
    """The rows of the units at these positions, unit by unit, and how many each has."""
    counts = sizes[units]
    begin_here, begin_there = np.cumsum(counts) - counts, np.cumsum(sizes) - sizes
    places = np.arange(int(counts.sum())) + np.repeat(begin_there[units] - begin_here, counts)
    return choice.rows[places], counts


def _join_share(table: TableState, lease: LeaseState, request: LeaseRequest, session: int, now: float) -> Leased:
    """Make this replica a holder of the share. Every replica gets the same reply."""
    if lease.reply is not None and lease.fields != request.fields:
        raise UsageError(
            f"replica {request.replica} asks for fields {request.fields}, the first replica asked for {lease.fields}; "
            "all replicas must ask for the same"
        )
    first = not lease.holders
    table.begin(lease.rows.size)
    table.core.leases.hold(lease, session, request.replica)
    if first:
        _start_share(table, lease, now)
        reply = _lease_reply(table, lease, table.rows.pages.index(lease.rows), request, session, now)
        if lease.replicas > 1:
            # Pin for the lease too: the first replica may unpin before the last one asks.
            lease.reply, lease.fields = reply, request.fields
            table.core.blocks.pin(-lease.id, _blocks_of(reply))
        return reply
    reply = lease.reply or _lease_reply(table, lease, table.rows.pages.index(lease.rows), request, session, now)
    table.core.blocks.pin(session, _blocks_of(reply))
    left = lease.length_s if lease.deadline is None else max(0.0, lease.deadline - now)
    return Leased(reply.lease, reply.token, left, reply.version, reply.content)


def _start_share(table: TableState, lease: LeaseState, now: float) -> None:
    """Start the lease time of a claimed share, without rows that were dropped or became stale."""
    table.core.deadlines.add(lease, now + lease.length_s)
    stale = _stale_since(table, lease)
    if stale.size:
        lease.remove(stale)
        return_rows(table, table.tasks[lease.task], stale, failed=False, now=now)
    lease.begin(now)
    apply_group_and_stale_rules(table, now)


def _stale_since(table: TableState, lease: LeaseState) -> IntArray:
    """Rows of an unclaimed share that are over the staleness bound now, with the rest of their groups."""
    task = table.tasks[lease.task]
    rows = lease.rows[lease.held]
    if task is not table.pacing_task or table.oldest_fresh_version <= 0:
        return NO_ROWS
    at = table.rows.pages.index(rows)
    version = table.rows.version.a[at]
    stale = (version >= 0) & (version < table.oldest_fresh_version)
    if isinstance(task, GroupTaskState):
        units = table.groups.units(rows, at)
        stale = np.isin(units, units[stale])
    chosen: IntArray = rows[stale]
    return chosen


def _blocks_of(reply: Leased) -> list[int]:
    return [at.block for part in reply.content.parts for at in part.blocks]
