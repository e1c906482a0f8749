"""Attacks on the bulk port of a server that runs, over either carrier. `make fuzz` makes thousands."""

import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.client.test_keyed import Keyed
from tests.fuzz import bulk_port

ATTACKS = 300


def check(report, process):
    assert process.poll() is None
    assert report.honest == ATTACKS // bulk_port.EVERY + 1
    assert report.grown_bytes < bulk_port.GROWN_MAX
    assert report.answers["InternalError"] == 0
    assert sum(report.answers.values()) > ATTACKS // 50


@pytest.mark.slow
def test_attacks_over_plain_streams(tmp_path):
    with (
        served(tmp_path / "run", "256MiB") as server,
        tq.connect(server.tcp, data="remote") as honest,
        tq.connect(server.tcp, data="remote") as hostile,
    ):
        report = bulk_port.run(honest, hostile, server.process.pid, attacks=ATTACKS, seed=5)
        check(report, server.process)


@pytest.mark.slow
def test_attacks_over_encrypted_connections(tmp_path):
    server = Keyed(tmp_path)
    token = server.token("admin")
    try:
        with tq.connect(token, data="remote") as honest, tq.connect(token, data="remote") as hostile:
            report = bulk_port.run(honest, hostile, server.process.pid, attacks=ATTACKS, seed=6)
            check(report, server.process)
    finally:
        server.stop()
