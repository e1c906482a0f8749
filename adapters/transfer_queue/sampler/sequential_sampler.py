"""The samples in the order of their list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transferqueue.adapters.transfer_queue.sampler.base import BaseSampler


class SequentialSampler(BaseSampler):
    """Chooses the first ones."""

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Return the first `batch_size` ready indexes, or all if there are fewer; a negative number counts from the
        end, as in a slice."""
        chosen = list(ready_indexes[:batch_size])
        return chosen, list(chosen)
