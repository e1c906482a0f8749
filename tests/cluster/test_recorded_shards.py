"""Rows in shard processes are recorded too, beside a snapshot; those of a shard that dies lack their values."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards
from tests.cluster.test_shards import ROWS, make, put_into_all, values
from tests.cluster.test_snapshots import Snapshot, own_bytes

pytestmark = pytest.mark.slow
PUTS = 6


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("TRANSFERQUEUE_RECORDS", str(tmp_path / "records"))
    with served(tmp_path, "64MiB") as found:
        yield found


def await_recorded(table: tq.Table, rows: int) -> None:
    deadline = time.monotonic() + 3 * PATIENCE_S
    while (stats := table.stats()).rows_recorded < rows:
        assert time.monotonic() < deadline, stats


def test_rows_in_shards_are_recorded_beside_a_snapshot(server: Served, tmp_path: Path) -> None:
    with ShardProcess(server.tcp), ShardProcess(server.tcp), tq.connect(server.ipc) as queue:
        await_shards(queue, 2)
        table = make(queue, retention=tq.Recorded("run"))
        put_into_all(queue, table, PUTS)
        used = own_bytes(queue)
        with table.lease("train", rows=ROWS, timeout_s=PATIENCE_S) as batch:
            batch.ack(step=3)
        table.checkpointed(3)
        taken = Snapshot(server.ipc, "s")
        table.drop(range(ROWS, PUTS * ROWS), reason="surplus")
        await_recorded(table, PUTS * ROWS)
        assert taken.ended() is None
        assert own_bytes(queue) <= used
    recorded = tq.open_run(tmp_path / "records" / "run").table("t")
    assert recorded.check() == []
    found = recorded.arrow(["_row", "_step", "x"]).sort_by("_row").to_pylist()
    wanted = [value for number in range(PUTS) for value in values(number)]
    assert [row["_step"] for row in found] == [3] * ROWS + [None] * (PUTS - 1) * ROWS
    assert all(np.array_equal(row["x"], value) for row, value in zip(found, wanted, strict=True))


def test_rows_whose_only_copy_is_gone_are_recorded_without_it(server: Served, tmp_path: Path) -> None:
    with ShardProcess(server.tcp) as shard, tq.connect(server.ipc) as queue:
        await_shards(queue, 1)
        table = make(queue, retention=tq.Recorded("run"))
        put_into_all(queue, table, 1)
        shard.process.send_signal(signal.SIGSTOP)
        table.drop(range(ROWS), reason="surplus")
        shard.kill()
        await_recorded(table, ROWS)
    found = tq.open_run(tmp_path / "records" / "run").table("t").arrow(["x", "_reason", "_events"]).to_pylist()
    assert [(row["x"], row["_reason"]) for row in found] == [(None, "surplus")] * ROWS
    assert all("lost with shard" in row["_events"][-1]["what"] for row in found)
