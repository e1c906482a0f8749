"""Each row is done once in each task, and ends once: never lost, never twice.

The server numbers leases in ascending order. So if a row is in two leases of a task, the
lease with the lower number ended before the other began: its ack must fail, since after an ack there would be no
second lease. Rows that a task may rightly lease again (requeued when stale, rolled back) are exempt.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from transferqueue.policies import Refill, Requeue, Task
from transferqueue.testing.checker.base import Found, Judge, Operation, Violation
from transferqueue.testing.history import history as h

ALONE: tuple[str, ...] = ("stale", "attempts", "group_incomplete", "lost", "table_dropped")
"""Reasons for which the queue drops rows on its own."""


SHOWN_MAX = 5
"""Rows that the text of a violation names."""


class _Lent:
    """One lease of a row."""

    __slots__ = ("lease", "replicas")

    def __init__(self, lease: int, replicas: int) -> None:
        self.lease, self.replicas = lease, replicas


class _Table:
    """How the rows of one table ended."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.again = False
        """Whether rows may rightly be done again."""
        self.lent: dict[tuple[str, int], list[_Lent]] = defaultdict(list)
        self.acked: dict[tuple[str, int], int] = {}
        """(task, row) -> the lease whose ack was accepted."""
        self.maybe_acked: set[tuple[str, int]] = set()
        self.failed = Counter[tuple[str, int]]()
        """(task, row) -> how often a holder said, perhaps in vain, that its work with the row failed."""
        self.dropped: dict[int, tuple[str, int]] = {}
        """Row -> why it ended, and the last operation that had begun when the end was known."""
        self.maybe_dropped: dict[int, str] = {}
        self.put = self.maybe_put = 0
        self.rows: set[int] = set()


class RowEndJudge(Judge):
    """Reports duplicated effects, accepted acks of ended leases, and rows that did not end."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = defaultdict(_Table)
        self._last = 0

    def declared(self, event: h.Declared) -> Found:
        """See `Judge`."""
        table = self._tables[event.table]
        table.tasks = {task.name: task for task in event.tasks}
        table.again = event.pacing is not None and isinstance(event.pacing.on_stale, Requeue)
        return ()

    def invoked(self, op: Operation) -> Found:
        """See `Judge`."""
        self._last = op.number
        match op.begun.call:
            case h.RollbackCall(table=name):
                self._tables[name].again = True
            case h.PutCall(table=name, rows=rows):
                self._tables[name].maybe_put += rows
            case h.ReleaseCall(failed=True) as call:
                self._tables[call.table].failed.update((call.task, row) for row in call.rows)
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """See `Judge`."""
        match op.begun.call:
            case h.PutCall() as put:
                self._put_ended(self._tables[put.table], put, end)
            case h.LeaseCall() as call if isinstance(end.result, h.LeasedResult):
                yield from _leased(self._tables[call.table], op, call, end.result)
            case h.AckCall() as call:
                yield from _acked(self._tables[call.table], op, call, end)
                if call.drop:
                    self._drop(call.table, call.rows, call.drop, end)
            case h.DropCall() as call:
                self._drop(call.table, call.rows, call.reason, end)

    def _drop(self, name: str, rows: list[int], reason: str, end: h.Ended) -> None:
        table = self._tables[name]
        if end.outcome == "ok":
            table.dropped.update(dict.fromkeys(rows, (reason, self._last)))
        elif end.outcome == "unknown":
            table.maybe_dropped.update(dict.fromkeys(rows, reason))

    def _put_ended(self, table: _Table, put: h.PutCall, end: h.Ended) -> None:
        if isinstance(end.result, h.RowsResult):
            table.put += put.rows
            table.maybe_put -= put.rows
            table.rows.update(end.result.rows)
        elif end.outcome == "fail":
            table.maybe_put -= put.rows

    def counted(self, event: h.Counted) -> Found:
        """See `Judge`."""
        table = self._tables[event.table]
        ended = event.rows_done + sum(event.dropped.values())
        if event.rows_put != event.rows_live + ended:
            yield Violation(
                "lost",
                f'table "{event.table}" does not balance: {event.rows_put} put, {event.rows_live} live, {ended} ended',
            )
        if not table.put <= event.rows_put <= table.put + table.maybe_put:
            yield Violation(
                "lost",
                f'table "{event.table}" counts {event.rows_put} rows put; clients know of {table.put}, '
                f"and {table.maybe_put} more are uncertain",
            )
        yield from _attempts(table, event)
        if event.drained:
            yield from _drained(table, event)


def _leased(table: _Table, op: Operation, call: h.LeaseCall, got: h.LeasedResult) -> Found:
    for row in got.rows:
        before = table.lent[call.task, row]
        if any(lease.lease == got.lease for lease in before):
            continue  # another replica of the same lease
        acked = table.acked.get((call.task, row))
        if acked is not None and acked < got.lease and not table.again:
            yield Violation(
                "duplicated effect",
                f'row {row} was acked by task "{call.task}" in lease {acked} and lent again in lease {got.lease}',
                op.number,
            )
        if row in table.dropped and table.dropped[row][1] < op.number:
            yield Violation("duplicated effect", f"row {row} was dropped and lent after that", op.number)
        before.append(_Lent(got.lease, call.replicas))


def _attempts(table: _Table, event: h.Counted) -> Found:
    """A row is dropped for failing only after as many failures as its task allows; the death of a worker is none."""
    most = {name: task.retry.attempts for name, task in table.tasks.items()}
    spent = {row for (task, row), failed in table.failed.items() if (least := most.get(task)) and failed >= least}
    dropped = event.dropped.get("attempts", 0)
    if dropped > len(spent):
        yield Violation(
            "attempts", f"{dropped} rows were dropped for failing; {len(spent)} failed as often as they may"
        )


def _acked(table: _Table, op: Operation, call: h.AckCall, end: h.Ended) -> Found:
    if end.outcome == "fail":
        return
    table.maybe_acked.update((call.task, row) for row in call.rows)
    if end.outcome == "ok":
        for row in call.rows:
            yield from _row_acked(table, op, call, row)


def _row_acked(table: _Table, op: Operation, call: h.AckCall, row: int) -> Found:
    lent = table.lent[call.task, row]
    if any(lease.lease == call.lease and lease.replicas > 1 for lease in lent):
        return  # done when all replicas have acked
    before = table.acked.get((call.task, row))
    if not call.drop:
        table.acked[call.task, row] = max(call.lease, before or 0)
    if table.again:
        return
    if before is not None:
        yield Violation(
            "duplicated effect",
            f'row {row} was acked twice by task "{call.task}", in leases {before} and {call.lease}',
            op.number,
        )
    newer = max((lease.lease for lease in lent), default=0)
    if newer > call.lease:
        yield Violation(
            "fencing",
            f'row {row} was lent to another worker of task "{call.task}" in lease {newer}, and an ack of lease '
            f"{call.lease} was accepted",
            op.number,
        )


def _drained(table: _Table, event: h.Counted) -> Found:
    """All tasks reached the end of the table: every row ended, and a client or the table's terms ended it."""
    if event.rows_live:
        yield Violation("lost", f'table "{event.table}" is drained, and {event.rows_live} rows have no fate')
    fates = Counter(reason for reason in event.dropped for _ in range(event.dropped[reason]))
    mine = Counter(reason for reason, _ in table.dropped.values()) + Counter(table.maybe_dropped.values())
    for reason, count in fates.items():
        if reason not in ALONE and count > mine[reason]:
            yield Violation("lost", f'{count} rows were dropped as "{reason}", which {mine[reason]} were asked to be')
    done = sum(all((task, row) in table.maybe_acked for task in table.tasks) for row in _seen(table))
    if event.rows_done > done:
        yield Violation("lost", f"{event.rows_done} rows count as done, and {done} were acked by every task")
    unacked = {
        row
        for row in table.rows.difference(table.dropped, table.maybe_dropped)
        if any((task, row) not in table.maybe_acked for task in table.tasks)
    }
    alone = sum(count for reason, count in fates.items() if reason in ALONE)
    if len(unacked) > alone and not event.rows_live:
        shown = ", ".join(map(str, sorted(unacked)[:SHOWN_MAX]))
        yield Violation(
            "lost",
            f"{len(unacked)} rows have ended, and no worker of some task acked them: {shown}; {alone} were dropped by "
            "the queue itself",
        )
    certain = 0 if table.again else sum(all((task, row) in table.acked for task in table.tasks) for row in _seen(table))
    taken = sum(row in table.maybe_dropped or row in table.dropped for row in _seen(table))
    if certain > event.rows_done + taken:
        yield Violation("lost", f"{certain} rows were acked by every task, and {event.rows_done} count as done")


def _seen(table: _Table) -> set[int]:
    return table.rows | {row for _, row in table.lent} | {row for _, row in table.acked}


def may_drop_alone(event: h.Declared) -> bool:
    """Whether rows of the table may be dropped without a request of a client."""
    stale = event.pacing is not None and event.pacing.max_staleness is not None
    return stale or any(
        task.retry.attempts or (task.groups is not None and not isinstance(task.groups.incomplete, Refill))
        for task in event.tasks
    )
