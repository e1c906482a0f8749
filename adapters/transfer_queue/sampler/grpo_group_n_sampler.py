"""Whole groups: n samples with consecutive indexes, as a producer numbers a prompt's samples that it puts together."""

from __future__ import annotations

from typing import Any

from transferqueue.adapters.transfer_queue.sampler.base import BaseSampler


class GRPOGroupNSampler(BaseSampler):
    """Chooses groups of `n_samples_per_prompt` consecutive indexes, lowest first; incomplete groups wait."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Choose enough groups for `batch_size`; nothing if there are too few."""
        groups = self.groups(ready_indexes, batch_size)
        chosen = [index for group in groups for index in group]
        return chosen, list(chosen)

    def groups(self, ready_indexes: list[int], batch_size: int) -> list[list[int]]:
        """Return the groups of a batch, or none."""
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size {batch_size} must be a multiple of n_samples_per_prompt {size}")
        count, groups, run = batch_size // size, [], []  # type: tuple[int, list[list[int]], list[int]]
        for index in sorted(ready_indexes) if count else ():
            run = [*run, index] if run and index == run[-1] + 1 else [index]
            if len(run) == size:
                groups.append(run)
                run = []
                if len(groups) == count:
                    return groups
        return []
