"""Each row that is read was put, is whole, and has an id of its own; its values are the written ones.

A put without an answer may have happened or not. The checker recognises its rows by their values when they are first
read, and knows their ids from then on, because the ids of one put are consecutive.
"""

from __future__ import annotations

from collections import defaultdict

from transferqueue.testing.checker.base import Found, Judge, Operation, Violation
from transferqueue.testing.history import history as h


class _Table:
    """The known rows and values of one table."""

    def __init__(self) -> None:
        self.put_of: dict[int, tuple[Operation, int]] = {}
        """Row -> its put, and its position there."""
        self.first_of: dict[int, int] = {}
        """Put -> its first row, once known."""
        self.open_puts: dict[int, Operation] = {}
        """Puts that may have happened, and whose row ids are not known."""
        self.writes: dict[tuple[int, str], list[tuple[str, Operation]]] = defaultdict(list)
        """(row, field) -> values that updates and acks wrote, or tried to write."""
        self.seen: dict[tuple[int, str], set[str]] = defaultdict(set)
        self.needs: dict[str, tuple[str, ...]] = {}
        self.whole = True


class ValueJudge(Judge):
    """Reports invented, reused, partial and torn rows."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = defaultdict(_Table)

    def declared(self, event: h.Declared) -> Found:
        """See `Judge`."""
        table = self._tables[event.table]
        table.needs = {task.name: tuple(task.needs) for task in event.tasks}
        table.whole &= event.whole
        return ()

    def invoked(self, op: Operation) -> Found:
        """See `Judge`."""
        call = op.begun.call
        if isinstance(call, h.PutCall):
            self._tables[call.table].open_puts[op.number] = op
        elif isinstance(call, h.UpdateCall | h.AckCall):
            _write(self._tables[call.table], op, call)
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """See `Judge`."""
        call = op.begun.call
        if isinstance(call, h.PutCall):
            yield from self._put_ended(self._tables[call.table], op, call, end)
        elif isinstance(call, h.UpdateCall | h.AckCall) and op.failed:
            yield from _refused(self._tables[call.table], op, call)
        elif isinstance(call, h.LeaseCall) and isinstance(end.result, h.LeasedResult):
            yield from self._leased(self._tables[call.table], op, call, end.result)
        elif isinstance(call, h.LookCall) and isinstance(end.result, h.LookedResult) and not end.result.same:
            yield Violation("torn read", f"the memory of lease {call.lease} changed under a view of it", op.number)

    # ------------------------------------------------------------ puts

    def _put_ended(self, table: _Table, op: Operation, put: h.PutCall, end: h.Ended) -> Found:
        if isinstance(end.result, h.RowsResult):
            yield from self._put_ids(table, op, put, end.result.rows)
        elif op.failed:
            table.open_puts.pop(op.number, None)
            if op.number in table.first_of:
                yield Violation(
                    "atomic put", f"the put was refused, but row {table.first_of[op.number]} of it was seen", op.number
                )

    def _put_ids(self, table: _Table, op: Operation, put: h.PutCall, rows: list[int]) -> Found:
        first = rows[0] if rows else -1
        if rows != list(range(first, first + put.rows)):
            yield Violation("row ids", f"a put of {put.rows} rows got ids {rows[:8]}", op.number)
        yield from self._bind(table, op, first, put.rows)

    def _bind(self, table: _Table, op: Operation, first: int, rows: int) -> Found:
        known = table.first_of.get(op.number)
        if known is not None:
            if known != first:
                yield Violation("duplicated effect", f"one put has rows from {known} and from {first}", op.number)
            return
        table.first_of[op.number] = first
        table.open_puts.pop(op.number, None)
        for at in range(rows):
            before = table.put_of.setdefault(first + at, (op, at))
            if before[0] is not op:
                yield Violation(
                    "row ids", f"row {first + at} was given to two puts, {before[0].number} and {op.number}", op.number
                )

    # ------------------------------------------------------------ leases

    def _leased(self, table: _Table, op: Operation, call: h.LeaseCall, got: h.LeasedResult) -> Found:
        if len(set(got.rows)) != len(got.rows):
            yield Violation("duplicated effect", f"lease {got.lease} names a row twice", op.number)
        for name in table.needs.get(call.task, ()):
            if got.rows and name not in got.digests:
                yield Violation("readiness", f'lease {got.lease} came without field "{name}"', op.number)
        for at, row in enumerate(got.rows):
            yield from self._row_seen(
                table, op, row, {name: digests[at] for name, digests in got.digests.items()}, got.lease
            )

    def _row_seen(self, table: _Table, op: Operation, row: int, values: dict[str, str], lease: int) -> Found:
        if row not in table.put_of:
            yield from self._recognise(table, row, values)
        if row not in table.put_of and not table.whole:
            return
        if row not in table.put_of and any(not _digests_of(op) for op in table.open_puts.values()):
            return  # perhaps a row of a put whose values cannot identify it
        if row not in table.put_of:
            yield Violation("invented row", f"row {row} of lease {lease} was never put", op.number)
            return
        for name, value in values.items():
            table.seen[row, name].add(value)
            if not _explained(table, row, name, value):
                yield Violation(
                    "torn read",
                    f'row {row} of lease {lease} has a value of field "{name}" that no client wrote there',
                    op.number,
                )

    def _recognise(self, table: _Table, row: int, values: dict[str, str]) -> Found:
        for op in list(table.open_puts.values()):
            known = _digests_of(op)
            rows = len(next(iter(known.values()), ()))
            for at in range(rows):
                if all(name not in values or values[name] == digests[at] for name, digests in known.items()):
                    yield from self._bind(table, op, row - at, rows)
                    return


def _digests_of(put: Operation) -> h.Digests:
    call = put.begun.call
    return call.digests if isinstance(call, h.PutCall) else {}


def _write(table: _Table, op: Operation, call: h.UpdateCall | h.AckCall) -> None:
    for name, digests in call.digests.items():
        for row, value in zip(call.rows, digests, strict=True):
            table.writes[row, name].append((value, op))


def _explained(table: _Table, row: int, name: str, value: str) -> bool:
    put, at = table.put_of[row]
    known = _digests_of(put)
    if name in known and known[name][at] == value:
        return True
    return any(written == value and not by.failed for written, by in table.writes[row, name])


def _refused(table: _Table, op: Operation, call: h.UpdateCall | h.AckCall) -> Found:
    """Values of a refused call must never be read, unless another call wrote the same values."""
    for name, digests in call.digests.items():
        for row, value in zip(call.rows, digests, strict=True):
            if value in table.seen[row, name] and row in table.put_of and not _explained(table, row, name, value):
                yield Violation("atomic put", f'a refused value of field "{name}" of row {row} was seen', op.number)
