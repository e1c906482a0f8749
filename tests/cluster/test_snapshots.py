"""Snapshots of rows that lie in shard processes: restored elsewhere all is the same, and a shard that dies or stops
meanwhile ends nothing but what only it had."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.client.test_restart import Supervised
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards, shards
from tests.cluster.test_shards import ROWS, make, put_into_all, values
from tests.scale import only_long
from transferqueue.errors import ShardLost, TransferQueueError
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE
from transferqueue.wire.answers.stats import TableStats

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, "64MiB") as found:
        yield found


def same(before: tq.Queue, after: tq.Queue, name: str = "t", fields: tuple[str, ...] = ("x",)) -> None:
    """Both queues have the same rows in this table: ids, facts, values, state in each task."""
    old, new = before.table(name), after.table(name)
    with old.read() as wanted, new.read() as rows:
        assert rows.rows.tolist() == wanted.rows.tolist()
        assert (rows.keys, rows.tags) == (wanted.keys, wanted.tags)
        assert rows.ordinal.tolist() == wanted.ordinal.tolist()
        for field in fields:
            assert rows[field].arrow() == wanted[field].arrow(), field
    assert counts(new.stats()) == counts(old.stats())


def counts(stats: TableStats) -> dict[str, Any]:
    """What a snapshot keeps of the statistics of a table."""
    tasks = {
        name: {count: getattr(task, count) for count in ("pending", "held", "ready", "leased", "done", "dropped")}
        for name, task in stats.tasks.items()
    }
    return {count: getattr(stats, count) for count in ("rows_put", "rows_live", "rows_done", "rows_dropped")} | tasks


class Snapshot:
    """A snapshot in a thread of its own."""

    def __init__(self, address: str, path: str) -> None:
        self.error: TransferQueueError | None = None
        self._thread = threading.Thread(target=self._take, args=(address, path))
        self._thread.start()

    def _take(self, address: str, path: str) -> None:
        with tq.connect(address) as queue:
            try:
                queue.snapshot(path, timeout_s=PATIENCE_S)
            except TransferQueueError as error:
                self.error = error

    def ended(self) -> TransferQueueError | None:
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive()
        return self.error


def await_fetch(queue: tq.Queue, used: int) -> None:
    """Wait until a shard has an order: then the coordinator's own memory has more than before."""
    deadline = time.monotonic() + PATIENCE_S
    while own_bytes(queue) <= used:
        assert time.monotonic() < deadline


def own_bytes(queue: tq.Queue) -> int:
    return int(queue.stats().server.used_bytes)


@pytest.mark.parametrize("way", only_long("tcp", "ipc"))
def test_rows_in_shards_are_restored_elsewhere(server: Served, tmp_path: Path, way: str) -> None:
    address = getattr(server, way)
    with ShardProcess(address), ShardProcess(address), tq.connect(server.ipc) as queue:
        await_shards(queue, 2)
        table = make(queue)
        put_into_all(queue, table)
        with table.lease("train", rows=ROWS, timeout_s=PATIENCE_S):
            pass
        used = own_bytes(queue)
        queue.snapshot("s", timeout_s=PATIENCE_S)
        assert own_bytes(queue) == used
        (tmp_path / "other").mkdir(mode=0o700)
        with served(tmp_path / "other", "256MiB") as other, tq.connect(other.ipc) as again:
            (tmp_path / "snapshots").rename(tmp_path / "other/snapshots")
            again.restore("s")
            same(queue, again)


def test_a_shard_that_dies_meanwhile_ends_the_snapshot_and_nothing_else(server: Served) -> None:
    with ShardProcess(server.tcp) as one, ShardProcess(server.tcp), tq.connect(server.ipc) as queue:
        await_shards(queue, 2)
        table = make(queue)
        put_into_all(queue, table)
        used = own_bytes(queue)
        one.process.send_signal(signal.SIGSTOP)
        taken = Snapshot(server.ipc, "s")
        await_fetch(queue, used)
        one.kill()
        error = taken.ended()
        assert isinstance(error, ShardLost), error
        assert "is gone, and had the only copy of block" in str(error)
        await_shards(queue, 1)
        queue.snapshot("s", timeout_s=PATIENCE_S)
        assert own_bytes(queue) == used


@pytest.mark.long
def test_rows_of_a_store_are_in_a_snapshot(server: Served, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    with (
        tq.connect(server.tcp, data="remote") as queue,
        ShardProcess(server.tcp, "--store", f"file://{tmp_path / 'store'}"),
    ):
        await_shards(queue, 1)
        put_into_all(queue, make(queue))
        queue.snapshot("s", timeout_s=PATIENCE_S)
        (tmp_path / "other").mkdir(mode=0o700)
        with served(tmp_path / "other", "256MiB") as other, tq.connect(other.ipc) as again:
            (tmp_path / "snapshots").rename(tmp_path / "other/snapshots")
            again.restore("s")
            same(queue, again)


@pytest.mark.long
def test_with_replicas_a_snapshot_outlives_a_shard(server: Served, tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, *_ = [stack.enter_context(ShardProcess(server.tcp)) for _ in range(3)]
        queue = stack.enter_context(tq.connect(server.ipc))
        await_shards(queue, 3)
        table = make(queue, replicas=2)
        put_into_all(queue, table, 8)
        used = own_bytes(queue)
        one.process.send_signal(signal.SIGSTOP)
        taken = Snapshot(server.ipc, "s")
        await_fetch(queue, used)
        one.kill()
        assert taken.ended() is None
        (tmp_path / "other").mkdir(mode=0o700)
        with served(tmp_path / "other", "256MiB") as other:
            (tmp_path / "snapshots").rename(tmp_path / "other/snapshots")
            with ShardProcess(other.tcp), tq.connect(other.ipc) as again:
                await_shards(again, 1)
                again.restore("s")
                with again.table("t").read(fields=["x"]) as rows:
                    assert [row[0] for row in rows["x"]] == [row[0] for number in range(8) for row in values(number)]
                deadline = time.monotonic() + PATIENCE_S
                while again.stats().tables["t"].rows_one_copy:
                    assert time.monotonic() < deadline


@pytest.mark.long
def test_shards_and_snapshots_outlive_a_kill_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, str(tmp_path / "snapshots"))
    with (
        Supervised(tmp_path, "process") as server,
        ShardProcess(server.address) as shard,
        tq.connect(server.address) as queue,
    ):
        await_shards(queue, 1)
        table = make(queue)
        put_into_all(queue, table)
        used = own_bytes(queue)
        shard.process.send_signal(signal.SIGSTOP)
        taken = Snapshot(server.address, "s")
        await_fetch(queue, used)
        server.kill()
        assert taken.ended() is not None
        shard.process.send_signal(signal.SIGCONT)
        await_shards(queue, 1)
        made = Path(queue.snapshot("s", timeout_s=PATIENCE_S)[0])
        assert [path.name for path in made.parent.iterdir()] == ["000001"]
        deadline = time.monotonic() + PATIENCE_S
        while own_bytes(queue) > used:
            assert time.monotonic() < deadline
        assert np.array_equal(table.read(fields=["x"])["x"].list()[0], values(0)[0])
        assert shards(queue)
