"""A stage that keeps its slots full: it leases more rows as each finishes, so an engine never drains between two
leases.

`Slots` holds these rules without I/O:

1. At most `slots` rows are in work. A lease is asked for as soon as there is room for the least number of rows that the
   stage begins with, for no more rows than there is room for. A group is leased whole, so its stage leases when the
   largest group that it has seen fits, or when nothing is in work.
2. A row's slot is free when its part is committed, not when its lease ends.
3. A lease that fails ends no other (`serving.FailureLog`). Leases end in any order; each that succeeds ends a row of
   failures.
4. The stage has stalled when no row was in work, and none came, for as long as the stage allows. While a row is in
   work, a wait for more is no stall.
5. After a failure that ends the stage, no lease is begun, and each running lease ends with the part that it commits
   next: its other rows are released, as no attempt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, EndOfTable
from transferqueue.workflows.flow.events import WAIT, WORK, Event, TimeSpan
from transferqueue.workflows.flow.loop.preference import lease_preferred
from transferqueue.workflows.flow.loop.serving import FailureLog, serve
from transferqueue.workflows.flow.loop.wait_notice import WaitNotice
from transferqueue.workflows.flow.stage import ChoosingWork, LeaseChoice, Stage, Work

LEASE_WAIT_S: Final = 2.0
"""Longest wait of one request for rows: the failure of a running lease ends the stage no later than this."""


class Slots:
    """The rows in work of one stage. Pure: the caller says what happened, and when (seconds of any clock).

    rows, groups, least: of one lease, as in `Stage`; least: 0: all of them.

    >>> slots = Slots(slots=4, rows=3, groups=0, least=1, now=0.0)
    >>> slots.room(), slots.leased(3), slots.room(), slots.ended(2, 1.0), slots.room()
    (3, None, 1, None, 3)
    """

    def __init__(self, *, slots: int, rows: int, groups: int, least: int, now: float) -> None:
        self._slots, self._rows, self._groups = slots, rows, groups
        self._least = least or rows
        self._largest = 0
        self._idle_since = now
        self.in_work = 0

    def limit(self, slots: int) -> None:
        """Run at most `slots` rows from now on, or as many as one lease must have. Rows in work stay."""
        self._slots = max(slots, 1 if self._groups else self._least)

    def room(self) -> int:
        """Rows (or groups) that may be leased now; 0: none."""
        free = self._slots - self.in_work
        if self._groups:
            return self._groups if not self.in_work or free >= max(1, self._largest * self._groups) else 0
        most = min(self._rows, free)
        return most if most >= self._least else 0

    def leased(self, rows: int) -> None:
        """A lease of `rows` rows has come."""
        self.in_work += rows
        self._largest = max(self._largest, -(-rows // self._groups)) if self._groups else 0

    def ended(self, rows: int, now: float) -> None:
        """`rows` rows were committed or given back."""
        self.in_work -= rows
        self._idle_since = now

    def idle_s(self, now: float) -> float:
        """How long no row has been in work."""
        return 0.0 if self.in_work else now - self._idle_since


class Feeder:
    """Runs one stage with slots: the calling thread leases, and a thread for each lease calls `work` and commits."""

    def __init__(
        self,
        table: tq.Table,
        stage: Stage,
        work: Work,
        *,
        emit: Callable[[Event], None],
        stop: threading.Event | None = None,
    ) -> None:
        self._table, self._stage, self._work, self._emit = table, stage, work, emit
        self._failures = FailureLog(stage, emit)
        self._choice = work.choice if isinstance(work, ChoosingWork) else LeaseChoice
        self._stop = stop or threading.Event()
        self._changed = threading.Condition()
        self._since = time.monotonic()
        self._slots = Slots(
            slots=stage.slots, rows=stage.rows, groups=stage.groups, least=stage.at_least, now=self._since
        )
        self._error: BaseException | None = None
        self._rows_done = 0

    def run(self) -> int:
        """Serve until the table ends, until asked to stop, or until the stage fails (see `runner.run_stage`); return
        the rows done."""
        with ThreadPoolExecutor(self._stage.slots, thread_name_prefix=self._stage.task.name) as threads:
            try:
                while (batch := self._next_batch()) is not None:
                    threads.submit(self._serve, batch)
            except BaseException as error:
                self._fail(error)
                raise
        if self._error is not None:
            raise self._error
        return self._rows_done

    def _next_batch(self) -> tq.Batch | None:
        """Wait for room, then for rows. Returns None when the stage is over."""
        notice = WaitNotice(self._stage.task.name)
        while (room := self._wait_for_room()) is not None:
            try:
                wait_s = min(LEASE_WAIT_S, self._stage.stall_s)
                batch = lease_preferred(self._table, self._stage, self._choice, most=room, timeout_s=wait_s)
            except EndOfTable:
                return None
            except DeadlineExceeded as why:
                if self._slots.idle_s(time.monotonic()) >= self._stage.stall_s:
                    raise
                if not self._slots.in_work:
                    notice.waits_on(why)
                continue
            self._begin(batch)
            return batch
        return None

    def _wait_for_room(self) -> int | None:
        with self._changed:
            while not (self._error or self._stop.is_set() or self._room()):
                self._changed.wait(LEASE_WAIT_S)
            return None if self._error or self._stop.is_set() else self._slots.room()

    def _room(self) -> int:
        if slots := self._choice().slots:
            self._slots.limit(min(slots, self._stage.slots))
        return self._slots.room()

    def _begin(self, batch: tq.Batch) -> None:
        with self._changed:
            now = time.monotonic()
            if not self._slots.in_work:
                self._emit(TimeSpan(name=WAIT, start=self._since, end=now))
                self._since = now
            self._slots.leased(len(batch))

    def _serve(self, batch: tq.Batch) -> None:
        """The thread of one lease."""
        left = rows = len(batch)

        def ended(count: int) -> bool:
            nonlocal left
            left -= count
            self._ended(count, batch.version)
            return self._error is None

        try:
            failure = serve(batch, self._work, ended)
            with self._changed:
                if failure is None:
                    self._rows_done += rows - left
                    self._failures.succeeded()
                else:
                    self._failures.failed(failure, rows, time.monotonic())
        except BaseException as error:  # noqa: BLE001  (`run` raises it)
            self._fail(error)
        finally:
            self._ended(left, batch.version)

    def _ended(self, rows: int, version: int) -> None:
        """Free the slots of `rows` rows, and report the time since the last report as work: leases overlap, work is
        reported once."""
        if not rows:
            return
        with self._changed:
            now = time.monotonic()
            self._emit(TimeSpan(name=WORK, start=self._since, end=now, rows=rows, version=version))
            self._since = now
            self._slots.ended(rows, now)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
