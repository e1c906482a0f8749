"""Several shards, each a process: rows lie in all of them, are read from all at once, and outlive what they can
outlive."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.client.test_restart import Supervised
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards, shards
from tests.scale import only_long
from transferqueue.limits import MIB, SMALL_EXTENT_BYTES
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import TableAudit

pytestmark = pytest.mark.slow

WIDTH = SMALL_EXTENT_BYTES // 64
"""Values of a row: eight rows are a put that has an extent to itself."""
ROWS = 8


def values(number: int, rows: int = ROWS) -> list[np.ndarray]:
    return [np.full(WIDTH + row % 3, 1000 * number + row, np.int64) for row in range(rows)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, "64MiB") as found:
        yield found


def make(queue: tq.Queue, **terms: object) -> tq.Table:
    return queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], **terms)


def put_into_all(queue: tq.Queue, table: tq.Table, puts: int = 6) -> None:
    for number in range(puts):
        table.put(x=values(number), ordinal=np.arange(ROWS) + ROWS * number)
    assert all(one.used_bytes for one in shards(queue))


def check_all(batch: tq.Batch) -> None:
    for ordinal, row in zip(batch.ordinal.tolist(), batch["x"], strict=True):
        number, at = divmod(ordinal, ROWS)
        assert len(row) == WIDTH + at % 3
        assert (row == 1000 * number + at).all()


def balanced(queue: tq.Queue) -> TableAudit:
    found = queue.audit().tables["t"]
    assert found.rows_put == found.rows_live + found.rows_done + found.rows_dropped, found
    return found


@pytest.mark.parametrize("data", [*only_long("auto"), "remote"])
def test_a_lease_spans_shards_mapped_or_over_the_network(server: Served, data: str) -> None:
    with (
        ShardProcess(server.tcp),
        ShardProcess(server.tcp),
        tq.connect(server.tcp, data=data) as queue,
    ):
        await_shards(queue, 2)
        table = make(queue)
        put_into_all(queue, table)
        with table.lease("train", rows=6 * ROWS, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
            half = batch["x"][::2].list()
            assert [row[0] for row in half] == [row[0] for row in batch["x"].list()[::2]]
        assert balanced(queue).rows_done == 6 * ROWS


def test_what_one_writes_over_the_network_another_maps(server: Served) -> None:
    with (
        ShardProcess(server.tcp),
        tq.connect(server.tcp, data="remote") as far,
        tq.connect(server.ipc) as near,
    ):
        await_shards(near, 1)
        make(far)
        put_into_all(near, far.table("t"))
        with near.table("t").lease("train", rows=6 * ROWS, timeout_s=PATIENCE_S) as batch:
            check_all(batch)


def test_memory_comes_back_from_a_shard_in_either_way(server: Served) -> None:
    with (
        ShardProcess(server.tcp),
        tq.connect(server.tcp, data="remote") as far,
        tq.connect(server.ipc) as near,
    ):
        await_shards(near, 1)
        make(far)
        for turn in range(12):
            (near if turn % 2 else far).table("t").put(x=values(turn), ordinal=np.arange(ROWS) + ROWS * turn)
            with (far if turn % 3 else near).table("t").lease("train", rows=ROWS, timeout_s=PATIENCE_S) as batch:
                check_all(batch)
            del batch
        deadline = time.monotonic() + PATIENCE_S
        while shards(near)[0].used_bytes > 2 * MIB:
            assert time.monotonic() < deadline
        assert shards(near)[0].backed_bytes <= 64 * MIB
        assert shards(near)[0].bulk_sent_bytes["stream"] > 0, (
            "as of the poll that confirmed that nothing is read there any more"
        )


def test_a_shard_is_killed_and_work_goes_on(server: Served) -> None:
    with (
        ShardProcess(server.tcp) as first,
        ShardProcess(server.tcp),
        tq.connect(server.ipc) as queue,
    ):
        await_shards(queue, 2)
        table = make(queue)
        put_into_all(queue, table)
        first.kill()
        await_shards(queue, 1)
        found = balanced(queue)
        assert 0 < found.rows_lost == found.rows_dropped < 6 * ROWS
        table.put(x=values(6), ordinal=np.arange(ROWS) + ROWS * 6)
        left = 7 * ROWS - found.rows_lost
        with table.lease("train", rows=left, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
        assert balanced(queue).rows_done == left


def test_small_puts_of_a_producer_go_elsewhere_when_their_shard_is_gone(server: Served) -> None:
    with ShardProcess(server.tcp) as first, tq.connect(server.ipc) as queue:
        await_shards(queue, 1)
        table = make(queue)
        table.put(x=[np.arange(3)])
        assert shards(queue)[0].used_bytes
        first.kill()
        await_shards(queue, 0)
        table.put(x=[np.arange(4)])
        assert sorted(queue._client.memory._paths) == [0], "memory that nobody owns is not held"  # type: ignore[union-attr]
        with table.lease("train", rows=1, timeout_s=PATIENCE_S) as batch:
            assert batch["x"].list()[0] == [0, 1, 2, 3]
        assert (balanced(queue).rows_lost, balanced(queue).rows_done) == (1, 1)


def test_who_reads_over_the_network_gets_other_rows_when_a_shard_is_killed(server: Served) -> None:
    with (
        ShardProcess(server.tcp) as first,
        tq.connect(server.tcp, data="remote") as far,
    ):
        await_shards(far, 1)
        table = make(far)
        put_into_all(far, table, 2)
        first.process.send_signal(signal.SIGKILL)
        table.put(x=values(2), ordinal=np.arange(ROWS) + 2 * ROWS, timeout_s=PATIENCE_S)
        first.process.wait()
        with table.lease("train", rows=ROWS, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
        balanced(far)


def test_a_drained_shard_ends_when_its_last_row_is_done(server: Served) -> None:
    with ShardProcess(server.tcp) as shard, tq.connect(server.ipc) as queue:
        (joined,) = await_shards(queue, 1)
        table = make(queue)
        put_into_all(queue, table, 2)
        queue.drain_shard(joined.shard)
        table.put(x=values(2), ordinal=np.arange(ROWS) + 2 * ROWS)
        assert shards(queue)[0].drains
        with table.lease("train", rows=3 * ROWS, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
        del batch
        assert shard.ended() == 0
        assert shards(queue) == []
        assert balanced(queue).rows_done == 3 * ROWS
        with pytest.raises(tq.errors.NotFound, match="shard 1 has not joined"):
            queue.drain_shard(1)


def test_a_shard_that_is_told_to_stop_ends_in_order_and_leaves_no_file(server: Served) -> None:
    with ShardProcess(server.tcp) as shard, tq.connect(server.ipc) as queue:
        await_shards(queue, 1)
        (at,) = queue._client.connection.call(m.ListShards()).shards  # type: ignore[union-attr]
        assert Path(at.path).exists()
        put_into_all(queue, make(queue), 1)
        shard.process.terminate()
        assert shard.ended() == 0
        assert not Path(at.path).exists()
        assert (shards(queue), balanced(queue).rows_lost) == ([], ROWS)


def test_a_shard_goes_on_with_the_next_life_of_its_coordinator(tmp_path: Path) -> None:
    with (
        Supervised(tmp_path, "process") as server,
        ShardProcess(server.address) as shard,
        tq.connect(server.address) as queue,
    ):
        await_shards(queue, 1)
        table = make(queue)
        put_into_all(queue, table)
        server.kill()
        table.put(x=values(6), ordinal=np.arange(ROWS) + 6 * ROWS, timeout_s=PATIENCE_S)
        await_shards(queue, 1)
        with table.lease("train", rows=7 * ROWS, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
        del batch
        found = balanced(queue)
        assert (found.rows_done, found.rows_lost) == (7 * ROWS, 0)
        queue.drain_shard(1)
        assert shard.ended() == 0


@pytest.mark.long
def test_a_shard_that_died_while_no_coordinator_ran_is_lost(tmp_path: Path) -> None:
    with Supervised(tmp_path, "process", supervise=False) as server, ExitStack() as stack:
        shard = stack.enter_context(ShardProcess(server.address))
        with tq.connect(server.address) as queue:
            await_shards(queue, 1)
            put_into_all(queue, make(queue))
            server.process.kill()
            server.process.communicate()
            shard.kill()
            server.start()
            assert shards(queue) == []
            assert balanced(queue).rows_lost > 0


@pytest.mark.parametrize("data", ["auto", *only_long("remote")])
def test_columns_of_one_row_may_lie_in_several_shards_and_rows_of_one_column_too(server: Served, data: str) -> None:
    with (
        ShardProcess(server.tcp),
        ShardProcess(server.tcp),
        tq.connect(server.tcp, data=data) as queue,
    ):
        await_shards(queue, 2)
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"]), tq.Task("b", needs=["x", "y", "z"])])
        for number in range(4):
            table.put(x=values(number), ordinal=np.arange(ROWS) + ROWS * number)
        for _ in range(2):
            with table.lease("a", rows=2 * ROWS, timeout_s=PATIENCE_S) as batch:
                batch.ack(y=[row * 2 for row in batch["x"]], z=np.full((2 * ROWS, WIDTH), 7))
        del batch
        with table.lease("b", rows=4 * ROWS, timeout_s=PATIENCE_S) as batch:
            check_all(batch)
            for x, y in zip(batch["x"], batch["y"], strict=True):
                np.testing.assert_array_equal(y, 2 * x)
            assert (batch["z"].numpy() == 7).all()
        assert balanced(queue).rows_done == 4 * ROWS


@pytest.mark.parametrize("elements", [*only_long(9), 1 << 18])
def test_weights_outlive_every_further_shard(server: Served, elements: int) -> None:
    with ShardProcess(server.tcp) as shard, tq.connect(server.ipc) as trainer:
        await_shards(trainer, 1)
        make(trainer).put(x=[np.arange(3)])
        weights = trainer.weights("policy")
        for version in (1, 2):
            weights.publish(version, {"w": np.full(elements, version)})
        shard.kill()
        await_shards(trainer, 0)
        with weights.pull() as pulled:
            np.testing.assert_array_equal(np.asarray(pulled["w"]), np.full(elements, 2))


@pytest.mark.parametrize("data", [*only_long("auto"), "remote"])
def test_weights_that_the_coordinator_has_no_room_for_lie_in_further_shards_and_go_with_them(
    server: Served, data: str
) -> None:
    with (
        ShardProcess(server.tcp) as shard,
        tq.connect(server.ipc) as trainer,
        tq.connect(server.tcp, data=data) as generator,
    ):
        await_shards(trainer, 1)
        tensors = {name: np.full((40, MIB // 4), at, np.float32) for at, name in enumerate(["w", "b"])}
        trainer.weights("policy").publish(1, tensors)
        assert shards(trainer)[0].used_bytes >= 80 * MIB
        with generator.weights("policy").pull() as pulled:
            for name, tensor in tensors.items():
                np.testing.assert_array_equal(np.asarray(pulled[name]), tensor)
        shard.kill()
        await_shards(trainer, 0)
        trainer.weights("policy").publish(2, {"w": tensors["w"]})
        with generator.weights("policy").pull(above=1) as pulled:
            np.testing.assert_array_equal(np.asarray(pulled["w"]), tensors["w"])
