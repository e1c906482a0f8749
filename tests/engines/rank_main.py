"""One rank of a learner: takes its share of every batch, steps, and writes the weights at the end.

python rank_main.py ADDRESS RANK WORLD STORE KIND OUT
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transferqueue as tq
from transferqueue.adapters.trainers.learners import LossSum, TorchLearner, rank_leases
from transferqueue.adapters.trainers.packing import pack

TOKENS = 24
VOCABULARY = 32


class Model(nn.Module):
    """Predicts a number from each token, and sees those before it through a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTW = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTW = x_BTW + layer(x_BTW).tanh()
        means_BTW = x_BTW.cumsum(1) / torch.arange(1, ids_BT.shape[1] + 1)[:, None]
        return self.head(means_BTW).squeeze(-1) + 0.0  # not a view: FSDP hooks what comes out


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def split(batch: tq.Batch) -> Sequence[Part]:
    """Micro-batches of at most `TOKENS` tokens: ids padded, which of them count, and the targets."""
    rows, targets = list(batch["ids"]), torch.from_numpy(batch["target"].numpy().copy())
    return [part([rows[at] for at in places], targets[places]) for places in pack([len(ids) for ids in rows], TOKENS)]


def part(rows: Sequence[np.ndarray[Any, Any]], targets: torch.Tensor) -> Part:
    ids_BT = nn.utils.rnn.pad_sequence([torch.from_numpy(ids.astype(np.int64)) for ids in rows], batch_first=True)
    lengths_B = torch.tensor([len(ids) for ids in rows])
    return ids_BT, torch.arange(ids_BT.shape[1]) < lengths_B[:, None], targets[:, None].expand_as(ids_BT)


def loss(model: nn.Module, given: Part) -> LossSum:
    """One call of the model for a micro-batch: under FSDP each call is a collective, so all ranks must make as many."""
    ids_BT, counts_BT, targets_BT = given
    errors_BT = (model(ids_BT) - targets_BT).square() * counts_BT
    return LossSum(errors_BT.sum(), float(counts_BT.sum()), {"target": float((targets_BT * counts_BT).sum())})


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Model()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(address: str, kind: str) -> tuple[list[Mapping[str, float]], dict[str, Any]]:
    """All steps of the table; figures of each, and the weights."""
    model, optimizer = build(kind)
    learner = TorchLearner(model, optimizer, loss, split, gradient_norm_max=5.0)
    figures = []
    with tq.connect(address) as queue:
        for batch in rank_leases(queue.table("samples"), "train", rows=16, timeout_s=60):
            figures.append(learner.step(batch))
            if batch is not None:
                batch.ack()
        return figures, {name: tensor.numpy().copy() for name, tensor in learner.weights()}


def main() -> None:
    address, rank, world, store, kind, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    figures, weights = train(address, kind)
    if rank == "0":
        np.savez(out, losses=[each["loss"] for each in figures], **weights)
    dist.destroy_process_group()
    Path(out + f".{rank}").write_text(str(len(figures)))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end


if __name__ == "__main__":
    main()
