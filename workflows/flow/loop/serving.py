"""Serving one lease: call the function of a stage, commit its results, and release the rows that fail."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.errors import FlowSignal, LeaseExpired, PeerError, TransferQueueError, UsageError
from transferqueue.errors.text import counted
from transferqueue.workflows.flow.events import Event, Failure
from transferqueue.workflows.flow.stage import Stage, Work

LOG_S: Final = 60.0
"""Failures after the first are logged together, so often."""
_log: Final = logging.getLogger("transferqueue.flow")


class StageFailedInProcess(TransferQueueError):
    """A stage failed `Stage.failures_max` times in a row; its cause is the last failure. Or its function raised this,
    to end at once."""


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
    except Exception as failure:  # noqa: BLE001  (the caller reports it)
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
        batch.release(failed=True, reason=_text(failure))
    except LeaseExpired:
        return  # given back already, by its deadline


class FailureLog:
    """Logs the failures of one stage: the first at once, those after it each minute, with their number. Ends the stage
    after `Stage.failures_max` failures in a row. Calls must not overlap.
    """

    def __init__(self, stage: Stage, emit: Callable[[Event], None]) -> None:
        self._stage, self._emit = stage, emit
        self._in_a_row = self._unlogged = 0
        self._logged: float | None = None

    def succeeded(self) -> None:
        """A lease was served without failure."""
        self._in_a_row = 0

    def failed(self, failure: Exception, rows: int, now: float) -> None:
        """A lease of `rows` rows failed. Raises `StageFailedInProcess` at the stage's limit; `FlowSignal` does not
        count towards it."""
        self._emit(Failure(text="".join(traceback.format_exception(failure)), rows=rows))
        self._in_a_row += not isinstance(failure, FlowSignal)
        self._unlogged += 1
        if self._logged is None or now - self._logged >= LOG_S:
            self._log(failure, now)
        most = self._stage.failures_max
        if most is not None and self._in_a_row >= most:
            raise StageFailedInProcess(
                f'stage "{self._stage.task.name}" failed {self._in_a_row} times in a row, which is its failures_max; '
                f"the last time with {_text(failure)}"
            ) from failure

    def _log(self, failure: Exception, now: float) -> None:
        since = (
            ""
            if self._logged is None
            else f" {counted(self._unlogged, 'time')} in {now - self._logged:.0f} s, the last time"
        )
        _log.warning(
            'stage "%s" failed%s with %s; its rows are tried again', self._stage.task.name, since, _text(failure)
        )
        self._logged, self._unlogged = now, 0


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"[:1000]
