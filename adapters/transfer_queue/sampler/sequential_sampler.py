"""The samples in the order in which they are listed."""

from __future__ import annotations

from typing import Any

from transferqueue.adapters.transfer_queue.sampler.base import BaseSampler


class SequentialSampler(BaseSampler):
    """The first ones."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The first `batch_size` of the ready indexes, or all if there are fewer; a negative number is one of a slice."""
        chosen = ready_indexes[:batch_size]
        return chosen, list(chosen)
