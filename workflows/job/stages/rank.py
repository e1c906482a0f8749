"""The ranker of a job: expected lengths before rows are generated, lessons from finished rows, a plan for each batch.

1. Task `rank` is leased a whole batch at a time, so that all its rows become ready at once, ranked. A batch not
   complete within `LINGER_S` goes on as it is.
2. The plan of the batch is published before its rows are acked. Until the ranker has skill, rows keep the order of the
   data; they are judged all the same.
3. A thread serves task `lengths`: it teaches the ranker and refits it. Rows never wait for that.
4. The ranker is saved in the run's folder after each refit, and a later life of the process goes on with it.
5. Each refit reports its recall on rows that it had not seen, as figures of the run and as a table on the queue's page.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from transferqueue.errors import DeadlineExceeded, EndOfTable, UsageError
from transferqueue.observe.figure_table import LINES_MAX, FigureTable, figures_channel
from transferqueue.workflows.dispatch.channels import live_engines, plan_channel, publish
from transferqueue.workflows.dispatch.dispatcher import LengthDispatcher, Refit, priorities
from transferqueue.workflows.dispatch.ranker import LengthRanker
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.reports.loggers import DISPATCH, RANKER
from transferqueue.workflows.flow.stage import Context, Stage
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import stages
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import batch_rows

LINGER_S: Final = 0.25
"""Longest time in which the first rows of a batch wait for the others."""
_FILE: Final = "ranker.npz"
_TITLE: Final = "Ranker of lengths: recall of the longest rows, over rows that finished since the refit before"
_COLUMNS: Final = ("refit", "rows learned", "rows judged", "of the longest 20 %", "10 %", "5 %")


@contextmanager
def rank(context: Context) -> Iterator[Callable[[], None]]:
    """Factory of the process: its loop serves the tasks `rank` and `lengths` until the table ends."""
    job = context.settings(Job)
    file = None if context.directory is None else context.directory / _FILE
    overlapping = job.pacing.mode == "async"  # in the other modes rows of two steps are never in an engine together
    dispatcher = LengthDispatcher(batch_rows=batch_rows(job), overlapping=overlapping, ranker=_saved(file))
    yield RankLoop(context, job, dispatcher, file)


class RankLoop:
    """The loop of the process."""

    def __init__(self, context: Context, job: Job, dispatcher: LengthDispatcher, file: Path | None) -> None:
        self._context, self._job, self._dispatcher, self._file = context, job, dispatcher, file
        self._stages = {stage.task.name: stage for stage in stages(job)}
        self._batch = 0
        self._error: BaseException | None = None
        self._changing = threading.Lock()

    def __call__(self) -> None:
        """Serve both tasks; raises what either raises."""
        learning = threading.Thread(target=self._learn, name="lengths", daemon=True)
        learning.start()
        try:
            while self._error is None:
                with suppress(DeadlineExceeded), self._lease(self._stages[names.RANK]) as batch:
                    self._rank(batch)
        except EndOfTable:
            learning.join()
        if self._error is not None:
            raise self._error

    def _lease(self, stage: Stage) -> tq.Batch:
        """Wait for a whole batch, at most `LINGER_S`; then take what there is."""
        whole = Stage(task=stage.task, rows=stage.rows)
        with suppress(DeadlineExceeded):
            return whole.lease(self._context.table, timeout_s=LINGER_S)
        return stage.lease(self._context.table, timeout_s=0.0)

    def _rank(self, batch: tq.Batch) -> None:
        expected = self._dispatcher.expect(list(batch["prompt_ids"]))
        engines = live_engines(self._context.queue, self._context.table.name)
        with self._changing:
            plan = self._dispatcher.plan(expected.tokens, engines)
            figures = self._dispatcher.figures()
        publish(self._context.queue, plan_channel(self._context.table.name), plan)
        steps = batch.group_id // self._job.trainer.prompts_per_step
        columns: dict[str, Any] = {
            names.EXPECTED_TOKENS: np.minimum(expected.tokens, np.iinfo(np.int32).max).astype(np.int32),
            names.RANKER_VERSION: np.full(len(batch), expected.version, np.int32),
        }
        batch.ack(
            tokens=expected.tokens,
            priority=priorities(steps, expected.tokens, plan),
            **columns,
        )
        self._batch += 1
        self._context.figures(DISPATCH, batch=self._batch, step=int(steps.min()) + 1, **figures)

    def _learn(self) -> None:
        try:
            run_stage(self._context.table, self._stages[names.LENGTHS], self._taught, emit=self._context.emit)
        except BaseException as error:  # noqa: BLE001  (the loop raises it)
            self._error = error

    def _taught(self, batch: tq.Batch) -> Mapping[str, Any]:
        with self._changing:
            self._dispatcher.learn(
                list(batch["prompt_ids"]),
                batch.group_id.tolist(),
                batch[names.EXPECTED_TOKENS].numpy(),
                batch.tokens,
            )
        if self._dispatcher.refit_due:
            self._refit()
        return {}

    def _refit(self) -> None:
        refit = self._dispatcher.refit()
        self._context.figures(RANKER, **refit.figures())
        table = self._context.table.name
        publish(self._context.queue, figures_channel(table, RANKER), _shown(self._dispatcher.refits))
        if self._file is not None:
            _save(self._dispatcher.ranker, self._file)


def _shown(refits: Iterable[Refit]) -> FigureTable:
    """The table of the page: refits, the newest first."""
    newest_first = reversed([refit for refit in refits if refit.recall])
    lines = tuple(
        (str(refit.version), f"{refit.rows:,}", f"{refit.judged_rows:,}", *(f"{share:.2f}" for share in refit.recall))
        for refit in newest_first
    )
    return FigureTable(title=_TITLE, columns=_COLUMNS, lines=lines[:LINES_MAX])


def _saved(file: Path | None) -> LengthRanker:
    """The ranker of an earlier life; a new one if there is none, or if another version of this code saved it."""
    if file is None or not file.exists():
        return LengthRanker()
    with suppress(UsageError, OSError, ValueError, KeyError), np.load(file, allow_pickle=False) as arrays:
        return LengthRanker.restored(dict(arrays))
    return LengthRanker()


def _save(ranker: LengthRanker, file: Path) -> None:
    beside = file.with_suffix(".new.npz")
    arrays: dict[str, Any] = ranker.saved()
    np.savez(beside, **arrays)
    os.replace(beside, file)
