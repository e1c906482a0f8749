"""What the advantage stage tells the source of prompts of each group, where `data.sampler` chooses prompts.

It tells a group before the group is acked or dropped: a step that is trained has told all of its groups. Each batch is
a version of a channel, of its groups alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.workflows.dispatch.channels import publish
from transferqueue.workflows.job.data.sampler import GroupRate, GroupRates
from transferqueue.workflows.job.names import PASS_RATES
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import group_rows, rows_ahead


def tell_rates(
    queue: tq.Queue,
    job: Job,
    rows_B: npt.NDArray[np.int64],
    numbers_B: npt.NDArray[np.int64],
    rewards_B: npt.NDArray[np.float32],
) -> None:
    """Tell the pass rate of each group of a batch.

    Args:
        queue: of the job.
        job: the job.
        rows_B: row of the data of each response.
        numbers_B: number of its prompt.
        rewards_B: its reward.
    """
    numbers, first, group_B = np.unique(numbers_B, return_index=True, return_inverse=True)
    passed_B = rewards_B >= job.data.sampler.pass_reward
    rates = np.bincount(group_B, weights=passed_B) / np.bincount(group_B)
    groups = [GroupRate(*each) for each in zip(rows_B[first].tolist(), numbers.tolist(), rates.tolist(), strict=True)]
    untaken = rows_ahead(job) // group_rows(job) + job.trainer.prompts_per_step  # groups told between two steps chosen
    publish(queue, PASS_RATES, GroupRates(groups), keep=untaken)
