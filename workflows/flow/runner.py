"""The loop of a stage or source: lease or reserve, call the function, ack or put, report.

Rules:

1. A row is acked, or released unfinished, together with the columns that its stage returns, in one commit.
2. While the function works, the client renews the lease (see `Table.lease`). A process that is frozen loses it after
   ``lease_s``, a function that hangs after the task's ``time_limit_s``.
3. When the function raises, its rows are released as failed; the queue leases them again, at most ``attempts_max`` times.
   As many failures in a row mean that the stage is broken, and not a row: the loop raises `StageFailedInProcess`.
4. An ack that comes too late is refused and changes nothing: the rows belong to another worker. It is reported, not fatal.
5. The loop ends with the table (`EndOfTable`; `Sealed` for a source) or when asked to stop. It never waits longer than the stage allows.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.errors import EndOfTable, FlowSignal, LeaseExpired, PeerError, Sealed, TransferQueueError, UsageError
from transferqueue.workflows.flow.events import WAIT, WORK, Event, Failure, TimeSpan
from transferqueue.workflows.flow.stage import STALL_S, Produce, Stage, Work


class StageFailedInProcess(TransferQueueError):
    """A stage failed as often in a row as a row may be tried. Its cause is the last failure."""


def run_stage(
    table: tq.Table,
    stage: Stage,
    work: Work,
    *,
    emit: Callable[[Event], None],
    stop: threading.Event | None = None,
) -> int:
    """Serve `stage` until its table ends, or until `stop` is set between batches; return the number of rows done.

    Blocks. Raises `DeadlineExceeded` when no row came for ``stage.stall_s`` (its text says what is missing),
    `StageFailedInProcess` (rule 3), and `PeerError` when the queue is gone.
    """
    rows_done = failures = 0
    while not (stop and stop.is_set()):
        waited = time.monotonic()
        try:
            batch = stage.lease(table)
        except EndOfTable:
            break
        started = time.monotonic()
        emit(TimeSpan(name=WAIT, start=waited, end=started))
        rows, failure = len(batch), _serve(batch, work)
        emit(TimeSpan(name=WORK, start=started, end=time.monotonic(), rows=rows, version=batch.version))
        rows_done += rows if failure is None else 0
        failures = 0 if failure is None else failures + 1
        if failure is not None:
            emit(Failure(text="".join(traceback.format_exception(failure)), rows=rows))
            _check_broken(stage, failures, failure)
    return rows_done


def run_source(
    table: tq.Table,
    produce: Produce,
    *,
    emit: Callable[[Event], None],
    stop: threading.Event | None = None,
    stall_s: float = STALL_S,
) -> int:
    """Put rows as fast as the table admits them, until the source has no more or `stop` is set; return the number of rows put.

    Also ends when the table is sealed. Blocks: waits for room at the server, at most `stall_s` (then `DeadlineExceeded`). An error of
    `produce` is raised unchanged, and its reservation is released.
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


def _serve(batch: tq.Batch, work: Work) -> Exception | None:
    """Call `work` and commit its results. On a failure, release the rows as failed and return the error."""
    left = len(batch)
    try:
        for part in _parts(work(batch)):
            rows = None if part.at is None else batch.rows[part.at]
            _commit(batch, part, rows)
            left -= left if rows is None else len(rows)
        if left:
            raise UsageError(f"the stage gave results for all but {left} of {len(batch)} rows; it must for each")
    except PeerError:
        raise
    except Exception as failure:  # noqa: BLE001  (the caller reports it, and raises when it repeats)
        _give_back(batch, failure)
        return failure
    return None


def _commit(batch: tq.Batch, part: PartialResult, rows: npt.NDArray[np.int64] | None) -> None:
    """End the lease of `rows` as `part` says."""
    if part.drop:
        batch.drop(part.drop, rows)
    elif part.unfinished:
        batch.release(rows, **part.facts, **part.columns)
    else:
        batch.ack(rows, **part.facts, **part.columns)


def _parts(returned: Mapping[str, Any] | Iterable[PartialResult]) -> Iterator[PartialResult]:
    if isinstance(returned, Mapping):
        yield PartialResult(columns=returned)
    else:
        yield from returned


def _give_back(batch: tq.Batch, failure: Exception) -> None:
    try:
        batch.release(failed=True, reason=f"{type(failure).__name__}: {failure}"[:1000])
    except LeaseExpired:
        return  # given back already, by its deadline: that counts as a failure too


def _check_broken(stage: Stage, failures: int, failure: Exception) -> None:
    if stage.task.attempts_max and failures >= stage.task.attempts_max and not isinstance(failure, FlowSignal):
        raise StageFailedInProcess(
            f'stage "{stage.task.name}" failed {failures} times in a row, as often as a row may be tried; '
            f"the last time with {type(failure).__name__}: {failure}"
        ) from failure
