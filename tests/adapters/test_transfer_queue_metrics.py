"""The drop-in's Prometheus endpoint."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tensordict")
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
