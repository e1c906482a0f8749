"""What a sampler is: which of the ready samples next, and which of them are consumed by it.

A sampler runs where the partition's state is kept, one call at a time. It is a class, so users bring their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BaseSampler(ABC):
    """Chooses samples. `_states`: what it remembers, by partition, as it likes."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Return the chosen indexes and those that are consumed by it; both empty if it cannot choose yet."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        """The same as `sample`."""
        return self.sample(*args, **kwargs)

    def clear_cache(self, partition_id: str) -> None:
        """Forget a partition."""
        self._states.pop(partition_id, None)

    def memory(self) -> dict[str, Any]:
        """What a checkpoint keeps: dicts, lists, tuples, sets, text and numbers. A sampler that remembers more adds it."""
        return {"_states": self._states}

    def remember(self, memory: dict[str, Any]) -> None:
        """Remember what `memory` gave, and nothing else."""
        for name, value in memory.items():
            setattr(self, name, value)

    def remembered(self, partition_id: str, task_name: str, dp_rank: int) -> dict[int, Any]:
        """What a rank was given, by batch index."""
        batches: dict[int, Any] = (
            self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(dp_rank, {})
        )
        return batches
