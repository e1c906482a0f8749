"""Trainers and data loaders as consumers. Each module needs its framework; `packing` needs none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.adapters.trainers.learners import LossSum, TorchLearner, rank_leases
    from transferqueue.adapters.trainers.nemo_rl import QueueDataPlaneClient
    from transferqueue.adapters.trainers.openrlhf import RolloutQueues
    from transferqueue.adapters.trainers.packing import pack
    from transferqueue.adapters.trainers.slime import QueueDataSource
    from transferqueue.adapters.trainers.torch_data import QueueDataset, QueueLoader, tensors
    from transferqueue.adapters.trainers.trl import (
        BehaviourRatio,
        QueueRollouts,
        queued_reward,
        rollout_pacing,
        rollout_tasks,
    )
    from transferqueue.adapters.trainers.trl_async import QueueRolloutWorker

__all__ = [
    "BehaviourRatio",
    "LossSum",
    "QueueDataPlaneClient",
    "QueueDataSource",
    "QueueDataset",
    "QueueLoader",
    "QueueRolloutWorker",
    "QueueRollouts",
    "RolloutQueues",
    "TorchLearner",
    "pack",
    "queued_reward",
    "rank_leases",
    "rollout_pacing",
    "rollout_tasks",
    "tensors",
]

__getattr__ = lazy_names(
    __name__,
    {
        "learners": "LossSum TorchLearner rank_leases",
        "torch_data": "QueueDataset QueueLoader tensors",
        "packing": "pack",
        "trl": "BehaviourRatio QueueRollouts queued_reward rollout_pacing rollout_tasks",
        "trl_async": "QueueRolloutWorker",
        "nemo_rl": "QueueDataPlaneClient",
        "openrlhf": "RolloutQueues",
        "slime": "QueueDataSource",
    },
)
