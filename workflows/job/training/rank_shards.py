"""The part of the weights that one rank of a sharded trainer has, and so publishes.

FSDP2 splits each parameter over the ranks along dimension 0, in chunks of equal size; the last ranks may have fewer
rows, or none. Unsharded tensors (buffers) are the same on all ranks, and rank 0 publishes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import transferqueue as tq
from transferqueue.adapters.protocols import TensorSpec, Unsupported
from transferqueue.adapters.weights import spec


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor that this rank has, ``[n, ...]``: from row `first` on, of `rows`. rows 0: the tensor is
    whole."""

    values: Tensor
    first: int = 0
    rows: int = 0


class RankShards:
    """A weight source over the shards of one rank. Its tensors are the local ones; `slices` says where copies of them
    belong.

    tensors: sharded or not, of the model on this rank. They are not copied: valid until the next step. `Unsupported`
    for a tensor that is split otherwise than FSDP2 does.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        found = {name: _shard(name, tensor, rank) for name, tensor in tensors.items()}
        self._shards = {name: shard for name, shard in found.items() if shard is not None}

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


def _shard(name: str, tensor: Tensor, rank: int) -> Shard | None:
    """The part of the tensor that this rank publishes; None: others do."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as SplitAlong

    if not isinstance(tensor, DTensor):
        return Shard(tensor.detach()) if rank == 0 else None
    if tuple(tensor.placements) != (SplitAlong(0),):
        raise Unsupported(
            f'tensor "{name}" is placed as {tensor.placements}; ranks publish tensors that are split along dimension 0'
        )
    local, rows, world = tensor.to_local().detach(), tensor.shape[0], tensor.device_mesh.size()
    chunk = -(-rows // world)
    first = min(rank * chunk, rows)
    if local.shape[0] != min(chunk, rows - first):
        raise Unsupported(
            f'rank {rank} has {local.shape[0]} of {rows} rows of tensor "{name}", not {min(chunk, rows - first)}; '
            "chunks must be equal"
        )
    return Shard(local, first, rows) if local.shape[0] else None
