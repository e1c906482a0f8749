"""Operations on leases: lease rows, renew the lease, and end it by ack (alone or with others), drop or release."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.memory.verify import Damaged
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.column_source import ColumnSource, ColumnsWanted, content_source
from transferqueue.client.operations.commit import Commit
from transferqueue.client.operations.device import destination
from transferqueue.client.operations.row_metadata import GivenFacts
from transferqueue.client.session.calls import ENDLESS_S, Deadline, seconds, timeout
from transferqueue.client.session.lease_renewal import RenewedLease
from transferqueue.client.session.operation_runner import Operation, StartDeadline, request_reply, unexpected
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import BatchEnded, LeaseExpired, NotFound, RowsEnded, ShardLost, UsageError, listing
from transferqueue.errors.text import shown
from transferqueue.limits import LEASES_PER_REQUEST_MAX, check_name
from transferqueue.policies import Predicate
from transferqueue.schema import FieldsWanted, sliced_fields
from transferqueue.storage.elements.dtypes import I64
from transferqueue.wire import messages as m

B = TypeVar("B")

_log: Final = logging.getLogger("transferqueue.client")

REASON_CHARS_MAX = 4096
SPANS_SHOWN = 8
"""Spans that the text of `RowsEnded` names."""
LOST_MAX = 8
"""How often rows of a lost shard are leased or read again before `ShardLost` is raised. Each time they may lie in
another shard."""


class LeaseSpec(NamedTuple):
    """The checked arguments of a `lease`, `leases` or `loader`."""

    request: m.LeaseRequest
    time_limit_s: float | None
    """How long the client renews the lease. None: as long as the task allows; 0: not at all."""
    wanted: ColumnsWanted = ColumnsWanted()


def lease_spec(
    table: str,
    task: str,
    *,
    rows: int | None,
    tokens: int | None,
    groups: int | None,
    at_least: int | None,
    timeout_s: float | None,
    where: Predicate | Iterable[Predicate],
    lease_s: float | None,
    time_limit_s: float | None,
    fields: FieldsWanted,
    rank: int,
    world: int,
    replica: Sequence[int] | None,
    awaited: Iterable[tuple[int, int]] = (),
    but_held: bool = False,
    device: Any = None,
) -> LeaseSpec:
    """Check the arguments of a lease one by one. Those of the last few leases are remembered: a loop asks for the same
    again."""
    plain = (table, task, rows, tokens, groups, at_least, timeout_s, lease_s, time_limit_s, rank, world)
    checked = _remembered if _REMEMBERED.issuperset(map(type, plain)) else _checked
    request, limit_s, *_ = spec = checked(*plain)
    if where == () and fields is None and replica is None and awaited == () and not but_held and device is None:
        return spec
    peer, peers = checks.peer(replica)
    names, slices = checks.field_slices(fields)
    request = msgspec.structs.replace(
        request,
        where=predicates(where),
        fields=names,
        replica=peer,
        replicas=peers,
        awaited=_spans(awaited),
        but_held=bool(but_held),
    )
    return LeaseSpec(request, limit_s, ColumnsWanted(slices, destination(device)))


def _checked(
    table: str,
    task: str,
    rows: int | None,
    tokens: int | None,
    groups: int | None,
    at_least: int | None,
    timeout_s: float | None,
    lease_s: float | None,
    time_limit_s: float | None,
    rank: int,
    world: int,
) -> LeaseSpec:
    sizes = {"rows": rows, "tokens": tokens, "groups": groups}
    wanted: dict[str, Any] = {name: checks.positive(name, size) for name, size in sizes.items() if size is not None}
    if len(wanted) != 1:
        given = " and ".join(f"{name}={size}" for name, size in wanted.items()) or "none of them"
        raise UsageError(f"lease of task {task!r}: give exactly one of rows=, tokens=, groups=; {given} was given")
    request = m.LeaseRequest(
        table=table,
        task=check_name("task", task),
        **wanted,
        at_least=0 if at_least is None else checks.positive("at_least", at_least),
        wait_s=timeout(timeout_s),
        lease_s=0.0 if lease_s is None else _duration(lease_s),
        rank=checks.whole("rank", rank),
        world=checks.positive("world", world),
    )
    limit_s = None if time_limit_s is None else seconds("time_limit_s", time_limit_s)
    return LeaseSpec(request, limit_s)


def _check_limit(terms: TableInfo, request: m.LeaseRequest, time_limit_s: float) -> None:
    """`UsageError` if the lease would last longer than its time limit."""
    lease_s = request.lease_s or next((task.lease_s for task in terms.last.tasks if task.name == request.task), 0.0)
    if time_limit_s < lease_s:
        raise UsageError(
            f'lease of task "{request.task}": time_limit_s={time_limit_s:g} is below its lease of {lease_s:g} s, for '
            f"which rows are lent at least; give lease_s={time_limit_s:g} too, or a longer limit"
        )


def _spans(awaited: Iterable[tuple[int, int]]) -> bytes:
    """First and last ordinal of each span, as the request has them. The server checks that they ascend."""
    try:
        spans = np.array(list(awaited), np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"awaited={shown(awaited)}: {error}; give (first, last) ordinals, such as [(0, 7), (16, 23)]"
        ) from None
    if spans.size and (spans.ndim != 2 or spans.shape[1] != 2):
        raise UsageError(
            f"awaited={shown(awaited)} are not pairs; give (first, last) ordinals, such as [(0, 7), (16, 23)]"
        )
    return spans.astype("<i8").tobytes()


_REMEMBERED: Final = frozenset({str, int, float, type(None)})
"""Types of arguments that are remembered: values that equal themselves for ever."""
_remembered: Final = lru_cache(maxsize=64, typed=True)(_checked)


def predicates(where: Predicate | Iterable[Predicate]) -> list[Predicate]:
    """One predicate or several, all of which must hold."""
    if not isinstance(where, Predicate | Iterable) or isinstance(where, str | Mapping):
        raise UsageError(
            f"where={shown(where)} is {type(where).__name__}; give TagIs, VersionBetween or Compare, or a list of "
            "these: rows are chosen at the server, which carries out no code of clients"
        )
    chosen = [where] if isinstance(where, Predicate) else list(where)
    for predicate in chosen:
        if not isinstance(predicate, Predicate):
            raise UsageError(
                f"where={shown(predicate)} is {type(predicate).__name__}; give TagIs, VersionBetween or Compare, or a "
                "list of these"
            )
    return [checks.policy("where", predicate, Predicate) for predicate in chosen]


def lease(
    client: ClientSession,
    terms: TableInfo,
    spec: LeaseSpec,
    batch: Callable[[BatchLease, m.Leased], B],
) -> Operation[B]:
    """Lease rows and make a batch of them. If that fails, release them. If a shard that had some of them is gone, lease
    others."""
    request, time_limit_s, wanted = spec
    if wanted.slices:
        sliced_fields(terms.fields, wanted.slices)  # what this client knows is refused before rows are leased
    deadline: Deadline = yield StartDeadline(request.wait_s)
    if terms.forgotten:
        _log_forgotten(terms)
    for _ in range(LOST_MAX):
        try:
            return (yield from _lease(client, terms, request, batch, time_limit_s, wanted))
        except ShardLost:
            request = msgspec.structs.replace(request, wait_s=deadline.left())
    return (yield from _lease(client, terms, request, batch, time_limit_s, wanted))


def _log_forgotten(terms: TableInfo) -> None:
    """Warn, once for each table: a loop that does not end its batches gets the same rows again for ever."""
    task, terms.forgotten = terms.forgotten, ""
    if not terms.forgotten_logged:
        terms.forgotten_logged = True
        _log.warning(
            'a batch of task "%s" (table "%s") was neither acked nor released before it was collected, so its rows are '
            'given out again; work inside "with batch:", whose clean exit acks, or call batch.ack(...)',
            task,
            terms.name,
        )


def _lease(
    client: ClientSession,
    terms: TableInfo,
    request: m.LeaseRequest,
    batch: Callable[[BatchLease, m.Leased], B],
    time_limit_s: float | None,
    wanted: ColumnsWanted,
) -> Operation[B]:
    if time_limit_s:
        _check_limit(terms, request, time_limit_s)
    leased = yield request
    if type(leased) is m.OrdinalsEnded:
        raise _rows_ended(request, leased)
    if not isinstance(leased, m.Leased):
        raise unexpected(request, leased, m.Leased)
    try:
        if time_limit_s is None:
            time_limit_s = terms.time_limits.get(request.task)
            if time_limit_s is None:  # another client has added the task since
                time_limit_s = yield from _time_limit(terms, request.task)
        renewal = None
        if time_limit_s:
            lease_s = max(request.lease_s, leased.lease_s)
            renewal = RenewedLease(terms.name, leased.lease, leased.token, lease_s, time_limit_s)
        source = yield from content_source(
            client, leased.content, terms, f'task "{request.task}" (table "{terms.name}")', wanted
        )
        return batch(BatchLease(client, terms, request.task, leased, source, renewal), leased)
    except BaseException as error:
        if isinstance(error, Damaged):  # these count as failed, or they would come again for ever
            client.connection.post(
                m.ReleaseRequest(
                    table=terms.name,
                    lease=leased.lease,
                    token=leased.token,
                    rows=error.rows,
                    failed=True,
                    reason=str(error)[:4096],
                )
            )
        client.connection.post(m.ReleaseRequest(table=terms.name, lease=leased.lease, token=leased.token))
        raise


def _rows_ended(request: m.LeaseRequest, reply: m.OrdinalsEnded) -> RowsEnded:
    spans = np.frombuffer(reply.awaited, "<i8").reshape(-1, 2).tolist()
    ordinals = tuple((first, last) for first, last in spans)
    named = ", ".join(f"{first} to {last}" for first, last in ordinals[:SPANS_SHOWN])
    more = f" and {len(ordinals) - SPANS_SHOWN} more" if len(ordinals) > SPANS_SHOWN else ""
    return RowsEnded(
        f'task "{request.task}" of table "{request.table}" will get no row of ordinals {named}{more}: they were '
        "dropped, deleted or finished; lease again without them",
        ordinals,
    )


def _time_limit(terms: TableInfo, task: str) -> Operation[float]:
    """The time limit of a task, by the table's terms as they are now. 0: its leases are not renewed."""
    terms.update_from((yield from request_reply(m.OpenTable(name=terms.name), m.TableTerms)))
    return terms.time_limits.get(task, 0.0)


def ack(
    lease: BatchLease,
    rows: object,
    facts: GivenFacts,
    columns: Mapping[str, Any],
    step: int,
    *,
    refers: bool = True,
) -> Operation[int]:
    """Ack the rows, and commit results and facts about them in the same request. `refers` is as of `commit.Commit`.
    Returns how many rows ended."""
    lease.check()
    chosen = lease.chosen(rows)

    def request(_: int, carried: m.Columns | None) -> m.Request:
        return m.Ack(
            table=lease.table,
            lease=lease.number,
            token=lease.token,
            rows=chosen,
            columns=carried,
            step=checks.step(step, -1),
        )

    carried = _request_with_columns(lease, chosen, facts, columns, request, "ack", refers=refers)
    reply = yield from _ending_lease_on_expiry(lease, carried)
    lease.take(chosen, "was acked")
    return reply.rows


def ack_leases(client: ClientSession, terms: TableInfo, held: Iterable[BatchLease], step: int) -> Operation[int]:
    """Ack all rows that the leases still hold, in one request. Returns how many rows."""
    leases = checks.few("batches", held, LEASES_PER_REQUEST_MAX)
    _check_leases(client, terms.name, leases)
    request = m.AckLeases(
        table=terms.name,
        leases=np.array([lease.number for lease in leases], "<i8").tobytes(),
        tokens=np.array([lease.token for lease in leases], "<i8").tobytes(),
        step=checks.step(step, -1),
    )
    try:
        reply = yield from request_reply(request, m.DoneReply)
    except LeaseExpired:
        yield from _find_lost(leases)
        raise
    for lease in leases:
        lease.take(None, "was acked")
    return reply.rows


def _check_leases(client: ClientSession, table: str, leases: tuple[BatchLease, ...]) -> None:
    """Raise unless these are leases of one task of this table, each held by this connection, and each given once."""
    if not leases:
        raise UsageError(f'an ack of no batches of table "{table}" would change nothing; give at least one batch')
    for lease in leases:
        if lease.table != table or lease.client is not client:
            raise UsageError(
                f'lease {lease.number} of table "{lease.table}" is acked by a handle of table "{table}", perhaps of '
                "another connection; ack it with the table that leased it"
            )
    tasks = dict.fromkeys(lease.task for lease in leases)
    if len(tasks) > 1:
        raise UsageError(f"batches of tasks {listing(tasks)} are acked together; ack the batches of one task at a time")
    if len({lease.number for lease in leases}) < len(leases):
        raise UsageError(f"{len(leases)} batches are acked, and one of them is given twice; give each once")
    _check_held(leases)


def _check_held(leases: tuple[BatchLease, ...]) -> None:
    over = [lease.number for lease in leases if lease.ended or lease.lost]
    if not over:
        return
    for lease in leases:
        if lease.lost:
            lease.expire()
    kind = LeaseExpired if any(lease.expired for lease in leases) else BatchEnded
    raise kind(
        f"{len(over)} of {len(leases)} batches have ended (leases {listing(over)}), so none was acked; ack the others "
        "without them (batch.ended tells which)"
    )


def _find_lost(leases: tuple[BatchLease, ...]) -> Operation[None]:
    """Ask for each lease whether it is held, by renewing it, so that `ended` of each batch is true."""
    for lease in leases:
        with suppress(LeaseExpired):
            yield from renew(lease, None)


def drop(lease: BatchLease, reason: str, rows: object) -> Operation[int]:
    """Drop the rows for every task. Returns how many rows ended."""
    lease.check()
    chosen = lease.chosen(rows)
    request = m.Ack(
        table=lease.table, lease=lease.number, token=lease.token, rows=chosen, drop=check_name("drop reason", reason)
    )
    reply = yield from _ending_lease_on_expiry(lease, request_reply(request, m.DoneReply))
    lease.take(chosen, "was dropped")
    return reply.rows


def release(
    lease: BatchLease, rows: object, failed: bool, reason: str, facts: GivenFacts, columns: Mapping[str, Any]
) -> Operation[int]:
    """Release the rows, and commit how far they are in the same request. Returns how many rows are ready again."""
    lease.check()
    chosen, is_failed = lease.chosen(rows), checks.flag("failed", failed)

    def request(_: int, carried: m.Columns | None) -> m.Request:
        return m.ReleaseRequest(
            table=lease.table,
            lease=lease.number,
            token=lease.token,
            rows=chosen,
            failed=is_failed,
            reason=str(reason)[:REASON_CHARS_MAX],
            columns=carried,
        )

    carried = _request_with_columns(lease, chosen, facts, columns, request, "release")
    reply = yield from _ending_lease_on_expiry(lease, carried)
    lease.take(chosen, "was released")
    return reply.rows


def _request_with_columns(
    lease: BatchLease,
    chosen: bytes | None,
    facts: GivenFacts,
    columns: Mapping[str, Any],
    request: Callable[[int, m.Columns | None], m.Request],
    call: str,
    *,
    refers: bool = True,
) -> Operation[m.DoneReply]:
    """Send a request about rows of a lease, with the columns and facts that were given, if any."""
    count = len(lease.left) if chosen is None else len(chosen) // 8
    if not (columns or facts.said()):
        return request_reply(request(count, None), m.DoneReply)
    endless = Deadline(lease.client.clock, ENDLESS_S)

    def before(name: str) -> I64 | None:
        return lease.source.lengths(name, chosen)

    commit = Commit(lease.client, lease.terms, call, facts, columns, count, endless, refers=refers, before=before)
    return commit.send(request, m.DoneReply)


def renew(lease: BatchLease, lease_s: float | None) -> Operation[float]:
    """Renew the lease for `lease_s` from now. Returns for how long the server granted it."""
    lease.check()
    request = m.Renew(
        table=lease.table, lease=lease.number, token=lease.token, lease_s=0.0 if lease_s is None else _duration(lease_s)
    )
    renewed = yield from _ending_lease_on_expiry(lease, request_reply(request, m.Renewed))
    lease.renewed(renewed.lease_s)
    return renewed.lease_s


def failure(error: BaseException) -> tuple[bool, str]:
    """Whether an exception that left a batch's block counts as a failed attempt, and its text. An interrupt or a
    cancelled task does not count."""
    return isinstance(error, Exception), f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]


def _ending_lease_on_expiry(lease: BatchLease, verb: Operation[B]) -> Operation[B]:
    """Run a verb. If the server refuses it with `LeaseExpired`, end the lease here too."""
    try:
        return (yield from verb)
    except LeaseExpired:
        lease.expire()
        raise


def _duration(lease_s: float) -> float:
    duration_s = seconds("lease_s", lease_s)
    if duration_s == 0:
        raise UsageError("lease_s=0 would end at once; give a positive number of seconds")
    return duration_s


class BatchLease:
    """A lease of this process. `left` has the ids of its rows that are not acked, dropped or released yet. `renewal` is
    the client's renewal of it; None: only the caller renews it."""

    def __init__(
        self,
        client: ClientSession,
        terms: TableInfo,
        task: str,
        leased: m.Leased,
        source: ColumnSource,
        renewal: RenewedLease | None = None,
    ) -> None:
        self.client, self.terms, self.task, self.source = client, terms, task, source
        self.table = terms.name
        self.number, self.token = leased.lease, leased.token
        self.left: NDArray[np.int64] = np.frombuffer(leased.content.rows, "<i8")
        self.ended = ""
        self.expired = False
        self._renewal = renewal
        if renewal is not None:
            client.connection.keep(renewal, leased.lease_s)

    @property
    def lost(self) -> bool:
        """Whether the server has said that this session no longer holds the lease."""
        return self.expired or (self._renewal is not None and self._renewal.lost)

    @property
    def overdue(self) -> bool:
        """Whether the time limit has passed: others have the rows by now, or will soon."""
        return self.lost or (self._renewal is not None and self.client.clock() >= self._renewal.until)

    def renewed(self, lease_s: float) -> None:
        """The caller has renewed the lease, which lasts `lease_s` from now. Its time limit counts from here."""
        if self._renewal is not None:
            self.client.connection.keep(self._renewal, lease_s)

    def restart(self) -> None:
        """The caller has used the lease, so it does not hang. Its time limit counts from here."""
        if self._renewal is not None:
            self.client.connection.keep_on(self._renewal)

    def chosen(self, rows: object) -> bytes | None:
        """Ids of the rows that a verb names; None: all rows of the lease. `NotFound` for a row that is not in it."""
        if rows is None:
            return None if len(self.left) * 8 == self._whole else self.left.tobytes()
        wanted = np.frombuffer(checks.row_ids(rows), "<i8")
        foreign = wanted[~np.isin(wanted, self.left)]
        if foreign.size:
            raise NotFound(
                f'row {foreign[0]} is not, or not any more, in this batch of task "{self.task}"; it has '
                f"{listing(self.left.tolist())}"
            )
        return wanted.tobytes()

    @property
    def _whole(self) -> int:
        return self.source.rows * 8

    def take(self, rows: bytes | None, how: str) -> None:
        """Remove rows from the lease, and end it when none is left."""
        if rows is not None:
            self.left = self.left[~np.isin(self.left, np.frombuffer(rows, "<i8"))]
        if rows is None or not len(self.left):
            self.end(how)
        else:
            self.restart()

    def end(self, how: str) -> None:
        """End the lease and return its memory. `how` completes "the batch ..." in later errors."""
        if self._renewal is not None:
            self._renewal.end()
        if not self.ended:
            self.ended = how
            self.left = self.left[:0]
            self.source.end(how)

    def expire(self) -> None:
        """The server has given the rows to others: end the lease."""
        self.expired = True
        self.end("has expired")

    def _limit(self) -> str:
        return f" ({self._renewal.limit_s:g} s)" if self._renewal is not None else ""

    def check(self) -> None:
        """Raise `LeaseExpired` if the lease was lost, `BatchEnded` if the holder ended it."""
        if self.lost and not self.ended:
            self.expire()
        if self.expired:
            raise LeaseExpired(
                f'lease {self.number} of task "{self.task}" (table "{self.table}") has expired, and its rows went back '
                "to others; lease other rows. A lease is renewed for a worker that lives, up to the time limit of its "
                f"task{self._limit()}"
            )
        if self.ended:
            raise BatchEnded(
                f'the batch of task "{self.task}" (table "{self.table}", lease {self.number}) {self.ended}; '
                "lease another one"
            )
