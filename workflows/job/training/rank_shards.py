"""The part of the weights that one rank of a sharded trainer has, and so publishes.

Unsharded tensors (buffers) are the same on all ranks, and rank 0 publishes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

import transferqueue as tq
from transferqueue.adapters.protocols import TensorSpec
from transferqueue.adapters.weight_shards import Shard, shard_of
from transferqueue.adapters.weights import spec


class RankShards:
    """A weight source over the shards of one rank. Its tensors are the local ones; `slices` says where copies of them
    belong.

    tensors: sharded or not, of the model on this rank. They are not copied: valid until the next step. `Unsupported`
    for a tensor that is split otherwise than FSDP2 does.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        found = {name: shard_of(name, tensor) for name, tensor in tensors.items()}
        self._shards = {name: shard for name, shard in found.items() if (len(shard.values) if shard.rows else not rank)}

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes of the local tensors."""
        return {name: spec(shard.values) for name, shard in self._shards.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, shard.values) for name, shard in self._shards.items())

    def slices(self, copies: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return copies of these tensors as a channel takes them."""
        return {name: _placed(self._shards[name], copy) for name, copy in copies.items()}


def _placed(shard: Shard, copy: Tensor) -> Any:
    return tq.WeightSlice(copy, first=shard.first, rows=shard.rows) if shard.rows else copy
