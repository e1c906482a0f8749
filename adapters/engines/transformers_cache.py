"""The growing cache as transformers' models take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from transferqueue.adapters.engines.key_value_cache import GrowingStates


class GrowingLayer(GrowingStates, DynamicLayer):  # type: ignore[misc]
    """`GrowingStates` as a layer of transformers' cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """See `GrowingStates`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return super().update(key_states, value_states)

    def begin(self, parts: Sequence[tuple[Any, Tensor, int]], tokens: int) -> None:
        """See `GrowingStates`."""
        first = parts[0][0]
        self.lazy_initialization(first.keys, first.values)
        super().begin(parts, tokens)


def growing_cache(config: Any) -> Any | None:
    """Return an empty cache of `GrowingLayer`; None for a model whose layers keep something else."""
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return None
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() for _ in layers]
    return cache
