"""Every wait ends: none lasts to the end of the history, and none ends much later than its deadline."""

from __future__ import annotations

from transferqueue.testing.checker.base import Found, Judge, Operation, Violation
from transferqueue.testing.history import history as h


class WaitJudge(Judge):
    """Reports stuck operations. late_s: how much later than its deadline a wait may end; None: not checked."""

    def __init__(self, late_s: float | None) -> None:
        self._late_s = late_s
        self._open: dict[int, Operation] = {}

    def invoked(self, op: Operation) -> Found:
        """See `Judge`."""
        self._open[op.number] = op
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """See `Judge`."""
        self._open.pop(op.number, None)
        call = op.begun.call
        waited = end.at - op.begun.at
        if self._late_s is not None and isinstance(call, h.LeaseCall) and waited > call.wait_s + self._late_s:
            yield Violation("stuck", f"a lease that might wait {call.wait_s:g} s ended after {waited:.3g} s", op.number)

    def died(self, process: str) -> Found:
        """See `Judge`."""
        for number in [number for number, op in self._open.items() if op.begun.process == process]:
            del self._open[number]
        return ()

    def finished(self) -> Found:
        """See `Judge`."""
        for op in self._open.values():
            name = h.name_of(op.begun.call)
            yield Violation("stuck", f"{op.begun.process} still waits for {name} when all is over", op.number)
