"""The ready samples of a partition, collected by leasing them as they become ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded

_AT_ONCE: Final = 1 << 16
_HEARING_S: Final = 0.05
"""How long one thread waits for another that collects samples which are ready now; a thread that waits for more is not waited for."""


class ReadySamples:
    """Samples that have a set of fields, and by task those that it has not consumed, ascending.

    One thread at a time leases from the table. Only it has its leased samples, until it adds them under `guard`.
    """

    def __init__(self, table: tq.Table, name: str, fields: Sequence[str], guard: threading.RLock) -> None:
        self.rows: set[int] = set()
        self.before: dict[str, list[int]] = {}
        self.changes = 0
        self._table, self._name, self._guard = table, name, guard
        self._ear = threading.Lock()
        table.add_task(tq.Task(name, needs=tuple(fields)))

    def collect(self) -> None:
        """Add the samples that are ready now. Returns early if another thread, which waits for more, will add them."""
        if self._ear.acquire(timeout=_HEARING_S):
            try:
                while self._listen(0.0) == _AT_ONCE:
                    pass
            finally:
                self._ear.release()

    def wait(self, changes: int, wait_s: float) -> None:
        """Return when samples were added since `changes` additions, or after `wait_s`. Does not hold the guard."""
        deadline = time.monotonic() + wait_s
        if self._ear.acquire(timeout=wait_s):
            try:
                if self.changes == changes:
                    self._listen(max(0.0, deadline - time.monotonic()))
            finally:
                self._ear.release()

    def _listen(self, wait_s: float) -> int:
        """Add the samples that are ready, or that become ready within `wait_s`; return how many."""
        try:
            batch = self._table.lease(self._name, rows=_AT_ONCE, at_least=1, timeout_s=wait_s, fields=())
        except DeadlineExceeded:
            return 0
        with self._guard, batch:
            new = batch.rows.tolist()
            self.changes += 1
            self.rows.update(new)
            for waiting in self.before.values():
                _merge(waiting, new)
        return len(new)

    def of_task(self, task: str, consumed: set[int]) -> list[int]:
        """Return the ready samples that `task` has not consumed."""
        if task not in self.before:
            self.before[task] = sorted(self.rows - consumed)
        return self.before[task]

    def remove(self, rows: set[int]) -> None:
        """Remove samples that were cleared."""
        self.rows -= rows
        for task in self.before:
            self.before[task] = without(self.before[task], rows)


def _merge(waiting: list[int], new: list[int]) -> None:
    """Add to an ascending list; new samples mostly belong at its end."""
    in_order = not waiting or not new or min(new) > waiting[-1]
    waiting.extend(new)
    if not in_order or new != sorted(new):
        waiting.sort()


def without(waiting: list[int], gone: set[int]) -> list[int]:
    """Return an ascending list without some of its elements, which are mostly the first."""
    if set(waiting[: len(gone)]) == gone:
        return waiting[len(gone) :]
    return [row for row in waiting if row not in gone]
