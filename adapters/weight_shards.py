"""The part of a tensor that one rank of a sharded model has.

FSDP2 splits each parameter over the ranks along dimension 0, in chunks of equal size; the last ranks may have fewer
rows, or none. Other tensors (buffers) are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transferqueue.adapters.protocols import Unsupported

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor that this rank has.

    Args:
        values: ``[n, ...]``, not copied.
        first: the first of them; default 0.
        rows: of the whole tensor; default 0: `values` are the whole tensor.
    """

    values: Tensor
    first: int = 0
    rows: int = 0


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is split over ranks.

    Args:
        tensor: a torch tensor.
    """
    return hasattr(tensor, "full_tensor")


def shard_of(name: str, tensor: Tensor) -> Shard:
    """Return what this rank has of a tensor.

    Args:
        name: of the tensor, for errors.
        tensor: sharded or not.

    Raises:
        Unsupported: it is split otherwise than FSDP2 does.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as SplitAlong

    if not isinstance(tensor, DTensor):
        return Shard(tensor.detach())
    if tuple(tensor.placements) != (SplitAlong(0),):
        raise Unsupported(
            f'tensor "{name}" is placed as {tensor.placements}; ranks publish tensors that are split along dimension 0'
        )
    local, rows, rank = tensor.to_local().detach(), tensor.shape[0], tensor.device_mesh.get_local_rank()
    first, count = rows_of_rank(rows, rank, tensor.device_mesh.size())
    if local.shape[0] != count:
        raise Unsupported(
            f'rank {rank} has {local.shape[0]} of {rows} rows of tensor "{name}", not {count}; chunks must be equal'
        )
    return Shard(local, first, rows)


def rows_of_rank(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first of the rows that a rank has, and their number.

    Args:
        rows: of the whole tensor.
        rank: of `ranks`.
        ranks: their number.

    Example:
        >>> [rows_of_rank(5, rank, 4) for rank in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    chunk = -(-rows // ranks)
    first = min(rank * chunk, rows)
    return first, min(chunk, rows - first)


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return values of this rank as a tensor that is sharded as another one is.

    Args:
        tensor: sharded or not.
        local: what this rank has.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
