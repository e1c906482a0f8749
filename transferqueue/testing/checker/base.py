"""What every judge of a history is, and the operations they all look up."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from transferqueue.testing.history import history as h


class Violation(msgspec.Struct, frozen=True):
    """A promise that was not kept. kind: which; op: of the operation by which it was seen, 0: of none."""

    kind: str
    text: str
    op: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" (operation {self.op})" if self.op else "")


Found = Iterable[Violation]


class Operation:
    """One operation as far as it is known. end: None while it is under way."""

    __slots__ = ("begun", "end")

    def __init__(self, begun: h.Invoked) -> None:
        self.begun = begun
        self.end: h.Ended | None = None

    @property
    def number(self) -> int:
        """Its number."""
        return self.begun.op

    @property
    def failed(self) -> bool:
        """Whether it certainly was not carried out."""
        return self.end is not None and self.end.outcome == "fail"


class Judge:
    """Sees every event in order. Knows only the history, nothing of how the queue works."""

    def declared(self, event: h.Declared) -> Found:
        """A table was made."""
        return ()

    def invoked(self, op: Operation) -> Found:
        """An operation begins."""
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """It ended; `op.end` is set."""
        return ()

    def died(self, process: str) -> Found:
        """A process is gone."""
        return ()

    def counted(self, event: h.Counted) -> Found:
        """The server was asked."""
        return ()

    def finished(self) -> Found:
        """The history is over."""
        return ()
