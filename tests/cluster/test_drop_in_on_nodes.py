"""The drop-in on a Ray cluster whose nodes share no /tmp and no /dev/shm, as machines do: make test-ray runs this."""

import asyncio
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="make test-ray has Ray")
torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")

from tests.cluster.ray_nodes import RayNodes, check_isolation  # noqa: E402
from tests.cluster.shards import shards  # noqa: E402
from transferqueue.adapters import transfer_queue as shim  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    check_isolation()
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    with RayNodes() as nodes:
        nodes.add("rollout")
        ray.init(address=nodes.address)
        yield nodes
        shim.close()
        ray.shutdown()


@pytest.fixture
def one_node(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    shim.close()
    ray.shutdown()


def test_samples_that_memory_does_not_hold_go_to_the_ssd(one_node, tmp_path):
    storage = {"total_storage_bytes": "64MiB", "ssd_offload": {"enabled": True, "path": str(tmp_path / "ssd")}}
    shim.init({"backend": {"SimpleStorage": storage}})
    for number in range(12):
        shim.kv_put(str(number), "p", {"x": torch.full((1 << 20,), float(number), dtype=torch.float64)})
    for number in range(12):
        (row,) = shim.kv_batch_get([str(number)], "p")["x"].unbind()
        assert (len(row), row[-1].item()) == (1 << 20, number)
        del row
    spilled = shim.get_client().queue.stats().server.spill
    assert spilled is not None
    assert spilled.spilled_bytes > 0


@ray.remote(resources={"rollout": 1}, num_cpus=0)
def generate(partition: str) -> list[Any]:
    """A rollout worker of the other node: reads prompts, and puts responses with multimodal inputs."""
    from transferqueue.adapters import transfer_queue as queue

    queue.init()
    client = queue.get_client()
    meta = client.get_meta(["prompt"], 2, partition, task_name="rollout")
    prompts = [row.tolist() for row in client.get_data(meta)["prompt"].unbind()]
    given = [{"pixel_values": torch.full((4, 8), float(at)), "grid": (1, at)} for at in range(2)]
    responses = torch.nested.as_nested_tensor([torch.arange(100_000), torch.arange(3)], layout=torch.jagged)
    client.put(TensorDict({"response": responses, "inputs": NonTensorStack(*given)}, batch_size=[2]), metadata=meta)
    return prompts


def test_drivers_and_workers_of_several_nodes_share_partitions_also_of_one_that_joins_later(nodes):
    sizes = {"SimpleStorage": {"total_storage_bytes": "256MiB", "num_data_storage_units": 2}}
    shim.init({"controller": {"polling_mode": True}, "backend": sizes})
    assert shim.get_client()._queue.address == "ray://transfer_queue/default"
    prompts = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    client = shim.get_client()
    client.put(TensorDict({"prompt": prompts}, batch_size=[2]), partition_id="train")
    assert ray.get(generate.remote("train"), timeout=200) == [[0, 1, 2], [0, 1, 2, 3, 4]]
    meta = asyncio.run(client.async_get_meta(["response", "inputs"], 2, "train", task_name="train"))
    found = asyncio.run(client.async_get_data(meta))
    assert [len(row) for row in found["response"].unbind()] == [100_000, 3]
    assert [inputs["grid"] for inputs in found["inputs"].tolist()] == [(1, 0), (1, 1)]
    assert torch.equal(found["inputs"].tolist()[1]["pixel_values"], torch.ones(4, 8))
    assert len(shards(client._queue)) == 2  # beside the memory of the server

    nodes.add("late")
    client.put(TensorDict({"prompt": prompts}, batch_size=[2]), partition_id="later")
    late = generate.options(resources={"late": 1}).remote("later")
    assert ray.get(late, timeout=200) == [[0, 1, 2], [0, 1, 2, 3, 4]]
    meta = client.get_meta(["response"], 2, "later", task_name="train")
    assert [len(row) for row in client.get_data(meta)["response"].unbind()] == [100_000, 3]
