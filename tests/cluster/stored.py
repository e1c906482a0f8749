"""Shards whose bytes lie in a store: subjects for the conformance kits, and what holds for the rows whatever the store
is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards, shards
from tests.scale import only_long
from transferqueue.limits import MIB, SMALL_EXTENT_BYTES
from transferqueue.storage.memory.backing import Backing
from transferqueue.storage.memory.object_store import ObjectBacking, ObjectStore

ROWS = 8
WIDTH = SMALL_EXTENT_BYTES // 64


def values(number: int) -> list[np.ndarray]:
    """Ragged rows, no two alike, that have an extent to themselves."""
    return [np.arange(WIDTH + row % 3, dtype=np.int64) + 10**6 * (ROWS * number + row) for row in range(ROWS)]


class Backed:
    """`ObjectBacking` over a store as a subject of the kit of backings. lose: makes everything in the store go away."""

    def __init__(
        self, open_store: Callable[[], ObjectStore], used: Callable[[], int], lose: Callable[[], None], **sizes: int
    ) -> None:
        self._open, self._used, self._lose, self._sizes = open_store, used, lose, sizes

    @contextmanager
    def open(self) -> Iterator[Backing]:
        with ExitStack() as made:
            store = self._open()
            made.callback(store.close)
            objects = ObjectBacking(store, "tq-check-", 64 * MIB, **self._sizes)
            made.callback(objects.close)
            yield objects

    def used_bytes(self, backing: Backing) -> int:
        return self._used()

    def lose(self, backing: Backing) -> None:
        self._lose()


class RowsInAStore:
    """What holds of rows that lie in a store. Subclasses say where that is."""

    @pytest.fixture(autouse=True)
    def runtime(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path / "runtime"))

    @pytest.fixture
    def store(self) -> str:
        """Its address."""
        raise NotImplementedError

    def used_bytes(self, store: str) -> int:
        """What the store says that it holds."""
        raise NotImplementedError

    def lose(self, store: str) -> None:
        """Make what is in it go away."""
        raise NotImplementedError

    def await_used(self, store: str, most: int) -> None:
        """Until it holds no more than so much."""
        deadline = time.monotonic() + PATIENCE_S
        while (used := self.used_bytes(store)) > most:
            assert time.monotonic() < deadline, used

    @pytest.mark.parametrize("data", ["auto", *only_long("remote")])
    def test_rows_come_back_to_the_byte_and_leave_nothing(self, tmp_path: Path, store: str, data: str) -> None:
        with (
            served(tmp_path, "64MiB") as server,
            ShardProcess(server.tcp, "--store", store) as shard,
            tq.connect(server.tcp, data=data) as queue,
        ):
            await_shards(queue, 1)
            table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"]), tq.Task("b", needs=["x", "y"])])
            for number in range(6):
                table.put(x=values(number), ordinal=np.arange(ROWS) + ROWS * number)
            (found,) = shards(queue)
            assert found.used_bytes >= 2 * ROWS * WIDTH * 8
            assert self.used_bytes(store) >= 2 * ROWS * WIDTH * 8, "about half of the rows, in the store"
            for _ in range(3):
                with table.lease("a", rows=2 * ROWS, timeout_s=PATIENCE_S) as batch:
                    assert all(isinstance(row, np.ndarray) for row in batch["x"])
                    batch.ack(y=[2 * row for row in batch["x"]])
            with table.lease("b", rows=6 * ROWS, timeout_s=PATIENCE_S) as batch:
                for n, x, y in zip(batch.ordinal.tolist(), batch["x"], batch["y"], strict=True):
                    np.testing.assert_array_equal(x, values(n // ROWS)[n % ROWS])
                    np.testing.assert_array_equal(y, 2 * x)
                half = batch["x"][::-3].list()
                assert [row[0] for row in half] == [10**6 * n for n in batch.ordinal.tolist()[::-3]]
            del batch
            audit = queue.audit().tables["t"]
            assert (audit.rows_done, audit.rows_dropped) == (6 * ROWS, 0)
            self.await_used(store, 0)
            queue.drain_shard(found.shard)
            assert shard.ended() == 0
            assert not list((tmp_path / "runtime").glob("*.store.lock"))

    def test_rows_that_are_dropped_free_the_store_and_so_does_a_shard_that_is_stopped(
        self, tmp_path: Path, store: str
    ) -> None:
        with (
            served(tmp_path, "64MiB") as server,
            ShardProcess(server.tcp, "--store", store) as shard,
            tq.connect(server.tcp) as queue,
        ):
            await_shards(queue, 1)
            table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
            rows = [table.put(x=values(number)) for number in range(6)]
            assert self.used_bytes(store) >= 2 * ROWS * WIDTH * 8
            for some in rows:
                table.drop(some, reason="test")
            self.await_used(store, 0)
            table.put(x=values(6))
            table.put(x=values(7))
            assert self.used_bytes(store) >= ROWS * WIDTH * 8
            shard.process.terminate()
            assert shard.ended() == 0
            assert self.used_bytes(store) == 0

    def test_weights_that_the_coordinator_has_no_room_for_lie_in_the_store(self, tmp_path: Path, store: str) -> None:
        with (
            served(tmp_path, "2MiB") as server,
            ShardProcess(server.tcp, "--store", store),
            tq.connect(server.tcp) as trainer,
            tq.connect(server.tcp, data="remote") as generator,
        ):
            await_shards(trainer, 1)
            tensors = {name: np.arange(1 << 20, dtype=np.float32) + at for at, name in enumerate(["w", "b"])}
            for version in (1, 2):
                trainer.weights("policy").publish(version, tensors)
                assert self.used_bytes(store) >= 8 << 20
                with generator.weights("policy").pull() as pulled:
                    for name, tensor in tensors.items():
                        np.testing.assert_array_equal(np.asarray(pulled[name]), tensor)
                tensors["b"] = tensors["b"] + 1

    def test_a_shard_that_is_killed_takes_its_rows_and_the_next_one_what_it_left(
        self, tmp_path: Path, store: str
    ) -> None:
        with (
            served(tmp_path, "64MiB") as server,
            ShardProcess(server.tcp, "--store", store) as first,
            tq.connect(server.tcp) as queue,
        ):
            await_shards(queue, 1)
            table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
            for number in range(6):
                table.put(x=values(number))
            first.kill()
            await_shards(queue, 0)
            audit = queue.audit().tables["t"]
            assert 0 < audit.rows_lost == audit.rows_dropped < 6 * ROWS
            assert self.used_bytes(store) >= ROWS * WIDTH * 8, "nobody removed them"
            with ShardProcess(server.tcp, "--store", store):
                assert self.used_bytes(store) == 0
                await_shards(queue, 1)
                with table.lease("a", rows=6 * ROWS - audit.rows_lost, timeout_s=PATIENCE_S) as batch:
                    assert sum(len(row) > 0 for row in batch["x"]) == len(batch)

    @pytest.mark.parametrize("data", [*only_long("auto"), "remote"])
    def test_rows_that_are_gone_from_the_store_are_lost_and_counted_and_others_come(
        self, tmp_path: Path, store: str, data: str
    ) -> None:
        with (
            served(tmp_path, "64MiB") as server,
            ShardProcess(server.tcp, "--store", store) as shard,
            tq.connect(server.ipc) as near,
            tq.connect(server.tcp, data=data) as queue,
        ):
            await_shards(queue, 1)
            table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
            for number in range(6):
                near.table("t").put(x=values(number), ordinal=np.arange(ROWS) + ROWS * number)
            self.lose(store)
            with table.lease("a", rows=ROWS, timeout_s=PATIENCE_S) as batch:
                for n, x in zip(batch.ordinal.tolist(), batch["x"], strict=True):
                    np.testing.assert_array_equal(x, values(n // ROWS)[n % ROWS])
            while shards(queue) != []:  # one that read none of those rows: ask for all that are left
                with table.lease("a", rows=1, timeout_s=PATIENCE_S) as batch:
                    assert len(batch["x"][0])
            assert shard.ended() != 0
            audit = queue.audit().tables["t"]
            assert 0 < audit.rows_lost == audit.rows_dropped < 6 * ROWS
            assert audit.rows_put == audit.rows_live + audit.rows_done + audit.rows_dropped
