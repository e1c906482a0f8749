"""Shard processes with disks: four times their memory goes in and comes out equal, whoever reads it, and whichever of them dies."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.cluster.shards import PATIENCE_S, ShardProcess, shards
from tests.scale import sizes
from transferqueue.cli import main
from transferqueue.cluster.shard import ShardProcess as InProcess
from transferqueue.errors import Disconnected
from transferqueue.server.spill.spill_file import SpillPolicy
from transferqueue.wire import messages as m

pytestmark = pytest.mark.slow

ROWS = 16
ROW_BYTES = 64 * 1024
PUTS = 32
NOISE = np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
"""Equal rows would be stored once."""


def spilling(address: str, directory: Path) -> ShardProcess:
    return ShardProcess(
        address, "--spill-dir", str(directory), "--spill-bytes", "64MiB", "--label", directory.name, arena_bytes="4MiB"
    )


def fill(queue: tq.Queue) -> tq.Table:
    field = tq.Field("body", "uint8", (ROW_BYTES,))
    table = queue.create_table("rows", fields=[field], tasks=[tq.Task("train", needs=["body"])])
    for number in range(PUTS):
        table.put(body=NOISE ^ np.uint8(number), ordinal=np.arange(ROWS) + ROWS * number, timeout_s=PATIENCE_S)
    return table


def drain(table: tq.Table, leases: int, at_least: int | None = None) -> None:
    """So many leases of the rows of a put, compared byte by byte."""
    for _ in range(leases):
        with table.lease("train", rows=ROWS, at_least=at_least, timeout_s=PATIENCE_S) as batch:
            for ordinal, row in zip(batch.ordinal.tolist(), batch["body"].numpy(), strict=True):
                number, at = divmod(ordinal, ROWS)
                assert np.array_equal(row, NOISE[at] ^ np.uint8(number)), ordinal


def test_four_times_the_memory_of_two_shards_comes_out_equal_here_and_elsewhere(tmp_path: Path) -> None:
    with (
        served(tmp_path, "2MiB") as server,
        spilling(server.tcp, tmp_path / "a"),
        spilling(server.tcp, tmp_path / "b"),
        tq.connect(server.ipc) as queue,
    ):
        assert len(shards(queue)) == 2
        table = fill(queue)
        found = shards(queue)
        on_disk = [one["spill"]["bytes"] for one in found]
        assert sum(on_disk) >= (PUTS - 2 * 3 - 2) << 20
        assert all(on_disk)
        drain(table, PUTS // 2)
        with tq.connect(server.tcp, data="remote") as elsewhere:
            drain(elsewhere.table("rows"), PUTS // 2)
        assert table.audit()["rows_done"] == PUTS * ROWS
        for one in shards(queue):
            spill = one["spill"]
            assert (spill["blocks"], spill["bytes"], spill["lost_blocks"], spill["paused"]) == (0, 0, 0, "")
            assert 0 < spill["loaded_bytes"] <= spill["spilled_bytes"], (
                "rows may end there, between their lease and its ack"
            )
        assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


def test_a_killed_shard_takes_what_is_on_its_disk_and_the_other_goes_on(tmp_path: Path) -> None:
    with (
        served(tmp_path, "2MiB") as server,
        spilling(server.tcp, tmp_path / "a") as killed,
        spilling(server.tcp, tmp_path / "b"),
        tq.connect(server.ipc) as queue,
    ):
        assert len(shards(queue)) == 2
        table = fill(queue)
        table.seal()
        killed.kill()
        deadline = time.monotonic() + PATIENCE_S
        while len(shards(queue)) > 1:
            assert time.monotonic() < deadline
        lost = table.audit()["dropped"]["lost"]
        assert ROWS * 4 < lost < ROWS * PUTS, "more than its memory had"
        left = table.audit()["rows_live"]
        drain(table, left // ROWS)
        with pytest.raises(tq.EndOfTable):
            table.lease("train", rows=ROWS, timeout_s=PATIENCE_S)
        assert not list((tmp_path / "a").iterdir())


def test_a_snapshot_has_what_is_on_the_disks_of_shards_and_a_drained_one_ends(tmp_path: Path) -> None:
    with (
        served(tmp_path, "4MiB") as server,
        spilling(server.tcp, tmp_path / "a") as shard,
        tq.connect(server.ipc) as queue,
    ):
        table = fill(queue)
        queue.snapshot("kept")
        queue.drain_shard(1)
        drain(table, PUTS)
        assert shard.ended() == 0
    with served(tmp_path, "64MiB") as server, tq.connect(server.ipc) as queue:
        queue.restore("kept")
        drain(queue.table("rows"), PUTS)


def test_a_shard_that_reports_what_nobody_ordered_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It and the coordinator do not agree on what is on its disk."""
    policy = SpillPolicy(tmp_path / "spill", 16 << 20)
    with tq.connect(runtime=tmp_path / "run") as queue:
        shard = InProcess(queue.address, arena_bytes=4 << 20, spill=policy)
        shard._disk._answer(shard._disk._written, m.BlocksWritten(7, [], "no space left"))
        with shard, pytest.raises(Disconnected):
            shard.run()
    assert "the shard ends: job 7 of the disk is reported, and 0 were given so far" in caplog.text


@pytest.mark.parametrize("rounds", sizes(1, 12))
def test_no_row_is_wrong_or_lost_twice_while_shards_are_killed_at_work(tmp_path: Path, rounds: int) -> None:
    """A producer and a worker go on while shards with disks die and new ones join. What is leased is as it was put."""
    with served(tmp_path, "2MiB") as server, ExitStack() as alive, tq.connect(server.ipc) as queue:
        shards_alive = [alive.enter_context(spilling(server.tcp, tmp_path / f"{n}")) for n in range(2)]
        field = tq.Field("body", "uint8", (ROW_BYTES,))
        table = queue.create_table("rows", fields=[field], tasks=[tq.Task("train", needs=["body"])])
        for number in range(rounds):
            for put in range(12):
                try:
                    table.put(body=NOISE ^ np.uint8(put), ordinal=np.arange(ROWS) + ROWS * put, timeout_s=PATIENCE_S)
                except tq.errors.ShardLost:
                    continue
            drain(table, 3)
            shards_alive.pop(0).kill()
            shards_alive.append(alive.enter_context(spilling(server.tcp, tmp_path / f"{number + 2}")))
        table.seal()
        try:
            while True:
                drain(table, 1, at_least=1)
        except tq.EndOfTable:
            pass
        audit = table.audit()
        assert audit["rows_live"] == 0
        assert audit["rows_put"] == audit["rows_done"] + audit["dropped"].get("lost", 0)
        assert queue.stats()["server"]["internal_errors"] == 0


def test_options_that_cannot_be_are_refused_before_a_shard_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(text: str, *options: str) -> None:
        assert main(["shard", "--join", queue.address, "--arena-bytes", "4MiB", *options]) == 2
        assert text in " ".join(capsys.readouterr().err.split())

    directory = ["--spill-dir", str(tmp_path / "spill")]
    with tq.connect(runtime=tmp_path / "run") as queue:
        refused("give both --spill-dir and --spill-bytes", *directory)
        refused("give both --spill-dir and --spill-bytes", "--spill-bytes", "64MiB")
        refused("is below 16,777,216", *directory, "--spill-bytes", "1MiB")
        refused("bytes that are free in", *directory, "--spill-bytes", str(1 << 59))
        refused(
            "what lies in another store", *directory, "--spill-bytes", "64MiB", "--store", f"file://{tmp_path}/store"
        )
        assert shards(queue) == []
