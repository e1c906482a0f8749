"""The base class of samplers, which choose among the ready samples and say which of them are consumed.

A sampler runs in the controller, one call at a time. Users may write their own class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BaseSampler(ABC):
    """Chooses samples. `_states`: its memory by partition."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Return the chosen indexes and the consumed ones; both empty if there are too few samples.

        `ready_indexes` are all samples that are ready and not consumed, ascending; a list that may be changed.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        """Same as `sample`."""
        return self.sample(*args, **kwargs)

    def clear_cache(self, partition_id: str) -> None:
        """Forget a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, of values that a column may hold. A sampler with more state adds
        it."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the state by one that `save_checkpoint` returned."""
        for name, value in state.items():
            setattr(self, name, value)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether the rank ``dp_rank`` of `sampling_config` has its batch ``batch_index`` already."""
        config = sampling_config or {}
        batches = self._states.get(partition_id, {}).get(task_name, {}).get(config.get("dp_rank"), {})
        return config.get("batch_index") in batches

    def remembered(self, partition_id: str, task_name: str, dp_rank: int) -> dict[int, Any]:
        """Return the batches that a rank got, by batch index."""
        batches: dict[int, Any] = (
            self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(dp_rank, {})
        )
        return batches
