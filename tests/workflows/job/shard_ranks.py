"""One of two ranks that shard a small model with adapters, and publish it as shards: started by test_shards.py.

python -m tests.workflows.job.shard_ranks ADDRESS RANK STORE
"""

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transferqueue as tq
from transferqueue.adapters.scoring.lora import LoraLinear, add_lora, published_weights
from transferqueue.workflows.job.training.publication import Publisher
from transferqueue.workflows.job.training.rank_shards import RankShards

RANKS = 2


class Model(nn.Module):
    """Rows that two ranks share unequally (5), and one row, which only the first has."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Linear(3, 5)
        self.one = nn.Linear(4, 1)
        self.register_buffer("steps", torch.tensor([7.0, 8.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.uneven(rows)


def model(adapters: bool) -> Model:
    """The same on every rank: adapters that change the weights, in `uneven` and `one`."""
    torch.manual_seed(0)
    made = Model()
    if adapters:
        add_lora(made, rank=2)
        for layer in made.modules():
            if isinstance(layer, LoraLinear):
                nn.init.normal_(layer.lora_b)
    return made


def main() -> None:
    """Publish version 0 without adapters and version 1 with them."""
    address, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    with tq.connect(address, label=f"rank {rank}") as queue:
        publisher = Publisher(queue.weights("policy"), rank=rank, ranks=RANKS)
        for version, adapters in enumerate((False, True)):
            sharded = model(adapters)
            fully_shard(sharded, mesh=mesh)
            number = torch.tensor([publisher.begin(version) if rank == 0 else 0])
            dist.broadcast(number, src=0)
            source = RankShards(published_weights(sharded).sharded(), rank)
            publisher.publish(version, source, pending=int(number))
            publisher.wait()
        publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
