"""The drop-in's Prometheus endpoint under peers that send half a request."""

import socket
import time
from contextlib import closing
from http.client import HTTPConnection

import pytest

pytest.importorskip("torch")
pytest.importorskip("tensordict")

import transferqueue as tq
from transferqueue.adapters.transfer_queue.metrics import OPEN_MAX, PATIENCE_S, Metrics


def test_half_a_request_shuts_nobody_out_and_keeps_nothing_from_ending(capfd: pytest.CaptureFixture[str]) -> None:
    with tq.connect() as queue:
        metrics = Metrics(queue)
        held = [socket.create_connection(metrics.address.split(":")) for _ in range(2 * OPEN_MAX)]
        for raw in held:
            raw.sendall(b"GET /me")
        with closing(HTTPConnection(metrics.address, timeout=60)) as client:
            client.request("GET", "/metrics")
            assert client.getresponse().status == 200
        began = time.monotonic()
        metrics.close()
        assert time.monotonic() - began < PATIENCE_S
        for raw in held:
            raw.close()
    assert capfd.readouterr().err == ""
