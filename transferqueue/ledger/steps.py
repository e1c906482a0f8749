"""Rows of one task by the step they were acked with, filed until a checkpoint covers it or a rollback undoes it.

A filed row may meanwhile have ended, gone back to an earlier task, or been acked anew. So an entry stands only while the row's
state is STEPPED and its `hold` is this step; what fell is swept out when it is as much as there are rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from transferqueue.ledger.arrays import NO_ROWS, IntArray
from transferqueue.ledger.pages import Column
from transferqueue.ledger.rows import Rows

SLACK: Final = 8192


class Steps:
    """The filed rows of one task. state, hold: columns of the task; filed rows have `stepped` in `state`."""

    def __init__(self, rows: Rows, state: Column, hold: Column, stepped: int) -> None:
        self._rows = rows
        self._state = state
        self._hold = hold
        self._stepped = stepped
        self._filed: dict[int, list[IntArray]] = {}
        self._size = 0

    def file(self, rows: IntArray, step: int) -> None:
        """Rows have just been acked with `step`."""
        self._filed.setdefault(step, []).append(rows)
        self._size += rows.size
        if self._size > 2 * self._rows.pages.resident + SLACK:
            self._sweep()

    def standing(self, step: int) -> IntArray:
        """Rows whose last ack was with `step`, and that still wait, ascending."""
        rows = np.unique(np.concatenate(self._filed[step]))
        at, there = self._rows.pages.find(rows)
        standing: IntArray = rows[there & (self._state.a[at] == self._stepped) & (self._hold.a[at] == step)]
        return standing

    def take(self, chosen: Callable[[int], bool]) -> IntArray:
        """The standing rows of the chosen steps, in order of step; they are filed no more."""
        taken = []
        for step in sorted(step for step in self._filed if chosen(step)):
            taken.append(self.standing(step))
            self._size -= sum(rows.size for rows in self._filed.pop(step))
        return np.concatenate(taken) if taken else NO_ROWS

    @property
    def latest(self) -> int:
        """The highest step that rows are filed under; -1 if there is none."""
        return max(self._filed, default=-1)

    def _sweep(self) -> None:
        standing = {step: self.standing(step) for step in self._filed}
        self._filed = {step: [rows] for step, rows in standing.items() if rows.size}
        self._size = sum(rows.size for rows in standing.values())
