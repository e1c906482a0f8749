"""A deployment on Ray, and the drop-in on it, under callers that send nonsense and clients that die at any moment."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="make test-ray has Ray")
pytest.importorskip("tensordict", reason="make test-ray has tensordict")

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

import transferqueue as tq  # noqa: E402
from transferqueue.cluster.on_ray.messages import REPLY, DeployRefused, read  # noqa: E402
from transferqueue.errors import NotFound, TransferQueueError  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CLIENTS = 8
GENEROUS_S = 60.0
NO_ROLE = ["nobody", "", "a" * 100_000, "\0", None, 5, ["admin"], {"a": 1}, b"admin", "../admin"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory: Path = tmp_path_factory.mktemp("run")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


def die_soon(seed: int) -> None:
    """SIGKILL to this process at a moment of the first 0.3 s."""
    timer = threading.Timer(random.Random(seed).random() * 0.3, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def all_died(tasks: list[Any]) -> bool:
    dead = 0
    for task in tasks:
        with pytest.raises(ray.exceptions.RayError):
            ray.get(task, timeout=GENEROUS_S)
        dead += 1
    return dead == len(tasks)


@ray.remote(max_retries=0)  # type: ignore[misc,unused-ignore]
def produce_or_score(seed: int) -> None:
    queue = tq.connect("ray", data="remote") if seed % 2 else tq.connect("ray")
    table = queue.table("rows")
    sizes = random.Random(seed)
    die_soon(seed)
    while True:
        if seed % 3:
            with table.lease("score", rows=4, at_least=1, timeout_s=GENEROUS_S) as batch:
                batch.ack(length=[len(row) for row in batch["x"].list()])
        else:
            table.put(x=[list(range(sizes.randint(1, 2000))) for _ in range(8)], timeout_s=GENEROUS_S)


def test_an_actor_that_is_called_with_nonsense_answers_and_goes_on(cluster: None) -> None:
    with tq.deploy_ray() as deployment:
        (actor,) = deployment._actors.values()
        for role in NO_ROLE:
            refused = read(ray.get(actor.ways.remote(role), timeout=GENEROUS_S), REPLY)
            assert isinstance(refused, DeployRefused)
            assert len(refused.text) < 300
            with pytest.raises(NotFound):
                deployment.token(role)
        with tq.connect("ray") as queue:
            assert queue.tables() == []


def test_clients_that_die_at_any_moment_lose_and_double_nothing(cluster: None) -> None:
    with tq.deploy_ray(), tq.connect("ray") as queue:
        table = queue.create_table(
            "rows",
            tasks=[tq.Task("score", needs=["x"], gives=["length"]), tq.Task("train", needs=["x", "length"])],
        )
        assert all_died([produce_or_score.remote(seed) for seed in range(CLIENTS)])
        table.put(x=[[1]])
        table.seal()
        for batch in table.leases("score", rows=256, timeout_s=GENEROUS_S):
            with batch:
                batch.ack(length=[len(row) for row in batch["x"].list()])
        trained = 0
        for batch in table.leases("train", rows=256, timeout_s=GENEROUS_S):
            with batch:
                assert [len(row) for row in batch["x"].list()] == batch["length"].numpy().tolist()
                trained += len(batch)
        audit = queue.audit()
        assert audit.balanced
        assert audit.tables["rows"].rows_put == audit.tables["rows"].rows_done == trained


@ray.remote(max_retries=0)  # type: ignore[misc,unused-ignore]
def use_the_drop_in(seed: int) -> None:
    transfer_queue = drop_in()
    client = transfer_queue.get_client()
    die_soon(seed)
    number = 0
    while True:
        keys = [f"{seed}-{number}-{each}" for each in range(4)]
        number += 1
        transfer_queue.kv_batch_put(keys, "dying", TensorDict({"x": torch.full((4, 8), float(seed))}, batch_size=[4]))
        if seed % 2:
            client.get_meta(["x"], 2, "dying", "fetch", "work")
        if seed % 3 == 0:
            transfer_queue.kv_clear(keys[:2], "dying")


def drop_in() -> Any:
    from transferqueue.adapters.transfer_queue import activate

    activate()
    import transfer_queue

    transfer_queue.init()
    return transfer_queue


def test_the_drop_in_refuses_nonsense_and_outlives_its_clients(cluster: None) -> None:
    transfer_queue = drop_in()
    try:
        client = transfer_queue.get_client()
        transfer_queue.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]))
        named = client.get_meta(["x"], 2, "p", "force_fetch", "work")
        for arguments in [
            (["x"], 4, "p", "no such mode", "work"),
            (["x"], 1 << 40, "p", "insert", "work"),
            (["x"], -5, "p", "insert", "work"),
            ([f"f{each}" for each in range(10_000)], 2, "p", "force_fetch", "work"),
            (["x"], 2, "p" * 100_000, "insert", "work"),
        ]:
            with pytest.raises((ValueError, TransferQueueError)):
                client.get_meta(*arguments)
        for index in (1 << 70, -1):
            named.global_indexes = [index, index]
            with pytest.raises((ValueError, KeyError, TransferQueueError, RuntimeError)):
                client.get_data(named)
        assert all_died([use_the_drop_in.remote(seed) for seed in range(CLIENTS)])
        transfer_queue.kv_batch_put(["a", "b"], "dying", TensorDict({"x": torch.ones(2, 8)}, batch_size=[2]))
        found = transfer_queue.kv_batch_get(["a", "b"], "dying")
        assert [row.tolist() for row in found["x"].unbind()] == [[1.0] * 8] * 2
    finally:
        transfer_queue.close()


def test_the_drop_in_is_closed_though_its_service_died(cluster: None) -> None:
    transfer_queue = drop_in()
    client = transfer_queue.get_client()
    transfer_queue.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]))
    assert client.get_meta(["x"], 1, "p", "fetch", "work").global_indexes == [0]
    ray.kill(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    with pytest.raises((ray.exceptions.RayActorError, TransferQueueError)):
        list(iter(lambda: client.get_meta(["x"], 1, "p", "force_fetch", "work"), None))  # until the kill takes effect
    transfer_queue.close()
    transfer_queue.close()
