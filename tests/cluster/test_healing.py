"""A shard of a table with replicas is killed while work goes on: its rows are copied again, and outlive the next
death."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards
from tests.cluster.test_shards import balanced, check_all, values
from tests.scale import only_long

pytestmark = pytest.mark.slow
HEAL_S = 60.0
ROWS = 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, "256MiB") as found:
        yield found


def make(queue: tq.Queue, name: str = "t") -> tq.Table:
    return queue.create_table(name, tasks=[tq.Task("train", needs=["x"])], replicas=2)


def put(table: tq.Table, number: int, rows: int = ROWS) -> None:
    table.put(x=values(number, rows), ordinal=np.arange(rows) + rows * number, timeout_s=PATIENCE_S)


def await_copies(queue: tq.Queue) -> None:
    """Wait until no row has only one copy."""
    deadline = time.monotonic() + HEAL_S
    while left := [rows for each in queue.stats().tables.values() if (rows := each.rows_one_copy)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


class Work:
    """A producer and a consumer of a table of their own, until `stop`."""

    def __init__(self, address: str) -> None:
        self.failed: list[BaseException] = []
        self.done = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address,))
        self._thread.start()

    def _run(self, address: str) -> None:
        try:
            with tq.connect(address) as queue:
                table = make(queue, "busy")
                while not self._stopping.is_set():
                    table.put(x=[np.full(4096, self.done)], timeout_s=PATIENCE_S)
                    with table.lease("train", rows=1, timeout_s=PATIENCE_S) as batch:
                        assert batch["x"].list()[0][0] == self.done
                    self.done += 1
        except BaseException as error:
            self.failed.append(error)
            raise

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        assert not self.failed


@pytest.mark.parametrize("way", ["tcp", *only_long("ipc")])
def test_no_row_has_one_copy_left_after_a_death_and_none_is_lost_with_the_next(server: Served, way: str) -> None:
    address = getattr(server, way)
    with (
        ShardProcess(address) as one,
        ShardProcess(address) as two,
        ShardProcess(address),
        tq.connect(server.ipc) as queue,
    ):
        await_shards(queue, 3)
        table = make(queue)
        for number in range(4):
            put(table, number)
        for number in range(4 * ROWS, 5 * ROWS):
            put(table, number, 1)
        rows = 5 * ROWS
        work = Work(server.tcp)
        try:
            for dying, left in ((one, 2), (two, 1)):
                before = work.done
                dying.kill()
                await_shards(queue, left)
                await_copies(queue)
                assert balanced(queue).rows_lost == 0
                deadline = time.monotonic() + PATIENCE_S
                while work.done <= before:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        finally:
            work.stop()
        with table.lease("train", rows=rows, timeout_s=PATIENCE_S) as batch:
            assert len(batch) == rows
            for ordinal, row in zip(batch.ordinal.tolist(), batch["x"], strict=True):
                number, at = divmod(ordinal, ROWS) if ordinal < 4 * ROWS else (ordinal, 0)
                assert (row == 1000 * number + at).all()


@pytest.mark.long
def test_copies_wait_for_a_shard_that_comes_and_are_made_then(server: Served) -> None:
    with tq.connect(server.ipc) as queue:
        with ShardProcess(server.tcp) as one:
            await_shards(queue, 1)
            table = make(queue)
            put(table, 0)
            one.kill()
            await_shards(queue, 0)
        assert queue.stats().tables["t"].rows_one_copy == ROWS
        texts = [finding.text for finding in queue.doctor().tables["t"]]
        assert any("8 rows have one copy left of 2: no shard has room for a copy" in text for text in texts)
        with ShardProcess(server.tcp):
            await_copies(queue)
            with table.lease("train", rows=ROWS, timeout_s=PATIENCE_S) as batch:
                check_all(batch)


@pytest.mark.long
def test_rows_of_a_store_are_copied_to_one_and_from_one(server: Served, tmp_path: Path) -> None:
    stores = [tmp_path / name for name in ("a", "b")]
    for store in stores:
        store.mkdir(mode=0o700)
    with (
        tq.connect(server.tcp, data="remote") as queue,
        ShardProcess(server.tcp, "--store", f"file://{stores[0]}") as first,
        ShardProcess(server.tcp, "--store", f"file://{stores[1]}") as second,
    ):
        await_shards(queue, 2)
        table = make(queue)
        for number in range(3):
            put(table, number)
        first.kill()
        await_shards(queue, 1)
        await_copies(queue)
        second.kill()
        await_shards(queue, 0)
        with table.read(fields=["x"]) as rows:
            assert len(rows) == 3 * ROWS
            check_all(rows)
