"""The weight channel: published once, pulled anywhere, kept while anyone looks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import transferqueue as tq


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        yield found


def model(value: float = 1.0) -> torch.nn.Module:
    found = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 2).bfloat16())
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.fill_(value)
    return found


def test_a_state_dict_travels_whole(queue: tq.Queue) -> None:
    published = model(0.25)
    channel = queue.weights("policy")
    channel.publish(3, published.state_dict())  # names that begin with a digit, a scalar, two dtypes
    with channel.pull() as weights:
        assert (weights.version, weights.channel, len(weights)) == (3, "policy", len(published.state_dict()))
        assert weights["2.weight"].dtype == torch.bfloat16
        assert weights["1.num_batches_tracked"].shape == ()
        fresh = model(0.0)
        fresh.load_state_dict(weights.torch())
    for name, tensor in published.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    channel.applied(3)


def test_arrays_travel_too_and_views_are_private(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(0, {"w": np.arange(100_000, dtype=np.float32), "b": np.float64(2.0)})
    first, second = channel.pull(), channel.pull()
    first.numpy()["w"][:] = 0
    assert second.numpy()["w"][-1] == 99_999
    assert second.numpy()["b"] == 2.0
    assert set(second) == {"w", "b"}


def test_a_version_of_tensors_without_values(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    for version in range(3):
        assert channel.publish(version, {"w": np.zeros((0, 4), np.float32)}) == 0
        with channel.pull() as weights:
            assert (weights.version, weights["w"].shape) == (version, (0, 4))
    with pytest.raises(tq.NotFound, match=r"has no tensor v, or not these rows of it; it has w$"):
        channel.pull(only=["v"])


def test_pulls_wait_for_a_version_above(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    with pytest.raises(tq.DeadlineExceeded, match="policy"):
        channel.pull(timeout_s=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.pull, 0, timeout_s=20)
        channel.publish(0, {"w": np.zeros(1)})
        channel.publish(1, {"w": np.ones(1)})
        assert waiting.result(timeout=20).version == 1
    assert channel.pull(version=0).numpy()["w"][0] == 0


def test_versions_beyond_keep_end_and_views_stay(queue: tq.Queue) -> None:
    channel = queue.weights("policy", keep=1)
    channel.publish(0, {"w": np.full(100_000, 7.0)})
    view = channel.pull().numpy()["w"]
    for version in range(1, 8):
        channel.publish(version, {"w": np.full(100_000, 100.0 + version)})
    assert set(view) == {7.0}
    with pytest.raises(tq.TransferQueueError, match="0"):
        channel.pull(version=0, timeout_s=0)


def test_released_weights_are_ended(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(0, {"w": np.ones(4)})
    weights = channel.pull()
    kept = weights["w"]
    weights.release()
    weights.release()
    with pytest.raises(tq.BatchEnded, match=r"was released.*pull it again"):
        weights["w"]
    with pytest.raises(tq.NotFound, match=r'tensor "v" is not in version 0 of channel "policy"; it has w'):
        channel.pull()["v"]
    assert kept.tolist() == [1.0] * 4


def test_versions_ascend(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(5, {"w": np.ones(1)})
    for version in (5, 4):
        with pytest.raises(tq.UsageError, match="5"):
            channel.publish(version, {"w": np.ones(1)})
    assert channel.pull().version == 5


def test_publishing_drives_the_clock_of_tables(queue: tq.Queue) -> None:
    table = queue.create_table(
        "t", tasks=[tq.Task("train", needs=["x"])], pacing=tq.Pacing("train", batch_rows=2, channel="policy")
    )
    queue.weights("policy").publish(4, {"w": np.ones(1)})
    table.put(x=[1, 2], policy_version=4)
    with table.lease("train", rows=2) as batch:
        assert batch.version == 4


def test_memory_of_old_versions_is_used_again() -> None:
    with tq.connect(arena_bytes="16MiB") as queue:
        channel = queue.weights("policy", keep=1)
        for version in range(20):
            channel.publish(version, {"w": np.full(1 << 20, version, np.float32)}, timeout_s=20)
            with channel.pull(above=version - 1) as weights:
                assert weights.numpy()["w"][0] == version
            gc.collect()


def test_the_async_front() -> None:
    async def run() -> None:
        async with tq.aconnect() as queue:
            channel = queue.weights("policy")
            waiting = asyncio.create_task(channel.pull(timeout_s=20))
            await channel.publish(0, {"w": torch.ones(3)})
            weights = await waiting
            assert weights["w"].tolist() == [1.0] * 3
            await channel.applied(0)

    asyncio.run(run())
