"""Weights of two FSDP2 ranks: gathered by rank 0 against published as shards:
``python -m bench.sharded_publication --into bench/records``.

Two processes (gloo over loopback, CPU) shard one model of 21 million float32 parameters, which is published in bfloat16
(42 MB). The two ways alternate, and the weights change before each version. Stood still: from the update until the
weights may change again, as if the next update were due at once; a trainer computes its next passes meanwhile. Visible:
from the update until readers have the version. Bytes between ranks are computed: an all-gather brings each rank the
shards of the other. A reader then pulls each version, and copies it into a model of its own.

Expected, written before the first run: gathered, each rank receives 42 MB of float32 and waits for it, and rank 0
converts 21 million numbers: both stand still for at least 0.1 s. As shards nothing crosses but a number, and each rank
converts half: at most a quarter of that, and the version is visible in about half the time, since two processes write
it. A reader pays one copy of 42 MB more, about 20 ms, since each tensor comes in two slices.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn

import transferqueue as tq
from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.run_record import into_option, save_record, show
from transferqueue.adapters.weights import ChannelWeights, ModuleWeights, copy_weights
from transferqueue.workflows.job.training.publication import HostCopy, Publisher
from transferqueue.workflows.job.training.rank_shards import RankShards

RANKS: Final = 2
WIDTH, HIDDEN, LAYERS, VOCABULARY = 512, 2048, 8, 8192
WAYS: Final = ("gathered", "shards")
CHANNEL: Final = "policy"
WAIT_S: Final = 100.0

Figures = dict[str, float]


class Model(nn.Module):
    """An embedding and layers of two matrices each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Do what a model would; the measurement never calls it."""
        hidden: torch.Tensor = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def sharded() -> nn.Module:
    """The model, split over the ranks as a trainer of FSDP2 does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    made, mesh = Model(), init_device_mesh("cpu", (RANKS,))
    for layer in made.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


class Rank:
    """One rank: publishes version after version, either way, and keeps what each cost."""

    def __init__(self, rank: int, queue: tq.Queue) -> None:
        self.rank, self.model, self.channel = rank, sharded(), queue.weights(CHANNEL)
        self.written: list[int] = []
        self.copy = HostCopy(torch.bfloat16)
        self.publisher = Publisher(
            self.channel,
            dtype=torch.bfloat16,
            rank=rank,
            ranks=RANKS,
            figures=lambda kind, **values: self.written.append(values["bytes"]),
        )

    def publish(self, way: str, version: int) -> Figures:
        """Change the weights and publish them; returns bytes and seconds."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1e-3)
        dist.barrier()
        ways: dict[str, Callable[[int, float], Figures]] = {"gathered": self._gathered, "shards": self._shards}
        figures = ways[way](version, time.perf_counter())
        dist.barrier()
        return figures

    def _gathered(self, version: int, began: float) -> Figures:
        if self.rank:
            for _ in ModuleWeights(self.model):  # takes part in the all-gather of each tensor
                pass
            stood = time.perf_counter() - began
            return {"bytes_written": 0, "bytes_received": self._received(), "stood_still_s": stood, "visible_s": stood}
        copies = self.copy.take(ModuleWeights(self.model))
        stood = time.perf_counter() - began
        written = self.channel.publish(version, copies, timeout_s=WAIT_S)
        visible = time.perf_counter() - began
        return {
            "bytes_written": written,
            "bytes_received": self._received(),
            "stood_still_s": stood,
            "visible_s": visible,
        }

    def _received(self) -> int:
        """Bytes of the other ranks' shards, in float32."""
        tensors: Any = ModuleWeights(self.model).sharded().values()
        return sum(4 * (tensor.numel() - tensor.to_local().numel()) for tensor in tensors)

    def _shards(self, version: int, began: float) -> Figures:
        number = torch.tensor([self.publisher.begin(version) if not self.rank else 0])
        dist.broadcast(number, src=0)
        source = RankShards(ModuleWeights(self.model).sharded(), self.rank)
        self.publisher.publish(version, source, pending=int(number))
        self.publisher.wait_copied()
        stood = time.perf_counter() - began
        self.publisher.wait()
        visible = time.perf_counter() - began
        return {"bytes_written": self.written[-1], "bytes_received": 8, "stood_still_s": stood, "visible_s": visible}


def run_rank(address: str, store: str, rank: int, versions: int, told: Any) -> None:
    """The process of one rank: both ways in turn, `versions` of each after one that is not counted."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    with tq.connect(address, label=f"rank {rank}") as queue:
        publisher = Rank(rank, queue)
        for version in range(len(WAYS) * (versions + 1)):
            way = WAYS[version % len(WAYS)]
            figures = publisher.publish(way, version)
            if version >= len(WAYS):
                told.put((rank, way, figures))
            if not rank:
                told.put((-1, way, _pulled(queue, version) if version >= len(WAYS) else {}))
            dist.barrier()
        publisher.publisher.close()
    dist.destroy_process_group()


def _pulled(queue: tq.Queue, version: int) -> Figures:
    """Pull a version and copy it into a model, as an engine does."""
    own = Model().to(torch.bfloat16)
    began = time.perf_counter()
    with queue.weights(CHANNEL).pull(version=version, timeout_s=WAIT_S) as weights:
        copy_weights(ChannelWeights(queue.address, weights), own)
    return {"read_s": time.perf_counter() - began}


def measured(versions: int) -> list[tuple[int, str, Figures]]:
    """Run both ranks to their end."""
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder, tq.connect(arena_bytes="1GiB") as queue:
        arguments = [(queue.address, f"{folder}/store", rank, versions, told) for rank in range(RANKS)]
        ranks = [context.Process(target=run_rank, args=each) for each in arguments]
        for rank in ranks:
            rank.start()
        count = len(WAYS) * (versions * (RANKS + 1) + 1)
        found = [told.get(timeout=WAIT_S) for _ in range(count)]
        for rank in ranks:
            rank.join(WAIT_S)
    return [each for each in found if each[2]]


def results(versions: int) -> list[MeasuredResult]:
    """Medians and spread, by way and rank."""
    samples: dict[str, list[float]] = {}
    for rank, way, figures in measured(versions):
        for name, value in figures.items():
            key = f"{way}: {name}" + (f", rank {rank}" if rank >= 0 else "")
            samples.setdefault(key, []).append(value)
    lines = [summarize(key, _unit(key), values) for key, values in samples.items()]
    return sorted(lines) + list(_ratios(samples))


def _unit(key: str) -> str:
    return "bytes" if "bytes" in key else "s"


def _ratios(samples: dict[str, list[float]]) -> Iterator[MeasuredResult]:
    for name in ("stood_still_s, rank 0", "visible_s, rank 0", "read_s"):
        pairs = zip(samples[f"gathered: {name}"], samples[f"shards: {name}"], strict=True)
        ratios = summarize(f"gathered / shards: {name}", "ratio", [first / second for first, second in pairs])
        yield ratios
    yield single("parameters", "count", sum(parameter.numel() for parameter in Model().parameters()))


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=15, help="of each way")
    into_option(parser)
    options = parser.parse_args()
    measurement = Measurement()
    lines = results(options.versions)
    show(lines)
    details = {"ranks": RANKS, "master": "float32", "published": "bfloat16", "backend": "gloo"}
    save_record(measurement, options.into, "sharded-publication", lines, details)


if __name__ == "__main__":
    main()
