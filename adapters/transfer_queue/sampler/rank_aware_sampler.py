"""The same batch for all processes of one data-parallel rank, other batches for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transferqueue.adapters.transfer_queue.sampler.base import BaseSampler


class RankAwareSampler(BaseSampler):
    """Remembers the batch that a rank got as its number `batch_index`, and returns it again to every process of that
    rank."""

    def sample(  # noqa: PLR0913, PLR0917, RUF100  (documented so)
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        dp_rank: int = 0,
        batch_index: int = 0,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """Choose the first `batch_size` ready indexes, or return the rank's batch again; nothing if there are too
        few."""
        if dp_rank < 0:
            raise ValueError(f"dp_rank must be greater than or equal to 0, got {dp_rank}")
        batches = self.remembered(partition_id, task_name, dp_rank)
        if batch_index not in batches:
            chosen = list(ready_indexes[:batch_size])
            if not chosen or len(chosen) < batch_size:
                return [], []
            batches[batch_index] = chosen
        return batches[batch_index], list(batches[batch_index])
