"""What the advantage stage tells the source of prompts of each group, where `data.sampler` chooses prompts.

It tells a group before the group is acked or dropped: a step that is trained has told all of its groups.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.workflows.dispatch.channels import publish
from transferqueue.workflows.job.data.sampler import GroupRates, KnownRates, rates_of_groups
from transferqueue.workflows.job.data.source import told_rates
from transferqueue.workflows.job.names import PASS_RATES
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import group_rows, rows_ahead


class PassRates:
    """Tells pass rates, the newest ones: the source asks for them at each step that it chooses. A process that starts
    again goes on with what was told."""

    def __init__(self, queue: tq.Queue, job: Job) -> None:
        self._queue, self._pass_reward = queue, job.data.sampler.pass_reward
        self._count = 2 * (rows_ahead(job) // group_rows(job) + job.trainer.prompts_per_step)
        self._known = KnownRates()
        self._known.add(told_rates(queue))

    def tell(
        self, rows_B: npt.NDArray[np.int64], numbers_B: npt.NDArray[np.int64], rewards_B: npt.NDArray[np.float32]
    ) -> None:
        """Tell the groups of a batch. rows_B: row of the data of each response. numbers_B: number of its prompt."""
        self._known.add(rates_of_groups(rows_B, numbers_B, rewards_B >= self._pass_reward))
        publish(self._queue, PASS_RATES, GroupRates(self._known.keep_newest(self._count)))
