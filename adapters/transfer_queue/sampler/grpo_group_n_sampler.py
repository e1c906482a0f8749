"""Whole groups: n samples with consecutive indexes, as a producer numbers a prompt's samples that it puts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transferqueue.adapters.transfer_queue.sampler.base import BaseSampler
from transferqueue.adapters.transfer_queue.samples.index_set import IndexSet, WaitingSamples


class GRPOGroupNSampler(BaseSampler):
    """Chooses groups of `n_samples_per_prompt` consecutive indexes, lowest first; incomplete groups wait."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Choose enough groups for `batch_size`; nothing if there are too few."""
        groups = self.groups(ready_indexes, batch_size)
        chosen = [index for group in groups for index in group]
        return chosen, list(chosen)

    def groups(self, ready_indexes: Sequence[int], batch_size: int) -> list[list[int]]:
        """Return the groups of a batch, or none."""
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size {batch_size} must be a multiple of n_samples_per_prompt {size}")
        ready = (
            ready_indexes
            if isinstance(ready_indexes, WaitingSamples)
            else WaitingSamples(IndexSet(ready_indexes), IndexSet())
        )
        return ready.runs(size, batch_size // size)
