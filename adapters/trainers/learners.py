"""A torch module as a learner: alone, or as one rank of several under DDP or FSDP2.

- The loss of a step is a sum over rows or tokens, divided by their number in the whole step, over all micro-batches of
  all ranks. It does not depend on the split of rows: several ranks compute the same gradient as one.
- All ranks run as many micro-batches as the rank with the most. A rank with fewer repeats its last one with
  weight 0, since every backward pass is a collective.
- A rank without rows takes part in the step too (`rank_leases` gives it None).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import transferqueue as tq
from transferqueue.adapters.protocols import WeightSource
from transferqueue.adapters.weights import ModuleWeights
from transferqueue.errors import EndOfTable, UsageError


@dataclass(frozen=True)
class LossSum:
    """Loss of a micro-batch, as a sum.

    Args:
        total: the sum, with a gradient.
        weight: the number of rows or tokens that it is over.
        figures: sums of other metrics, by name; default: none.
    """

    total: Tensor
    weight: float
    figures: Mapping[str, float] = field(default_factory=dict)


Loss = Callable[[nn.Module, Any], LossSum]
"""Computes the loss of a micro-batch that `split` made, with one call of the module: under FSDP each call is a
collective."""
Split = Callable[[Any], Sequence[Any]]
"""Splits a batch into micro-batches, in any form that the loss takes."""


class TorchLearner:
    """A learner (`protocols.Learner`) over a module and its optimizer.

    With a module that is wrapped or sharded, every rank of the default process group creates a learner and calls every
    method in the same order. The loss of a step is the sum over all micro-batches of all ranks, divided by their
    weight, so it does not depend on how rows were split.

    Args:
        module: plain, wrapped by ``DistributedDataParallel``, or sharded by ``fully_shard``.
        optimizer: of the module's parameters.
        loss: computes the `LossSum` of a micro-batch, with one call of the module.
        split: splits a batch into micro-batches, in any form that `loss` takes.
        gradient_norm_max: gradients are clipped to this norm; default None: they are not.
        version: of the initial weights; default 0.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        split: Split,
        *,
        gradient_norm_max: float | None = None,
        version: int = 0,
    ) -> None:
        self._module, self._optimizer, self._loss, self._split = module, optimizer, loss, split
        self._gradient_norm_max = gradient_norm_max
        self._version = version
        self._spare: Any = None

    @property
    def version(self) -> int:
        """Version of the initial weights plus the number of steps taken."""
        return self._version

    def step(self, batch: Any | None) -> Mapping[str, float]:
        """Take one step, on all ranks together. Blocks.

        Args:
            batch: the rows of this rank; None: it has none.

        Returns:
            Metrics, as means over the whole step.

        Raises:
            UsageError: no rank has rows, the losses have no weight, or a rank without rows has never had any: it has
                nothing to run the module on.
        """
        parts = list(self._split(batch)) if batch is not None else []
        rounds = int(_over_ranks(torch.tensor([len(parts)]), dist.ReduceOp.MAX)[0])
        if not rounds:
            raise UsageError("a step was taken with no rows on any rank")
        self._spare = parts[-1] if parts else self._spare
        if self._spare is None:
            raise UsageError("this rank has no rows in its first step; lease at least one for each rank")
        self._optimizer.zero_grad()
        sums = [self._backward(parts[at] if at < len(parts) else None) for at in range(rounds)]
        weight, figures = self._totals(sums)
        self._rescale(weight)
        if self._gradient_norm_max is not None:
            norm = nn.utils.clip_grad_norm_(self._module.parameters(), self._gradient_norm_max)
            figures["gradient_norm"] = float(_whole(norm))
        self._optimizer.step()
        self._version += 1
        return figures

    def weights(self) -> WeightSource:
        """Return the current weights. Iterating gathers shards: do it on every rank, in the same order."""
        inner = self._module.module if isinstance(self._module, nn.parallel.DistributedDataParallel) else self._module
        return ModuleWeights(inner)

    def _backward(self, part: Any | None) -> LossSum:
        loss = self._loss(self._module, self._spare if part is None else part)
        (loss.total if part is not None else loss.total * 0).backward()
        return loss if part is not None else LossSum(loss.total.detach() * 0, 0.0)

    def _totals(self, sums: Sequence[LossSum]) -> tuple[float, dict[str, float]]:
        names = sorted({name for loss in sums for name in loss.figures})
        local = [sum(float(loss.total.detach()) for loss in sums), sum(loss.weight for loss in sums)]
        local += [sum(loss.figures.get(name, 0.0) for loss in sums) for name in names]
        total, weight, *figures = _over_ranks(torch.tensor(local, dtype=torch.float64), dist.ReduceOp.SUM).tolist()
        if weight <= 0:
            raise UsageError("the losses of a step have no weight: they are over no rows or tokens")
        return weight, {"loss": total / weight, **{n: value / weight for n, value in zip(names, figures, strict=True)}}

    def _rescale(self, weight: float) -> None:
        """Turn the gradients, which are sums on one rank and means over ranks on several, into means over the whole
        step."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(world / weight)


def rank_leases(table: tq.Table, task: str, *, rows: int, **lease: Any) -> Iterator[tq.Batch | None]:
    """Yield this rank's shares, balanced by tokens, of batches for all ranks of the default process group.

    All ranks get the same number of batches: at the end of a table, a rank without rows gets None while another still
    has some. The caller acks each batch. Waits and raises as `Table.lease`, but for `EndOfTable`.

    Args:
        table: the table.
        task: name of its task.
        rows: rows of a batch for all ranks together.
        **lease: further arguments of `Table.lease`.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    while True:
        try:
            batch = table.lease(task, rows=rows, rank=rank, world=world, **lease)
        except EndOfTable:
            batch = None
        if not _over_ranks(torch.tensor([int(batch is not None)]), dist.ReduceOp.MAX)[0]:
            return
        yield batch
        del batch


def _over_ranks(values: Tensor, operation: Any) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values, op=operation)
    return values


def _whole(value: Tensor) -> Tensor:
    """Gather a value if it is a shard."""
    gather = getattr(value, "full_tensor", None)
    tensor: Tensor = gather() if callable(gather) else value
    return tensor
