"""Shards of a rank: which rows it publishes, merged adapters, uneven splits, and what cannot be published so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

import torch

import transferqueue as tq
from tests.workflows.job import shard_ranks
from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.scoring.lora import published_weights
from transferqueue.adapters.weights import TensorWeights
from transferqueue.workflows.job.training.publication import Publisher
from transferqueue.workflows.job.training.rank_shards import RankShards

WAIT_S = 120


def test_what_is_not_sharded_is_published_by_rank_0() -> None:
    tensors = {"steps": torch.ones(2)}
    assert [name for name, _ in RankShards(tensors, 0)] == ["steps"]
    assert list(RankShards(tensors, 1)) == []
    assert RankShards(tensors, 0).metadata()["steps"].shape == (2,)


@pytest.mark.slow
def test_tensors_that_are_split_otherwise_are_refused(tmp_path: Path) -> None:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(1), Replicate()):
            tensor = distribute_tensor(torch.ones(4, 4), mesh, [placement])
            with pytest.raises(Unsupported, match=r'tensor "w" is placed as .*; ranks publish tensors that are split'):
                RankShards({"w": tensor}, 0)
        whole = RankShards({"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}, 0)
        (part,) = whole.slices(dict(whole)).values()
        assert (part.first, part.rows, part.last) == (0, 4, 4)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_publish_what_one_would_with_adapters_and_without(tmp_path: Path) -> None:
    with tq.connect() as queue:
        channel = queue.weights("policy")
        command = [sys.executable, "-m", "tests.workflows.job.shard_ranks", queue.address]
        ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")]) for rank in range(2)]
        assert [rank.wait(WAIT_S) for rank in ranks] == [0, 0]
        for version, adapters in enumerate((False, True)):
            wanted = dict(published_weights(shard_ranks.model(adapters)))
            with channel.pull(version=version, timeout_s=0) as weights:
                assert set(weights) == {name for name in wanted if "lora" not in name}
                for name, tensor in weights.torch().items():
                    torch.testing.assert_close(tensor, wanted[name].detach(), msg=name)


def test_a_rank_whose_version_was_given_up_ends_with_the_reason() -> None:
    with tq.connect() as queue, tq.connect(queue.address) as other:
        first, second = Publisher(queue.weights("policy"), ranks=2), Publisher(other.weights("policy"), rank=1, ranks=2)
        pending = first.begin(1)
        first.begin(1)  # as a trainer does that starts again
        second.publish(1, TensorWeights({"w": torch.ones(2)}), pending=pending)
        with pytest.raises(tq.VersionGivenUp, match="version 1 was begun instead"):
            second.wait()
        first.close(), second.close()
