"""A shard on a Mooncake Store: a real master, and a real process that has the store's memory, over TCP of this machine.

`make test-mooncake` sets up what this needs. Elsewhere it is skipped.
"""

from __future__ import annotations

import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.cluster.shards import ShardProcess, await_shards, shards
from tests.cluster.stored import ROWS, Backed, RowsInAStore, values
from transferqueue.adapters.stores.mooncake import MooncakeStore
from transferqueue.errors import NotFound, OutOfMemory, PeerError, Unreachable
from transferqueue.limits import MIB
from transferqueue.testing.conformance.backings import BACKING_CHECKS, content
from transferqueue.testing.conformance.report import Verdict, judge
from transferqueue.testing.conformance.stores import STORE_CHECKS

try:
    from mooncake import store as _store
except ImportError as error:
    pytest.skip(f"Mooncake does not load here: {error}", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
PACKAGE = Path(_store.__file__).parent


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class Mooncake:
    """A master, and a process with memory of the store. `address`: of the store."""

    def __init__(self, directory: Path, segment: str = "256 MB") -> None:
        port, self._metrics, client = free_ports(3)
        self.master = self._run(
            directory / "master.log",
            *("mooncake_master", f"--rpc_port={port}", "--rpc_address=127.0.0.1"),
            *(f"--metrics_port={self._metrics}", "--metrics_host=127.0.0.1"),
        )
        self._await_port(port)
        self._await_port(self._metrics)
        self.memory = self._run(
            directory / "memory.log",
            *("mooncake_client", "--host=127.0.0.1", f"--port={client}", "--metadata_server=P2PHANDSHAKE"),
            *(f"--master_server_address=127.0.0.1:{port}", f"--global_segment_size={segment}"),
        )
        self._await_port(client)
        assert self._metric("master_total_capacity_bytes") >= 200 * MIB
        self.address = f"mooncake://127.0.0.1:{port}"

    def _run(self, log: Path, program: str, *options: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen([PACKAGE / program, *options], stdout=file, stderr=subprocess.STDOUT)

    def _await_port(self, port: int) -> None:
        """Until somebody listens there."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE_S):
                return
            assert time.monotonic() < deadline
            assert self.master.poll() is None

    def _metric(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=PATIENCE_S) as answer:
            found = re.search(rf"^{name} (\d+)", answer.read().decode(), re.MULTILINE)
        assert found
        return int(found[1])

    # as `StoreSubject`

    def open(self) -> MooncakeStore:
        return MooncakeStore(self.address)

    def used_bytes(self) -> int:
        """By what the master says."""
        return self._metric("master_allocated_bytes")

    def fill(self) -> None:
        store = self.open()
        with suppress(OutOfMemory):
            for number in range(1000):
                store.put(f"ballast-{number}", content(MIB).data)
        store.close()

    def end(self) -> None:
        """The memory, and then the master."""
        self.memory.kill()
        self.memory.wait()
        self.master.kill()
        self.master.wait()

    def empty(self) -> None:
        store = self.open()
        store.sweep("")
        store.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """One for all tests that leave it was."""
    mooncake = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield mooncake
    mooncake.end()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Mooncake]:
    """One for a test that ends or fills it."""
    mooncake = Mooncake(tmp_path)
    yield mooncake
    mooncake.end()


def passes(check: Any, subject: Any) -> None:
    outcome = judge(check, subject)
    assert outcome.verdict is Verdict.PASSED, outcome.text


@pytest.mark.parametrize("check", STORE_CHECKS[:-2], ids=lambda check: check.__name__)
def test_it_is_a_store(shared: Mooncake, check: Any) -> None:
    passes(check, shared)


@pytest.mark.parametrize("check", STORE_CHECKS[-2:], ids=lambda check: check.__name__)
def test_it_is_a_store_when_it_is_full_and_when_it_ends(alone: Mooncake, check: Any) -> None:
    passes(check, alone)


@pytest.mark.parametrize("check", BACKING_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("sizes", [{}, {"object_bytes": MIB, "kept_bytes": 0}], ids=str)
def test_its_objects_are_a_backing(shared: Mooncake, sizes: dict[str, int], check: Any) -> None:
    passes(check, Backed(shared.open, shared.used_bytes, shared.empty, **sizes))
    assert shared.used_bytes() == 0


def test_a_shard_may_bring_the_memory_of_the_store(alone: Mooncake) -> None:
    before = alone._metric("master_total_capacity_bytes")
    store = MooncakeStore(f"{alone.address}?segment=64MiB")
    assert alone._metric("master_total_capacity_bytes") == before + 64 * MIB
    store.close()
    assert alone._metric("master_total_capacity_bytes") == before


def test_memory_that_does_not_answer_is_told_and_nobody_waits_for_ever(alone: Mooncake) -> None:
    store = alone.open()
    store.put("k", content(MIB).data)
    alone.memory.kill()
    alone.memory.wait()
    with pytest.raises(PeerError):
        store.get([("k", memoryview(bytearray(MIB)))])
    store.close()


def test_a_store_whose_master_is_not_there_cannot_be_joined() -> None:
    (port,) = free_ports(1)
    with pytest.raises(Unreachable, match=r"nothing answers at 127.0.0.1:.*start mooncake_master there"):
        MooncakeStore(f"mooncake://127.0.0.1:{port}")


def test_rows_whose_host_died_are_lost_and_counted_once_the_store_has_given_it_up(
    alone: Mooncake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nobody is given other rows for them, and nothing is lost: the host may only be slow."""
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path / "runtime"))
    with (
        served(tmp_path, "64MiB") as server,
        ShardProcess(server.tcp, "--store", alone.address) as shard,
        tq.connect(server.tcp, data="remote") as queue,
    ):
        await_shards(queue, 1)
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"], retry=tq.Retry(attempts=1000))])
        rows = table.put(x=values(0))
        alone.memory.kill()
        alone.memory.wait()
        with pytest.raises(Unreachable, match=r"the store mooncake://.* does not answer"):
            table.read(rows)
        assert queue.audit().tables["t"].rows_live == ROWS
        deadline = time.monotonic() + PATIENCE_S
        while shards(queue) != []:
            assert time.monotonic() < deadline
            with suppress(PeerError, NotFound):  # not found: they are lost by now
                table.read(rows)
        assert shard.ended() != 0
        audit = queue.audit().tables["t"]
        assert (audit.rows_lost, audit.rows_live) == (ROWS, 0)


class TestRowsInMooncake(RowsInAStore):
    @pytest.fixture
    def store(self, shared: Mooncake) -> Iterator[str]:
        self.mooncake = shared
        yield shared.address
        shared.empty()

    def used_bytes(self, store: str) -> int:
        return self.mooncake.used_bytes()

    def lose(self, store: str) -> None:
        self.mooncake.empty()
