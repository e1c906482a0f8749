"""Is a history one that the promises allow? Pure: events in, violations out.

The checker knows nothing of how the queue works, only what it promises (docs/DESIGN, section 3). What nobody can know
it takes to be as the queue would have it: a put without an answer may be there or not. So whatever it finds is wrong
under every order of events that fits the history.

============================  ====================================================================================
kind                          what was seen
============================  ====================================================================================
``lost``                      counts that do not add up; a row without a fate, or with one that nobody gave
``invented row``, ``row ids`` a row that nobody put; one id for two rows
``duplicated effect``         a row done twice by a task, or lent after it was done or dropped; one put, two sets of rows
``fencing``                   the ack of a lease that had ended was accepted
``attempts``                  a row that failed too often was lent again
``readiness``                 a row without a field that the task needs
``atomic put``                something refused was seen
``torn read``                 a value that nobody wrote, or memory that changed under a view
``split group``               part of a group
``staleness bound``           a row too old at its hand-over
``memory bound``, ``pacing    more rows, bytes or promises than there may be
bound``
``seal``                      a row entered after the seal
``weights``                   a version that was not asked for
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
        """The next event; what is wrong with it, which `violations` keeps too."""
        found = [violation for judge in self._judges_of(line) for violation in judge]
        self.violations += found
        return found

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
    """All that is wrong with a history. late_s: how late a wait may end; None: any time before the history does."""
    checker = Checker(late_s)
    for line in history:
        checker.see(line)
    return checker.violations
