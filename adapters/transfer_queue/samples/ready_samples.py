"""The ready samples of a partition, collected by leasing them in the order of their indexes.

A question takes from the table only as many as it may need: the backlog of a partition with many samples is not read for a batch of a few.
All ready samples up to `bound` are known; so whoever looks only at these sees what a reader of everything would see first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples.index_set import IndexSet, WaitingSamples
from transferqueue.errors import DeadlineExceeded, LeaseExpired, NotFound

AT_ONCE: Final = 1 << 16
"""Most samples that one lease takes."""
_LEASES_MAX: Final = 16
_HEARING_S: Final = 0.05
"""How long one thread waits for another that collects samples which are ready now; a thread that waits for more is not waited for."""


class ReadySamples:
    """Samples that have a set of fields.

    rows: those that are known. bound: all ready samples up to this index are known; None: all are. changes: counts additions.

    One thread at a time leases from the table. Only it has its leased samples, until it adds them under `guard`.
    """

    def __init__(self, table: tq.Table, name: str, fields: Sequence[str], guard: threading.RLock) -> None:
        self.rows = IndexSet()
        self.bound: int | None = None
        self.changes = 0
        self._table, self._name, self._guard = table, name, guard
        self._ear = threading.Lock()
        self._leased: list[tq.Batch] = []
        """Leases of samples that were added: acked several at once, which is one request less for most calls."""
        table.add_task(tq.Task(name, needs=tuple(fields), selector=tq.PutOrder()))

    def collect(self, most: int = AT_ONCE) -> None:
        """Add the lowest `most` samples that are ready now and not known. Returns early if another thread, which waits for more, will
        add them."""
        if self._ear.acquire(timeout=_HEARING_S):
            try:
                self._listen(0.0, most)
            finally:
                self._ear.release()

    def collect_all(self) -> None:
        """Add all samples that are ready now. Returns early as `collect` does."""
        if self._ear.acquire(timeout=_HEARING_S):
            try:
                while self._listen(0.0, AT_ONCE) == AT_ONCE:
                    pass
            finally:
                self._ear.release()

    def wait(self, changes: int, wait_s: float) -> None:
        """Return when samples were added since `changes` additions, or after `wait_s`. Does not hold the guard."""
        deadline = time.monotonic() + wait_s
        if self._ear.acquire(timeout=wait_s):
            try:
                if self.changes == changes:
                    self._listen(max(0.0, deadline - time.monotonic()), AT_ONCE)
            finally:
                self._ear.release()

    def _listen(self, wait_s: float, most: int) -> int:
        """Add the lowest samples that are ready, or that become ready within `wait_s`, at most `most`; return how many."""
        try:
            batch = self._table.lease(self._name, rows=most, at_least=1, timeout_s=wait_s, fields=())
        except DeadlineExceeded:
            with self._guard:
                self.bound = None
            return 0
        with self._guard:
            self.changes += 1
            self.rows.add(batch.rows)
            self.bound = int(batch.rows[-1]) if len(batch) == most else None
            self._leased.append(batch)
            if len(self._leased) >= _LEASES_MAX:
                self.settle()
        return len(batch)

    def settle(self) -> None:
        """End all leases: whoever deletes samples must do so before. Called under the guard."""
        leased, self._leased = self._leased, []
        if leased:
            with suppress(LeaseExpired, NotFound):  # then they come again, or the table is gone
                self._table.ack(leased)

    def waiting(self, consumed: IndexSet) -> WaitingSamples:
        """Return the known samples up to `bound` that are not in `consumed`, as a view."""
        return WaitingSamples(self.rows, consumed, self.bound)
