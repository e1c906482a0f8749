"""Limits on staleness, rows, bytes and reservations hold, and no row enters after the seal.

Only certain facts count. A row certainly exists from the answer to its put until a client tries to end
it, in a table that drops no rows on its own. A reservation holds from its answer until a client tries to use or return
it, or its process dies.
"""

from __future__ import annotations

from collections import defaultdict

from transferqueue.policies import Refill
from transferqueue.testing.checker.base import Found, Judge, Operation, Violation
from transferqueue.testing.checker.row_ends import may_drop_alone
from transferqueue.testing.history import history as h


class _Table:
    """Terms of one table, and the rows and reservations that certainly exist in it."""

    def __init__(self) -> None:
        self.terms: h.Declared | None = None
        self.clock = -1
        self.sealed = False
        self.rows: dict[int, set[str]] = {}
        """Row that certainly exists -> tasks that may have ended it."""
        self.pace: set[int] = set()
        """Rows that the pacing task is certainly not done with."""
        self.reserved: dict[int, tuple[str, int]] = {}
        """Reservation -> (process, rows certainly left)."""
        self.certain = False


class LimitJudge(Judge):
    """Reports broken bounds on staleness, memory and reservations, and rows that entered after the seal."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = defaultdict(_Table)
        self._channels: dict[str, int] = {}
        self._clock_at: dict[int, int] = {}
        """Lease call under way -> the policy version that was certainly reached when it began."""
        self._sealed_before: set[int] = set()

    def declared(self, event: h.Declared) -> Found:
        """See `Judge`."""
        table = self._tables[event.table]
        table.terms = event
        table.certain = not may_drop_alone(event)
        return ()

    def invoked(self, op: Operation) -> Found:
        """See `Judge`."""
        match op.begun.call:
            case h.LeaseCall() as call:
                self._clock_at[op.number] = self._clock(self._tables[call.table])
            case h.PutCall() as call:
                table = self._tables[call.table]
                if table.sealed:
                    self._sealed_before.add(op.number)
                _take(table, call.reservation, call.rows)
            case h.UnreserveCall() as call:
                _take(self._tables[call.table], call.reservation, call.rows)
            case h.AckCall() as call:
                _leave(self._tables[call.table], call.rows, call.task, bool(call.drop))
            case h.DropCall() as call:
                _leave(self._tables[call.table], call.rows, "", True)
            case h.RollbackCall(table=name):
                self._tables[name].certain = False
                self._tables[name].clock = -1
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """See `Judge`."""
        if end.error == "Disconnected":
            self.died(op.begun.process)  # its session is over, and its leases and reservations returned
        if end.outcome != "ok":
            return
        match op.begun.call:
            case h.LeaseCall() as call if isinstance(end.result, h.LeasedResult):
                yield from self._leased(op, call, end.result)
            case h.PutCall() as call if isinstance(end.result, h.RowsResult):
                yield from self._put(op, call, end.result.rows)
            case h.ReserveCall() as call if isinstance(end.result, h.ReservedResult):
                table = self._tables[call.table]
                table.reserved[end.result.reservation] = (op.begun.process, end.result.rows)
                yield from _check_ahead(table, op)
            case h.SealCall(table=name):
                self._tables[name].sealed = True
            case h.AdvanceCall() as call:
                table = self._tables[call.table]
                table.clock = max(table.clock, call.version)
            case h.PublishCall() as call:
                self._channels[call.channel] = max(self._channels.get(call.channel, -1), call.version)

    def died(self, process: str) -> Found:
        """See `Judge`."""
        for table in self._tables.values():
            table.reserved = {
                number: reservation for number, reservation in table.reserved.items() if reservation[0] != process
            }
        return ()

    def counted(self, event: h.Counted) -> Found:
        """See `Judge`."""
        terms = self._tables[event.table].terms
        if terms is None:
            return
        if event.rows_resident > terms.rows_max:
            yield Violation(
                "memory bound", f'table "{event.table}" holds {event.rows_resident} rows, above {terms.rows_max}'
            )
        if terms.bytes_max is not None and event.bytes > terms.bytes_max:
            yield Violation("memory bound", f'table "{event.table}" holds {event.bytes} bytes, above {terms.bytes_max}')

    # ------------------------------------------------------------ checks

    def _clock(self, table: _Table) -> int:
        pacing = table.terms.pacing if table.terms else None
        if pacing is not None and pacing.channel is not None:
            return self._channels.get(pacing.channel, -1)
        return table.clock

    def _leased(self, op: Operation, call: h.LeaseCall, got: h.LeasedResult) -> Found:
        table = self._tables[call.table]
        pacing = table.terms.pacing if table.terms else None
        if pacing is None or pacing.max_staleness is None or pacing.task != call.task:
            return
        known = self._clock_at.pop(op.number, -1) if call.replicas == 1 else -1
        for row, version in zip(got.rows, got.versions, strict=False):
            if version >= 0 and max(known, got.clock) - version > pacing.max_staleness:
                yield Violation(
                    "staleness bound",
                    f"row {row} of version {version} was handed over at clock {max(known, got.clock)}, "
                    f"above max_staleness {pacing.max_staleness}",
                    op.number,
                )

    def _put(self, op: Operation, call: h.PutCall, rows: list[int]) -> Found:
        table = self._tables[call.table]
        if op.number in self._sealed_before:
            yield Violation(
                "seal", f'a put into table "{call.table}" began after it was sealed, and was accepted', op.number
            )
        if not table.certain or table.terms is None:
            return
        table.rows |= {row: set() for row in rows}
        if call.reservation:
            table.pace |= set(rows)
        if len(table.rows) > table.terms.rows_max:
            yield Violation(
                "memory bound",
                f'table "{call.table}" certainly holds {len(table.rows)} rows, above {table.terms.rows_max}',
                op.number,
            )


def _leave(table: _Table, rows: list[int], task: str, everywhere: bool) -> None:
    """These rows may have ended in this task (or everywhere)."""
    terms = table.terms
    if terms is None:
        return
    for row in rows:
        if everywhere or (terms.pacing is not None and terms.pacing.task == task):
            table.pace.discard(row)
        ended = table.rows.get(row)
        if ended is None:
            continue
        ended.add(task)
        if everywhere or len(ended) == len(terms.tasks):
            del table.rows[row]


def _take(table: _Table, reservation: int, rows: int) -> None:
    """Rows of a reservation may be used or returned. 0: all."""
    if reservation not in table.reserved:
        return
    process, left = table.reserved.pop(reservation)
    if rows and left > rows:
        table.reserved[reservation] = (process, left - rows)


def _check_ahead(table: _Table, op: Operation) -> Found:
    terms = table.terms
    if terms is None:
        return
    promised = sum(rows for _, rows in table.reserved.values())
    if promised > terms.rows_max:
        yield Violation("memory bound", f"{promised} rows are promised, and {terms.rows_max} fit", op.number)
    if terms.pacing is None:
        return
    pacer = next((task for task in terms.tasks if task.name == terms.pacing.task), None)
    if pacer is not None and pacer.groups is not None and isinstance(pacer.groups.incomplete, Refill):
        return  # members are refilled even after others took their places
    ahead = promised + len(table.pace)
    if ahead > terms.pacing.rows_ahead_max:
        yield Violation(
            "pacing bound",
            f"{ahead} rows are certainly reserved or there, above {terms.pacing.rows_ahead_max}",
            op.number,
        )
