"""A lease with a preference: rows of one class first, and any other row rather than none.

1. Rows that are preferred are leased if some are ready; else any row that is ready; else the process waits, for
   preferred rows only.
2. It looks for other rows again after `LOOK_S`. Waiting for any row instead would give the first process that waits the
   first row that comes, whatever its class.
3. A patient process waits for the rows that it prefers before it takes any other.
4. A class of rows that is at its end says nothing about the table: only a lease of any row ends the stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.errors import DeadlineExceeded, EndOfTable
from transferqueue.workflows.flow.stage import LeaseChoice, Stage, Work

LOOK_S: Final = 0.25
"""Longest time in which a row of another class waits for a process that has nothing else to do."""


class PreferringWork:
    """The function of a stage with a choice of its own beside it (`stage.ChoosingWork`)."""

    def __init__(self, work: Work, choice: Callable[[], LeaseChoice]) -> None:
        self._work, self._choice = work, choice

    def __call__(self, batch: tq.Batch) -> Mapping[str, Any] | Iterable[PartialResult]:
        """Call the function."""
        return self._work(batch)

    def choice(self) -> LeaseChoice:
        """Return the process's current lease terms."""
        return self._choice()


def lease_preferred(
    table: tq.Table,
    stage: Stage,
    choice: Callable[[], LeaseChoice],
    *,
    most: int | None = None,
    timeout_s: float | None = None,
) -> tq.Batch:
    """Lease rows of one call of `stage`, those that it and `choice` prefer first; at most `most` rows or groups.

    Blocks for at most `timeout_s` (None: the stage's `stall_s`). Raises as `Table.lease` does without predicates.
    """
    wait_s = stage.stall_s if timeout_s is None else timeout_s
    deadline = time.monotonic() + wait_s
    while where := (*stage.where, *(chosen := choice()).where):
        with suppress(DeadlineExceeded, EndOfTable):
            return stage.lease(table, most, min(LOOK_S, wait_s) if chosen.patient else 0.0, where)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return stage.lease(table, most, 0.0)
        with suppress(DeadlineExceeded):
            return stage.lease(table, most, 0.0)
        if not chosen.patient:
            with suppress(DeadlineExceeded, EndOfTable):
                return stage.lease(table, most, min(LOOK_S, left_s), where)
    return stage.lease(table, most, max(0.0, deadline - time.monotonic()))
