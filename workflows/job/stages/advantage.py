"""The stage ``advantage``: from the rewards of a prompt's responses to what the trainer's loss reads.

Kinds that compare responses get whole groups. With ``filter_equal`` a group whose rewards are equal is dropped, since it teaches nothing,
and the source admits another in its place (dynamic sampling; DAPO, arXiv 2503.14476, section 3.2). Kinds that whiten get a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.job.algorithms.advantages import (
    ScoredRows,
    advantage_columns_of,
    group_advantages,
)
from transferqueue.workflows.job.settings.defaults import columns_of, filled
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.stages.drop_streak import DropStreak

ZERO_ADVANTAGE: Final = "zero_advantage"
"""Drop reason of groups with equal rewards."""


@contextmanager
def advantage(context: Context) -> Iterator[Work]:
    """Factory of the stage. Figures of kind "advantage", one for each lease: rows, rows dropped, mean and deviation of the rewards."""
    job = context.settings(Job)
    algorithm = filled(job.algorithm)
    streak = DropStreak(
        job,
        "the rewards of every group were equal, and the job drops such groups",
        "check the rewards, begin with a better model, or set algorithm.filter_equal=false",
    )

    def compare(batch: tq.Batch) -> Iterator[PartialResult]:
        rewards_B = batch["rewards"].numpy()
        taught_B = _differ(rewards_B, batch.group_id) if algorithm.filter_equal else np.ones(len(batch), bool)
        at, equal = np.flatnonzero(taught_B), np.flatnonzero(~taught_B)
        if at.size:
            rows = _scored_rows(batch, job, at)
            columns = advantage_columns_of(rows, algorithm, tokens_max=job.sampling.tokens_max)
            yield PartialResult(at=at, columns=columns)
        if equal.size:
            yield PartialResult(at=equal, columns={}, drop=ZERO_ADVANTAGE)
        context.figures(
            "advantage",
            rows=len(batch),
            dropped=int(equal.size),
            reward=float(rewards_B.mean()),
            reward_std=float(rewards_B.std()),
            version=batch.version,
        )
        streak.count(kept=int(at.size), dropped=int(equal.size))

    yield compare


def _differ(rewards_B: npt.NDArray[np.float32], group_B: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each row whether the rewards of its group differ by more than rounding: bool ``[rows]``."""
    centred_B = group_advantages(rewards_B, group_B, std="none")
    return np.isin(group_B, group_B[centred_B != 0])


def _scored_rows(batch: tq.Batch, job: Job, at: npt.NDArray[np.intp]) -> ScoredRows:
    """Return what the advantages of these rows are made from. Log-probs are the proximal policy's where the job has them."""
    read = columns_of(job.algorithm)["advantage"]
    policy = "prox_logprobs" if "prox_logprobs" in read else "rollout_logprobs"
    has_mask = "loss_mask" in batch.fields
    return ScoredRows(
        rewards=batch["rewards"].numpy()[at],
        group_id=batch.group_id[at],
        masks=_rows(batch, "loss_mask", at) if has_mask else _all_chosen(batch, read, at),
        logprobs=_rows(batch, policy, at) if policy in read else (),
        ref_logprobs=_rows(batch, "ref_logprobs", at) if "ref_logprobs" in read else (),
        values=_rows(batch, "values", at) if "values" in read else (),
    )


def _all_chosen(batch: tq.Batch, read: tuple[str, ...], at: npt.NDArray[np.intp]) -> list[npt.NDArray[np.bool_]]:
    """Return the masks of rows whose tokens are all the policy's; none where the algorithm reads no tokens."""
    tokens = next((name for name in ("response_ids", "ref_logprobs") if name in read), None)
    return [] if tokens is None else [np.ones(len(row), bool) for row in _rows(batch, tokens, at)]


def _rows(batch: tq.Batch, name: str, at: npt.NDArray[np.intp]) -> list[npt.NDArray[Any]]:
    column = list(batch[name])
    return [column[row] for row in at.tolist()]
