# ruff: noqa: E402  (imports after a check that they are there)
"""The drop-in's Prometheus endpoint."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from typing import Any

import pytest

torch = pytest.importorskip("torch")
TensorDict = pytest.importorskip("tensordict").TensorDict
pytest.importorskip("omegaconf", reason="make test-shim has it")

from transferqueue.adapters import transfer_queue
from transferqueue.adapters.transfer_queue import deployment as service
from transferqueue.errors import UsageError


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(service.LOCAL, "1")
    yield
    transfer_queue.close()


def get(endpoint: str, path: str = "/metrics") -> tuple[int, str]:
    connection = HTTPConnection(endpoint, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("port", [-1, 1 << 16, "80", True, 1.5])
def test_a_port_that_is_none_is_refused_and_nothing_is_left(port: Any) -> None:
    with pytest.raises(UsageError, match=r"metrics.port=.* is no port"):
        transfer_queue.init({"metrics": {"enabled": True, "port": port}})
    with pytest.raises(RuntimeError, match="not initialized"):
        transfer_queue.get_metrics_endpoint()


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="cannot be listened at"):
        transfer_queue.init({"metrics": {"enabled": True, "port": taken.getsockname()[1]}})


def test_there_is_none_unless_it_is_asked_for() -> None:
    transfer_queue.init({"metrics": {"port": 1}})
    assert transfer_queue.get_metrics_endpoint() is None


def test_it_tells_what_is_there_until_the_service_ends() -> None:
    transfer_queue.init({"metrics": {"enabled": True}})
    endpoint = transfer_queue.get_metrics_endpoint()
    assert endpoint is not None
    assert endpoint.startswith("127.0.0.1:")
    transfer_queue.kv_put("key", "train", tag={"a": 1})
    for _ in range(2):
        status, text = get(endpoint)
        assert status == 200
        assert 'rows_resident{table="p.train"} 1' in text
    assert get(endpoint, "/other")[0] == 404
    with socket.create_connection(endpoint.split(":")):  # who says nothing does not keep it from ending
        pass
    transfer_queue.close()
    with pytest.raises(ConnectionRefusedError):
        get(endpoint)


def test_the_original_s_names_are_beside_ours() -> None:
    transfer_queue.init({"metrics": {"enabled": True}, "controller": {"polling_mode": True}})
    endpoint = transfer_queue.get_metrics_endpoint()
    assert endpoint is not None
    assert samples(endpoint)["tq_partitions_total"] == 0.0
    data = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    client = transfer_queue.get_client()
    client.put(data, partition_id='a "name"')
    client.get_meta(["x"], 3, 'a "name"', task_name="train")
    told = samples(endpoint)
    assert told["tq_partitions_total"] == 1.0
    assert told[r'tq_partition_samples_total{partition_id="a \"name\""}'] == 4.0
    assert told[r'tq_partition_consumption_progress{partition_id="a \"name\"",task_name="train"}'] == 0.75
    assert told['tq_storage_active_keys_total{storage_unit_id="server"}'] == 4.0
    assert told["tq_controller_uptime_seconds"] > 0
    client.clear_partition('a "name"')
    assert not [name for name in samples(endpoint) if name.startswith("tq_partition_")]


def samples(endpoint: str) -> dict[str, float]:
    status, text = get(endpoint)
    assert status == 200
    split = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _, _ in split}) == len(split)
    return {name: float(value) for name, _, value in split}
