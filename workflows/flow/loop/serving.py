"""Serving one lease: call the function of a stage, commit what it gives, and give back what it fails on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.errors import FlowSignal, LeaseExpired, PeerError, TransferQueueError, UsageError
from transferqueue.workflows.flow.stage import Stage, Work


class StageFailedInProcess(TransferQueueError):
    """A stage failed as often in a row as a row may be tried; its cause is the last failure. Or its function raised this, to end at once."""


def serve(batch: tq.Batch, work: Work, ended: Callable[[int], bool] = lambda rows: True) -> Exception | None:
    """Call `work` and commit its results. On a failure, release the rows as failed and return the error.

    ended: called with the number of rows after each commit; when it returns False, the rest is released, as no failure.
    """
    left = len(batch)
    try:
        for part in _parts(work(batch)):
            rows = None if part.at is None else batch.rows[part.at]
            _commit(batch, part, rows)
            count = left if rows is None else len(rows)
            left -= count
            if not ended(count) and left:
                batch.release()
                return None
        if left:
            raise UsageError(f"the stage gave results for all but {left} of {len(batch)} rows; it must for each")
    except (PeerError, StageFailedInProcess):
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


def check_broken(stage: Stage, failures: int, failure: Exception) -> None:
    """Raise `StageFailedInProcess` after as many failures in a row as a row may be tried. `FlowSignal` says nothing of the stage."""
    if stage.task.attempts_max and failures >= stage.task.attempts_max and not isinstance(failure, FlowSignal):
        raise StageFailedInProcess(
            f'stage "{stage.task.name}" failed {failures} times in a row, as often as a row may be tried; '
            f"the last time with {type(failure).__name__}: {failure}"
        ) from failure
