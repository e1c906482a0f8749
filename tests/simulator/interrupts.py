"""Raises an exception at a chosen line of the ledger, as a signal, a deep recursion or an exhausted memory would,
without a hook in production code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import transferqueue.ledger
from transferqueue.server.durability import recorded_ledger

DEFECTS: Final[tuple[type[BaseException], ...]] = (MemoryError, KeyboardInterrupt, RecursionError)
_LEDGER: Final = str(Path(transferqueue.ledger.__file__).parent)
_ONCE: Final = "_little_endian"
"""A function of the ledger that keeps its results for the whole process: its lines would make the count depend on what
ran before."""


class Interrupt:
    """One exception, raised when the ledger, or what writes its records, comes to its line number `line` (counted from
    1).

    lines: how many lines were counted. raised: whether the exception was raised.
    """

    def __init__(self, error: type[BaseException], line: int) -> None:
        self.error: Final = error
        self.line: Final = line
        self.lines = 0
        self.raised = False
        self._counted: dict[CodeType, bool] = {}

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The exception is in the program until this ends. For the calling thread alone."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if (counted := self._counted.get(code)) is None:
            file = code.co_filename
            counted = self._counted[code] = code.co_name != _ONCE and (
                file.startswith(_LEDGER) or file == recorded_ledger.__file__
            )
        return self._step if counted else None

    def _step(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.line:
                self.raised = True
                raise self.error
        return self._step
