"""The ready samples of a partition, collected by leasing them in the order of their indexes.

A question takes from the table only as many samples as it, or a few questions, may need: a small batch does not read
the backlog of a large partition. All ready samples up to `bound` are known, so their order is that of all ready
samples.

If the server is in this process, a number of its own says whether anything became ready since the last lease. If
nothing did, the known samples are current and the server is not asked (docs/decisions/drop-in.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples.index_set import Indexes, IndexSet, WaitingSamples
from transferqueue.errors import ColumnFreed, DeadlineExceeded, LeaseExpired, NotFound, TransferQueueError
from transferqueue.limits import SECONDS_MAX

AT_ONCE: Final = 1 << 16
"""Most samples that one lease takes."""
AHEAD: Final = 512
"""Samples that a lease takes at least, where the server is asked only when samples became ready: the next questions
find them known."""
_LEASES_MAX: Final = 16
_LEASE_S: Final = 60.0
HELD_S: Final = SECONDS_MAX
"""How long leases are kept while this process lives. One that ends earlier costs a lease more, and no sample: however
often leases of a sample fail, it is not dropped."""
_HEARING_S: Final = 0.05
"""How long one thread waits for another that collects samples which are ready now; a thread that waits for more is not
waited for."""


class ReadySamples:
    """Samples that have a set of fields.

    Args:
        rows: the known samples.
        bound: all ready samples up to this index are known; None: all are.
        changes: counts additions.
        times_ready: returns how often samples became ready to a task of a table, see `EmbeddedServer`; None: unknown.

    One thread at a time leases from the table. Only it has its leased samples, until it adds them under `guard` and
    notifies the waiters: samples are not deleted meanwhile.

    After `end` nothing is leased: a table of the same name is another one.
    """

    def __init__(
        self,
        table: tq.Table,
        name: str,
        fields: Sequence[str],
        guard: threading.Condition,
        times_ready: Callable[[str, str], object | None] | None = None,
    ) -> None:
        self.rows = IndexSet()
        self.bound: int | None = None
        self.changes = 0
        self._table, self._name, self._fields, self._guard = table, name, tuple(fields), guard
        self._times_ready = times_ready
        self._heard: object | None = None
        """How often samples had become ready when the last lease began: nothing that it could miss is counted."""
        self._ear = threading.Lock()
        self._is_over = False
        self._leased: list[tq.Batch] = []
        """Leases of samples that were added: acked several at once, which is one request less for most calls."""
        self._gone = IndexSet()
        """Samples that were discarded while a lease is on its way, which may have them nevertheless."""
        table.add_task(
            tq.Task(
                name,
                needs=self._fields,
                selector=tq.PutOrder(),
                lease_s=min(_LEASE_S, HELD_S),
                time_limit_s=HELD_S,
            )
        )

    @property
    def is_collecting(self) -> bool:
        """Whether a thread is about to add samples, or waits for some."""
        return self._ear.locked()

    def discard(self, gone: Indexes) -> None:
        """Forget samples that lost the fields. Called under the guard."""
        self.rows.discard(gone)
        if self.is_collecting:
            self._gone.add(gone)

    def refresh(self, most: int = AT_ONCE) -> None:
        """Add the lowest samples as `collect` does, unless none became ready since the last time: then the known ones
        are still those up to `bound`."""
        if not self._is_current():
            self._collect(most, self._is_current)

    def collect(self, most: int = AT_ONCE) -> None:
        """Add the lowest `most` samples, or more, that are ready now and not known. Returns early if another thread,
        which waits for more, will add them."""
        if not self._is_all():
            self._collect(most, self._is_all)

    def collect_all(self) -> None:
        """Add all samples that are ready now. Returns early as `collect` does."""
        if not self._is_all() and self._ear.acquire(timeout=_HEARING_S):
            try:
                while self._listen(0.0, AT_ONCE) == AT_ONCE:
                    pass
            finally:
                self._ear.release()

    def _collect(self, most: int, is_done: Callable[[], bool]) -> None:
        if self._ear.acquire(timeout=_HEARING_S):
            try:
                if not is_done():  # another thread was quicker
                    self._listen(0.0, most if self._times_ready is None else max(most, AHEAD))
            finally:
                self._ear.release()

    def _now(self) -> object | None:
        return None if self._times_ready is None else self._times_ready(self._table.name, self._name)

    def _is_current(self) -> bool:
        """Whether nothing became ready since the last lease began."""
        heard = self._heard
        return heard is not None and heard == self._now()

    def _is_all(self) -> bool:
        """Whether every sample that is ready now is known."""
        return self._is_current() and self.bound is None

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
        """Add the lowest samples that are ready, or that become ready within `wait_s`, at most `most`; return how
        many."""
        with self._guard:
            self._check_life()
            self._gone = IndexSet()
        times_ready = self._now()
        try:
            batch = self._table.lease(self._name, rows=most, at_least=1, timeout_s=wait_s, fields=())
        except DeadlineExceeded:
            with self._guard:
                self.bound, self._heard = None, times_ready
            return 0
        with self._guard:
            try:
                self._check_life()
                self.rows.add(self._without_gone(batch.rows))
            except BaseException:  # they come again
                with suppress(TransferQueueError):
                    batch.release()
                raise
            finally:
                self._guard.notify_all()
            self.changes += 1
            self.bound, self._heard = int(batch.rows[-1]) if len(batch) == most else None, times_ready
            self._leased.append(batch)
            if len(self._leased) >= _LEASES_MAX:
                self.settle()
        return len(batch)

    def end(self) -> None:
        """The partition was cleared: lease nothing more. Called under the guard."""
        self._is_over = True
        self.settle()

    def _check_life(self) -> None:
        if self._is_over:
            raise NotFound(f'the partition of table "{self._table.name}" was cleared; its samples are gone')

    def _without_gone(self, rows: Indexes) -> Indexes:
        """Leased samples without those that lost a field after they were leased."""
        in_doubt = self._gone.contains(rows)
        if not in_doubt.any():
            return rows
        return rows[[not doubt or self._has_fields(row) for row, doubt in zip(rows, in_doubt.tolist(), strict=True)]]

    def _has_fields(self, row: np.int64) -> bool:
        try:
            self._table.read([int(row)], fields=self._fields, values=False)
        except (NotFound, ColumnFreed):
            return False
        return True

    def settle(self) -> None:
        """End all leases, before samples are deleted. Called under the guard."""
        leased, self._leased = self._leased, []
        if leased:
            with suppress(LeaseExpired, NotFound):  # then they come again, or the table is gone
                self._table.ack(leased)

    def waiting(self, consumed: IndexSet) -> WaitingSamples:
        """Return the known samples up to `bound` that are not in `consumed`, as a view."""
        return WaitingSamples(self.rows, consumed, self.bound)
