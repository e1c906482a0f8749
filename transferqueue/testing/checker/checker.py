"""Check a history against the guarantees of the queue. Events in, violations out; no I/O.

The checker knows only the guarantees (the README's table), not the code of the queue. If the history leaves a fact
open, it assumes the fact that favours the queue: a put without an answer may have happened or not. So a reported
violation holds under every order of events that fits the history.

============================  ====================================================================================
kind                          violation
============================  ====================================================================================
``lost``                      counts that do not add up; a row that did not end, or whose end no client requested
``invented row``, ``row ids`` a row without a put; one id for two rows
``duplicated effect``         a row done twice by a task, or leased after its end; one put, two sets of rows
``fencing``                   the ack of a lease that had ended was accepted
``attempts``                  rows were dropped for failing that had not failed so often
``readiness``                 a row without a field that the task needs
``atomic put``                data of a refused call was visible
``torn read``                 a value that no client wrote, or memory that changed under a view
``split group``               part of a group
``staleness bound``           a row that was too old when it was leased
``memory bound``, ``pacing    more rows, bytes or reservations than the bound
bound``
``seal``                      a row entered after the seal
``weights``                   a version that the call did not request
``stuck``                     a wait that did not end
============================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable

from transferqueue.testing.checker.base import Judge, Operation, Violation
from transferqueue.testing.checker.groups import GroupJudge
from transferqueue.testing.checker.limits import LimitJudge
from transferqueue.testing.checker.row_ends import RowEndJudge
from transferqueue.testing.checker.values import ValueJudge
from transferqueue.testing.checker.waits import WaitJudge
from transferqueue.testing.checker.weights import WeightJudge
from transferqueue.testing.history import history as h


class Checker:
    """Judges a history event by event. late_s: see `WaitJudge`."""

    def __init__(self, late_s: float | None = None) -> None:
        self.violations: list[Violation] = []
        self.operations = 0
        self._ops: dict[int, Operation] = {}
        self._judges: list[Judge] = [
            ValueJudge(),
            RowEndJudge(),
            GroupJudge(),
            LimitJudge(),
            WeightJudge(),
            WaitJudge(late_s),
        ]

    def see(self, line: h.Line) -> list[Violation]:
        """Check the next event. Returns its violations, and adds them to `violations`."""
        violations = [violation for judge in self._judges_of(line) for violation in judge]
        self.violations += violations
        return violations

    def _judges_of(self, line: h.Line) -> Iterable[Iterable[Violation]]:
        match line:
            case h.Invoked():
                op = self._ops[line.op] = Operation(line)
                self.operations += 1
                return [judge.invoked(op) for judge in self._judges]
            case h.Ended():
                return self._ended(line)
            case h.Declared():
                return [judge.declared(line) for judge in self._judges]
            case h.Died():
                return [judge.died(line.process) for judge in self._judges]
            case h.Counted():
                return [judge.counted(line) for judge in self._judges]
        return [judge.finished() for judge in self._judges]

    def _ended(self, line: h.Ended) -> Iterable[Iterable[Violation]]:
        op = self._ops.pop(line.op, None)
        if op is None:
            return [[Violation("history", f"operation {line.op} ended and never began, or twice", line.op)]]
        op.end = line
        return [judge.ended(op, line) for judge in self._judges]


def check(history: Iterable[h.Line], late_s: float | None = None) -> list[Violation]:
    """All violations in a history. late_s: how late a wait may end; None: any time before the end of the history."""
    checker = Checker(late_s)
    for line in history:
        checker.see(line)
    return checker.violations
