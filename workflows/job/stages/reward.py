"""The stage ``reward``: scores responses with the rewards of the job, and keeps the score of each term."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.adapters.stages.reward_functions import RewardFailed
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.reward_terms.scorer import DROPPED, RewardScorer, RowScores
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.stages.all_dropped_guard import AllDroppedGuard
from transferqueue.workflows.job.stages.failed_rows import report_failed
from transferqueue.workflows.job.stages.samples import SampleReporter


@contextmanager
def reward(context: Context) -> Iterator[Work]:
    """Factory of the stage. A reward that fails and says "stop" ends the run at once: its rows have had their
    tries."""
    with reward_with(context, load_tokenizer(context.settings(Job).model)) as score:
        yield score


@contextmanager
def reward_with(context: Context, tokenizer: TextTokenizer) -> Iterator[Work]:
    """Load the rewards. Rows that are dropped are reported (`failed_rows`)."""
    job = context.settings(Job)
    most = min((reward.failed_max for reward in job.reward), default=1.0)
    guard = AllDroppedGuard(
        job, "their rewards failed", "see failed_rows.jsonl in the folder of the run", most=("reward.failed_max", most)
    )
    samples = SampleReporter(context, tokenizer, recorded=isinstance(context.table.retention, tq.Recorded))

    def score(batch: tq.Batch) -> Iterator[PartialResult]:
        try:
            scores = scorer.score(
                ids=batch.rows.tolist(),
                data=batch[names.DATA].list(),
                prompt_ids=list(batch["prompt_ids"]),
                response_ids=list(batch["response_ids"]),
            )
        except RewardFailed as failure:
            raise StageFailedInProcess(str(failure)) from failure
        samples.report(batch, np.where(scores.failed, np.nan, scores.rewards), scores.terms)
        yield from _parts(scores)
        failed = len(scores.failures)
        if failed:
            failures = {int(batch.rows[at]): text for at, text in sorted(scores.failures.items())}
            report_failed(context, failures, DROPPED)
        guard.count(kept=len(batch) - failed, dropped=failed, last=next(iter(scores.failures.values()), ""))

    with RewardScorer(job, tokenizer) as scorer:
        yield score


def _parts(scores: RowScores) -> Iterator[PartialResult]:
    scored, failed = np.flatnonzero(~scores.failed), np.flatnonzero(scores.failed)
    if scored.size:
        columns = {"rewards": scores.rewards[scored], names.REWARD_TERMS: list(scores.terms[scored])}
        yield PartialResult(at=scored, columns=columns)
    if failed.size:
        yield PartialResult(at=failed, columns={}, drop=DROPPED)
