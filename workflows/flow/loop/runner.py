"""The loop of a stage or source: lease or reserve, call the function, ack or put, report.

1. A row is acked, or released unfinished, together with the columns that its stage returns, in one commit.
2. While the function works, the client renews the lease (see `Table.lease`). A process that is frozen loses it after
   ``lease_s``, a function that hangs after the task's ``time_limit_s``.
3. When the function raises, its rows are released as failed, and the loop goes on; the queue leases them again as the
   task's `Retry` says. The loop logs why. A function that knows that another try would fail the same raises
   `StageFailedInProcess`, which ends the loop at once; so do `Stage.failures_max` failures in a row.
4. An ack that comes too late is refused and changes nothing: the rows belong to another worker. It is reported, not
   fatal.
5. The loop ends with the table (`EndOfTable`; `Sealed` for a source) or when asked to stop. It never waits longer than
   the stage allows.
6. A stage with slots has several leases in work at once, each in a thread (`slots`). The other rules hold for each
   lease.
7. A stage with `where`, or whose function chooses (`ChoosingWork`), leases the rows that it prefers first
   (`preference`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, EndOfTable, Sealed
from transferqueue.workflows.flow.events import WAIT, WORK, Event, TimeSpan
from transferqueue.workflows.flow.loop.preference import lease_preferred
from transferqueue.workflows.flow.loop.serving import FailureLog, StageFailedInProcess, serve
from transferqueue.workflows.flow.loop.slots import LEASE_WAIT_S, Feeder
from transferqueue.workflows.flow.loop.wait_notice import WaitNotice
from transferqueue.workflows.flow.stage import STALL_S, ChoosingWork, LeaseChoice, Produce, Stage, Work

__all__ = ["StageFailedInProcess", "run_source", "run_stage"]


def run_stage(
    table: tq.Table,
    stage: Stage,
    work: Work,
    *,
    emit: Callable[[Event], None],
    stop: threading.Event | None = None,
) -> int:
    """Serve a stage until its table ends, or until `stop` is set. Blocks until every batch that was begun has ended.

    Args:
        table: the table.
        stage: its task, and the rows of one call.
        work: the function of the stage.
        emit: is called with each event, from one thread at a time.
        stop: ends the loop, within 2 s if it waits for rows; default None.

    Returns:
        The number of rows done.

    Raises:
        DeadlineExceeded: no row came for ``stage.stall_s``; the text says what is missing.
        StageFailedInProcess: the function said that another try would fail the same, or failed too often.
        PeerError: the queue is gone.
    """
    if stage.slots:
        return Feeder(table, stage, work, emit=emit, stop=stop).run()
    choice = work.choice if isinstance(work, ChoosingWork) else LeaseChoice
    failures = FailureLog(stage, emit)
    rows_done = 0
    while not (stop and stop.is_set()):
        waited = time.monotonic()
        batch = _next_batch(table, stage, choice, stop)
        if batch is None:
            break
        started = time.monotonic()
        emit(TimeSpan(name=WAIT, start=waited, end=started))
        rows, failure = len(batch), serve(batch, work)
        emit(TimeSpan(name=WORK, start=started, end=time.monotonic(), rows=rows, version=batch.version))
        rows_done += rows if failure is None else 0
        if failure is None:
            failures.succeeded()
        else:
            failures.failed(failure, rows, time.monotonic())
    return rows_done


def _next_batch(
    table: tq.Table, stage: Stage, choice: Callable[[], LeaseChoice], stop: threading.Event | None
) -> tq.Batch | None:
    """Wait for rows. Returns None at the end of the table, and within `LEASE_WAIT_S` when asked to stop."""
    deadline, notice = time.monotonic() + stage.stall_s, WaitNotice(stage.task.name)
    while not (stop and stop.is_set()):
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return lease_preferred(table, stage, choice, timeout_s=min(left_s, LEASE_WAIT_S) if stop else left_s)
        except EndOfTable:
            return None
        except DeadlineExceeded as why:
            if not stop or left_s <= LEASE_WAIT_S:
                raise
            notice.waits_on(why)
    return None


def run_source(
    table: tq.Table,
    produce: Produce,
    *,
    emit: Callable[[Event], None],
    stop: threading.Event | None = None,
    stall_s: float = STALL_S,
) -> int:
    """Put rows as fast as the table admits them, until the source has no more or `stop` is set.

    Also ends when the table is sealed. Blocks: waits for room at the server. An error of `produce` is raised unchanged,
    and its reservation is released.

    Args:
        table: the table.
        produce: the source.
        emit: is called with each event.
        stop: ends the loop before the next put; default None.
        stall_s: longest wait for room in seconds; default 1e9: no limit.

    Returns:
        The number of rows put.

    Raises:
        DeadlineExceeded: there was no room for `stall_s`.
    """
    rows_put = 0
    while not (stop and stop.is_set()) and (rows := produce.wants()):
        waited = time.monotonic()
        try:
            with table.reserve(rows, timeout_s=stall_s) as reservation:
                started = time.monotonic()
                emit(TimeSpan(name=WAIT, start=waited, end=started))
                table.put(reservation=reservation, timeout_s=stall_s, **produce(rows))
        except Sealed:
            break
        emit(TimeSpan(name=WORK, start=started, end=time.monotonic(), rows=rows, version=reservation.version))
        rows_put += rows
    return rows_put
