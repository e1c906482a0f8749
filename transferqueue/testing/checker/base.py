"""The base class of the judges of a history, and the operations that they look up."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from transferqueue.testing.history import history as h


class Violation(msgspec.Struct, frozen=True):
    """A broken guarantee: its kind, and the number of the operation that showed it (0: none)."""

    kind: str
    text: str
    op: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" (operation {self.op})" if self.op else "")


Found = Iterable[Violation]


class Operation:
    """One operation. end: None while it is under way."""

    __slots__ = ("begun", "end")

    def __init__(self, begun: h.Invoked) -> None:
        self.begun = begun
        self.end: h.Ended | None = None

    @property
    def number(self) -> int:
        """The number of the operation."""
        return self.begun.op

    @property
    def failed(self) -> bool:
        """Whether the operation certainly changed nothing."""
        return self.end is not None and self.end.outcome == "fail"


class Judge:
    """Checks one kind of guarantee. It gets every event in order and knows only the history, not the queue's code."""

    def declared(self, event: h.Declared) -> Found:
        """A table was made."""
        return ()

    def invoked(self, op: Operation) -> Found:
        """An operation begins."""
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """An operation ended; `op.end` is set."""
        return ()

    def died(self, process: str) -> Found:
        """A process died."""
        return ()

    def counted(self, event: h.Counted) -> Found:
        """The server reported its counts."""
        return ()

    def finished(self) -> Found:
        """The history is over."""
        return ()
