"""The advantage stage, in a module of its own: it needs neither a model nor the problems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

import transferqueue as tq
from transferqueue.adapters.protocols import PartialResult
from transferqueue.workflows.flow.stage import Context, Work
from transferqueue.workflows.grpo.job import JobSettings
from transferqueue.workflows.job.algorithms.advantages import group_advantages

ZERO_ADVANTAGE: Final = "zero_advantage"
"""Drop reason of groups with equal rewards."""


@contextmanager
def advantage(context: Context) -> Iterator[Work]:
    """Factory of ``advantage``, which computes group advantages. Its task must ask for complete groups.

    If the job filters, groups with equal rewards are dropped here, for all tasks.
    """
    filtering = context.settings(JobSettings).filter_zero_advantage

    def compare(batch: tq.Batch) -> Iterator[PartialResult]:
        advantages_B = group_advantages(batch["rewards"].numpy(), batch.group_id)
        taught_B = (
            np.isin(batch.group_id, batch.group_id[advantages_B != 0]) if filtering else np.ones(len(batch), bool)
        )
        at, flat = np.flatnonzero(taught_B), np.flatnonzero(~taught_B)
        if at.size:
            yield PartialResult(at=at, columns={"advantages": advantages_B[at]})
        if flat.size:
            yield PartialResult(at=flat, columns={}, drop=ZERO_ADVANTAGE)

    yield compare
