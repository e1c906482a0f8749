"""A server under garbage: it goes on, its state stands still, its memory too."""

import random

import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.client.test_keyed import Keyed
from tests.fuzz import live
from tests.fuzz.__main__ import GROWN_MAX, fuzz_server
from tests.fuzz.memory import resident_bytes
from tests.scale import sizes


@pytest.mark.slow
@pytest.mark.parametrize("frames", sizes(2_400, 24_000))
def test_garbage_changes_nothing(tmp_path, frames):
    with served(tmp_path / "run") as server, tq.connect(server.ipc) as queue:
        found = fuzz_server(queue, server, frames=frames, connections=frames // 12, seed=7)
        assert found.before == found.after
        assert found.grown_bytes < GROWN_MAX
        assert server.process.poll() is None


@pytest.mark.slow
def test_garbage_at_a_server_with_keys_changes_nothing(tmp_path):
    server = Keyed(tmp_path)
    try:
        with server.connect("admin") as queue:
            noise = random.Random(11)
            live.below(server.tcp, noise, 100)
            before, resident = live.state(queue), resident_bytes(server.process.pid)
            live.below(server.tcp, noise, 1000)
            assert live.state(queue) == before
            assert resident_bytes(server.process.pid) - resident < GROWN_MAX
    finally:
        server.stop()
