"""Samplers of the drop-in: they choose among the ready samples."""

from transferqueue.adapters.transfer_queue.sampler.base import BaseSampler
from transferqueue.adapters.transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transferqueue.adapters.transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transferqueue.adapters.transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transferqueue.adapters.transfer_queue.sampler.sequential_sampler import SequentialSampler
from transferqueue.adapters.transfer_queue.sampler.streaming_token_budget_sampler import StreamingTokenBudgetSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StreamingTokenBudgetSampler",
]
