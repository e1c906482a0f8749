# ruff: noqa: E402  (imports after a check that they are there)
"""The drop-in's controller without Ray: who waits, who is told, who ends what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

from transferqueue.adapters.transfer_queue import controller
from transferqueue.adapters.transfer_queue import deployment as service
from transferqueue.adapters.transfer_queue.sampler import BaseSampler
from transferqueue.errors import Disconnected, SchemaError

DEADLINE_S = 50.0
TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack


@pytest.fixture
def server() -> Iterator[service.DropInServer]:
    found = service.DropInServer({})
    yield found
    found.shutdown()


@pytest.fixture
def client(server: service.DropInServer) -> Iterator[Any]:
    attached = attach(server)
    yield attached.client
    attached.close()


def attach(server: service.DropInServer) -> service.DropInConnection:
    return service.DropInConnection(lambda name, *arguments: getattr(server, name)(*arguments), None)


def put(client: Any, *names: str, rows: int = 2) -> Any:
    return client.put(TensorDict({name: torch.arange(rows) for name in names}, batch_size=[rows]), partition_id="p")


def test_an_early_reader_stops_nobody(client: Any) -> None:
    made = put(client, "early")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(client.get_meta, ["late"], 2, "p", "fetch", task) for task in ("one", "two")]
        for _ in range(5):
            other = put(client, "early")
            assert client.get_meta(["early"], 2, "p", task_name="other").global_indexes
            assert client.get_production_status(["late"], "p")[1].sum() == 0
            client.clear_samples(other)
        assert not any(wait.done() for wait in waits)
        client.put(TensorDict({"late": torch.ones(2)}, batch_size=[2]), metadata=made)
        assert [wait.result(DEADLINE_S).global_indexes for wait in waits] == [made.global_indexes] * 2


def test_no_notification_is_lost(client: Any) -> None:
    """Readers and writers race; each sample comes to each task once, and no reader waits for what is there."""
    rounds, readers = 20, 2
    put(client, "x", rows=1)
    client.get_meta(["x"], 1, "p", task_name="first")

    def read(task: str) -> list[int]:
        return [index for _ in range(rounds) for index in client.get_meta(["x"], 2, "p", task_name=task).global_indexes]

    def write() -> list[int]:
        return [index for _ in range(rounds) for index in put(client, "x", rows=readers).global_indexes]

    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read, task) for task in ("shared", "shared", "alone")]
        writes = [pool.submit(write) for _ in range(2)]
        written = [0, *(index for one in writes for index in one.result(DEADLINE_S))]
        shared = [index for one in reads[:2] for index in one.result(DEADLINE_S)]
        alone = reads[2].result(DEADLINE_S)
    assert len(shared) == len(set(shared)) == 2 * 2 * rounds
    assert set(shared) <= set(written)
    assert len(alone) == len(set(alone)) == 2 * rounds


def test_a_guest_that_closes_detaches(server: service.DropInServer) -> None:
    host, guest = attach(server), attach(server)
    made = put(guest.client, "x")
    guest.close()
    with pytest.raises(Disconnected):
        guest.client.get_data(made)
    assert host.client.get_data(made)["x"].tolist() == [0, 1]
    assert host.client.get_meta(["x"], 2, "p", task_name="t").global_indexes == made.global_indexes
    host.close()


def test_a_guest_that_closes_leaves_waiting_readers_alone(server: service.DropInServer) -> None:
    host, guest = attach(server), attach(server)
    begun = threading.Event()

    def read() -> Any:
        begun.set()
        return host.client.get_meta(["x"], 2, "p", task_name="t")

    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(read)
        assert begun.wait(DEADLINE_S)
        made = put(guest.client, "x")
        guest.close()
        assert wait.result(DEADLINE_S).global_indexes == made.global_indexes
    host.close()


def test_a_wait_ends_by_its_deadline(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "WAIT_S", 0.05)
    with pytest.raises(
        TimeoutError, match=r"no batch of 2 samples with \['x'\] became ready in partition 'p' for task 't'"
    ):
        client.get_meta(["x"], 2, "p", task_name="t")


def test_fields_of_an_empty_partition_may_be_of_other_types(client: Any) -> None:
    """As a stack does that names its fields by a put of placeholders, which it clears at once."""
    client.kv_put(["placeholder"], "p", TensorDict({"x": torch.zeros(1)}, batch_size=[1]), None)
    with pytest.raises(SchemaError):
        client.kv_put(["a"], "p", TensorDict({"x": torch.arange(1)}, batch_size=[1]), None)
    assert list(client.kv_list("p")["p"]) == ["placeholder"]
    client.kv_clear(["placeholder"], "p")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(client.get_meta, ["x"], 1, "p", "fetch", "task")
        client.kv_put(["a"], "p", TensorDict({"x": torch.arange(1)}, batch_size=[1]), None)
        assert client.get_data(early.result(DEADLINE_S))["x"].tolist() == [0]
    assert client.kv_get(["a"], "p", ["x"])["x"].dtype == torch.int64


class WithReplacement(BaseSampler):
    """Chooses the last sample twice and then the first, and consumes nothing."""

    def sample(self, ready_indexes: list[int], batch_size: int, *_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return [ready_indexes[-1], ready_indexes[-1], ready_indexes[0]], []


def test_a_sampler_may_choose_with_replacement() -> None:
    server = service.DropInServer({"controller": {"sampler": WithReplacement}})
    attached = attach(server)
    ragged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(5)], layout=torch.jagged)
    data = TensorDict({"x": torch.tensor([7, 8]), "y": ragged, "z": NonTensorStack("a", "b")}, batch_size=[2])
    try:
        attached.client.put(data, partition_id="p")
        for _ in range(2):
            meta = attached.client.get_meta(["x", "y", "z"], 3, "p", task_name="t")
            assert meta.global_indexes == [1, 1, 0]
            read = attached.client.get_data(meta)
            assert read["x"].tolist() == [8, 8, 7]
            assert [each.tolist() for each in read["y"].unbind()] == [[0, 1, 2, 3, 4]] * 2 + [[0, 1]]
            assert read["z"] == ["b", "b", "a"]
        assert attached.client.get_consumption_status("t", "p")[1].tolist() == [0, 0]
    finally:
        attached.close()
        server.shutdown()
