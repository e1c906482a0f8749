"""Attacks on the bulk port of a server that runs, over either carrier. `make fuzz` makes thousands."""

import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.client.test_keyed import Keyed
from tests.fuzz import bulk_port
from tests.scale import sizes


def check(report, process, attacks):
    assert process.poll() is None
    assert report.honest == attacks // bulk_port.EVERY + 1
    assert report.grown_bytes < bulk_port.GROWN_MAX
    assert report.answers["InternalError"] == 0
    assert sum(report.answers.values()) > attacks // 50


@pytest.mark.slow
@pytest.mark.parametrize("attacks", sizes(100, 1000))
def test_attacks_over_plain_streams(tmp_path, attacks):
    with (
        served(tmp_path / "run", "256MiB") as server,
        tq.connect(server.tcp, data="remote") as honest,
        tq.connect(server.tcp, data="remote") as hostile,
    ):
        report = bulk_port.run(honest, hostile, server.process.pid, attacks=attacks, seed=5)
        check(report, server.process, attacks)


@pytest.mark.slow
@pytest.mark.parametrize("attacks", sizes(100, 1000))
def test_attacks_over_encrypted_connections(tmp_path, attacks):
    server = Keyed(tmp_path)
    token = server.token("admin")
    try:
        with tq.connect(token, data="remote") as honest, tq.connect(token, data="remote") as hostile:
            report = bulk_port.run(honest, hostile, server.process.pid, attacks=attacks, seed=6)
            check(report, server.process, attacks)
    finally:
        server.stop()
