"""Shards beside a server at level disk: rows with replicas have one copy on its disk, and one where it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

import transferqueue as tq
from tests.client.test_restart import Supervised
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards, shards
from tests.cluster.test_healing import await_copies, put
from tests.cluster.test_shards import ROWS, balanced, check_all, make

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_rows_outlive_every_shard_and_the_server_and_are_copied_again(tmp_path: Path) -> None:
    with Supervised(tmp_path, "disk", supervise=False) as server:
        with (
            ShardProcess(server.address) as one,
            ShardProcess(server.address) as two,
            tq.connect(server.address) as queue,
        ):
            await_shards(queue, 2)
            table = make(queue, replicas=2)
            alone = queue.create_table("alone", tasks=[tq.Task("train", needs=["x"])])
            for number in range(6):
                put(table, number)
                put(alone, number)
            assert all(shard.used_bytes for shard in shards(queue))
            one.kill()
            await_shards(queue, 1)
            await_copies(queue)
            assert queue.audit().tables["alone"].rows_lost == 0
            server.process.kill()
            server.process.communicate()
            two.kill()
            server.start()
            assert balanced(queue).rows_live == 6 * ROWS
            assert queue.stats().tables["t"].rows_one_copy == 6 * ROWS
        with ShardProcess(server.address), tq.connect(server.address) as queue:
            await_shards(queue, 1)
            await_copies(queue)
            for name in ("t", "alone"):
                with queue.table(name).lease("train", rows=6 * ROWS, timeout_s=PATIENCE_S) as batch:
                    check_all(batch)
                del batch
            assert balanced(queue).rows_lost == 0
