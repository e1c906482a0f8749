"""Several processes that learn as one: rank 0 leases, publishes and acks; the others carry out its commands.

1. Rank 0 splits every part of a step into passes and tells each rank its rows, as row ids. A rank reads them from the
   table: no rank but 0 has leases, so a step is acked in one commit, and the death of any rank gives all rows of the
   step back.
2. All ranks make equally many passes. One that has no rows for a pass repeats rows with weight 0, since under FSDP2 a
   pass is a collective.
3. Under ``ddp`` each rank has the whole model, and gradients are summed once a step. Under ``fsdp2`` every pass adds
   the mean over ranks to a sharded gradient, and the step multiplies by the number of ranks.
4. A rank that dies ends all: the supervisor sees its death at once, kills the others, and starts all of them again,
   from the last checkpoint (`StageJob.together`). Without a supervisor the next collective of the others fails.
5. A rank that lives and does not go on (stopped, or in a collective that never ends) is missed by rank 0, whose
   collectives last at most `patience_s`: it waits in one only while the others have work. It fails then, and rule 4
   follows. The others cannot miss rank 0 so: they wait for its commands as long as it waits for rows.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

import transferqueue as tq
from transferqueue.adapters.weight_files import host_bytes
from transferqueue.adapters.weight_shards import rows_of_rank, shard_of
from transferqueue.errors import DeadlineExceeded, Unreachable, UsageError
from transferqueue.workflows.job import names

Parallel = Literal["single", "ddp", "fsdp2"]
MEETING: Final = f"{names.TABLE}/ranks"
"""Channel on which rank 0 publishes the port where the ranks of one life of the trainer meet."""
MEETING_S: Final = 600.0
"""Longest wait for the other ranks to come: each loads a model."""
CONNECT_S: Final = 5.0
"""Longest time until an announced port answers."""
WAIT_S: Final = 7 * 3600.0
"""Longest wait of other ranks than 0 for a command: longer than rank 0 waits for rows."""
PATIENCE_S: Final = 600.0
"""Longest wait of rank 0 for the others in a collective."""
_BUCKET: Final = 1 << 26
"""Numbers that are summed over ranks in one call: 256 MiB of float32."""


@dataclass(frozen=True)
class Command:
    """What rank 0 tells the others. kind: as the runner of the ranks names them."""

    kind: int
    values: list[int]


class Ranks:
    """This process among the ranks of a trainer. `ALONE` is a process without others."""

    def __init__(self, rank: int = 0, world: int = 1, parallel: Parallel = "single") -> None:
        if not 0 <= rank < world or (world > 1) != (parallel != "single"):
            raise UsageError(
                f"rank {rank} of {world}, parallel={parallel!r}: give ranks 0 to world - 1, and several only for ddp "
                "or fsdp2"
            )
        self.rank, self.world, self.parallel = rank, world, parallel

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which leases, publishes and reports."""
        return self.rank == 0

    # ------------------------------------------------------------ commands

    def tell(self, kind: int, values: Sequence[int] = ()) -> None:
        """Give the others a command. Rank 0 only; they `hear` it."""
        if self.world > 1:
            _broadcast(torch.tensor([kind, len(values)], dtype=torch.int64))
            if values:
                _broadcast(torch.tensor(values, dtype=torch.int64))

    def hear(self) -> Command:
        """Wait for the next command of rank 0. Raises ``RuntimeError`` when a rank is gone."""
        head = _broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        values = _broadcast(torch.zeros(head[1], dtype=torch.int64)).tolist() if head[1] else []
        return Command(head[0], values)

    # ------------------------------------------------------------ sums

    def summed(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return figures summed over ranks; every rank calls it. Names are those of rank 0, which has rows whenever
        another rank has."""
        if self.world == 1:
            return dict(sums)
        text = json.dumps(sorted(sums)).encode() if self.leads else b""
        size = _broadcast(torch.tensor([len(text)]))
        named = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8) if self.leads else None
        text = bytes(_broadcast(torch.zeros(int(size), dtype=torch.uint8) if named is None else named).tolist())
        every = json.loads(text)
        values = torch.tensor([sums.get(name, 0.0) for name in every], dtype=torch.float64)
        dist.all_reduce(values, group=dist.group.WORLD)
        return dict(zip(every, values.tolist(), strict=True))

    def exchanged(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank; every rank calls it."""
        if self.world == 1:
            return [text]
        own = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        )
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        longest = max(map(int, sizes))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, torch.cat([own, torch.zeros(longest - len(own), dtype=torch.uint8)]))
        return [bytes(found[: int(size)].tolist()).decode() for found, size in zip(texts, sizes, strict=True)]

    def parts(self, name: str, tensor: Tensor, taker: int) -> Iterator[Tensor]:
        """Yield all rows of a tensor on the rank `taker`, in order and in parts, in host memory. Every rank calls it,
        exhausts it, and gives its shard; the others yield nothing. A tensor that is whole everywhere is one part."""
        shard = shard_of(name, tensor)
        if not shard.rows:
            yield from [shard.values] if self.rank == taker else []
            return
        own = host_bytes(shard.values)
        if self.rank != taker:
            if len(own):
                dist.send(own, taker)
            return
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        for rank in range(self.world):
            size = rows_of_rank(shard.rows, rank, self.world)[1] * row_bytes
            if rank != taker and size:
                part = torch.empty(size, dtype=torch.uint8)
                dist.recv(part, rank)
                yield part
            elif size:
                yield own

    def sum_gradients(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Turn gradients of sums, each multiplied by its own constant, into `factor` times their sum over ranks."""
        if self.parallel == "ddp":
            for parameter in parameters:
                if parameter.grad is None:  # this rank had no rows in the whole step
                    parameter.grad = torch.zeros_like(parameter)
            for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
                _sum_over_ranks(bucket)
        whole = factor * (self.world if self.parallel == "fsdp2" else 1)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(whole)

    # ------------------------------------------------------------ models

    def sharded(self, model: nn.Module, compute: torch.dtype, device: torch.device) -> nn.Module:
        """Shard a model that has no memory yet over the ranks, its layers one by one. device: of its weights. compute:
        dtype of the passes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (self.world,))}
        if next(model.parameters()).dtype != compute:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for layer in _layers(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return model


ALONE: Final = Ranks()


@contextmanager
def meeting(
    queue: tq.Queue, rank: int, world: int, parallel: Parallel, *, patience_s: float = PATIENCE_S
) -> Iterator[Ranks]:
    """Join the other ranks of this life of the trainer; leave when the block ends. patience_s: longest wait of rank 0
    in a collective (rule 5).

    Rank 0 announces a port on its host through the queue. Blocks until all have come, at most `MEETING_S`;
    `Unreachable` then.
    """
    if world == 1:
        yield ALONE
        return
    channel = queue.weights(MEETING, keep=1)
    store = _announced(channel, world) if rank == 0 else _found(channel, world)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    longest = timedelta(seconds=patience_s if rank == 0 else WAIT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=longest)
    try:
        yield Ranks(rank, world, parallel)
    finally:
        dist.destroy_process_group()


def _announced(channel: tq.WeightChannel, world: int) -> Any:
    """Open a store, and publish where it is as the next version of the channel."""
    host = _own_host()
    store = TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEETING_S))
    address = torch.tensor([*map(int, host.split(".")), store.port])
    try:
        latest = channel.pull(timeout_s=0).version
    except DeadlineExceeded:
        latest = -1
    channel.publish(latest + 1, {"address": address})
    return store


def _own_host() -> str:
    """The address of this host, as others may reach it; of a host without a name, the loopback's."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _found(channel: tq.WeightChannel, world: int) -> Any:
    """Connect to the newest store that answers: an older one belongs to an earlier life of rank 0."""
    tried = -1
    while True:
        try:
            with channel.pull(above=tried, timeout_s=MEETING_S) as weights:
                tried, numbers = weights.version, weights.torch()["address"].tolist()
        except DeadlineExceeded as error:
            raise Unreachable(f"rank 0 did not announce itself within {MEETING_S:g} s; see its log") from error
        host, port = ".".join(map(str, numbers[:4])), numbers[4]
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()  # TCPStore would try a dead port for long
            return TCPStore(host, port, world, is_master=False, timeout=timedelta(seconds=CONNECT_S))
        except (OSError, dist.DistError):
            continue  # that life is over; the next one announces itself


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the longest list of modules: those of a transformer."""
    lists: list[list[nn.Module]] = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _broadcast(tensor: Tensor) -> Tensor:
    dist.broadcast(tensor, src=0)
    return tensor


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (
            sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET or tensor.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
