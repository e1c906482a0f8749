"""A table with replicas over shards that are processes: one is killed, and nothing of it is missed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards
from tests.cluster.test_shards import ROWS, balanced, check_all, values
from tests.scale import only_long

pytestmark = pytest.mark.slow
PUTS = 6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, "64MiB") as found:
        yield found


def make(queue: tq.Queue) -> tq.Table:
    return queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], replicas=2)


def fill(table: tq.Table, rows: int = ROWS) -> None:
    for number in range(PUTS):
        ordinal = np.arange(rows) + ROWS * number
        table.put(x=values(number, rows), ordinal=ordinal, timeout_s=PATIENCE_S)


def await_loss(queue: tq.Queue, shard: ShardProcess, left: int) -> None:
    shard.kill()
    await_shards(queue, left)


@pytest.mark.parametrize(("rows", "data"), [(1, "remote"), (ROWS, "auto"), *only_long((1, "auto"), (ROWS, "remote"))])
def test_a_killed_shard_costs_no_row(server: Served, data: str, rows: int) -> None:
    """rows: puts that share extents, and ones that have extents of their own."""
    with ShardProcess(server.tcp) as one, ShardProcess(server.tcp), tq.connect(server.tcp, data=data) as queue:
        await_shards(queue, 2)
        table = make(queue)
        fill(table, rows)
        await_loss(queue, one, 1)
        table.update([0], y=[np.arange(50_000)])
        fill(table, rows)
        with table.lease("train", rows=2 * PUTS * rows, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
        audit = balanced(queue)
        assert (audit.rows_done, audit.rows_lost) == (2 * PUTS * rows, 0)


@pytest.mark.parametrize("data", [*only_long("auto"), "remote"])
def test_who_reads_as_a_shard_is_killed_reads_the_copies(server: Served, data: str) -> None:
    with ShardProcess(server.tcp) as one, ShardProcess(server.tcp), tq.connect(server.tcp, data=data) as queue:
        await_shards(queue, 2)
        table = make(queue)
        fill(table)
        one.kill()
        with table.read(fields=["x"]) as rows:
            assert len(rows) == PUTS * ROWS
            check_all(rows)


def test_who_has_rows_of_it_on_lease_goes_on(server: Served) -> None:
    with ShardProcess(server.tcp) as one, ShardProcess(server.tcp), tq.connect(server.tcp) as queue:
        await_shards(queue, 2)
        table = make(queue)
        fill(table)
        with table.lease("train", rows=PUTS * ROWS, timeout_s=PATIENCE_S) as batch:
            await_loss(queue, one, 1)
            check_all(batch)
        assert balanced(queue).rows_done == PUTS * ROWS


def test_with_too_few_shards_a_table_and_a_put_are_refused(server: Served) -> None:
    with tq.connect(server.tcp) as queue:
        with pytest.raises(tq.Impossible, match=r"replicas=2 shards, and 1 lend memory: 2 > 1"):
            make(queue)
        with ShardProcess(server.tcp) as one:
            await_shards(queue, 1)
            table = make(queue)
            fill(table)
            await_loss(queue, one, 0)
            with pytest.raises(tq.Impossible, match="there are no others"):
                fill(table)
        with table.lease("train", rows=PUTS * ROWS, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
