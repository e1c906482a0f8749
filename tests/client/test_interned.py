"""Values that many puts repeat: stored once, sent by a writer once, and received by a client of another host once."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import Served, served
from tests.client.test_remote import Between
from tests.client.test_restart import Supervised
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards
from tests.scale import only_long
from transferqueue.client.memory import shard_clients
from transferqueue.client.memory.received_contents import ReceivedContents
from transferqueue.limits import CONTENTS_MAX

IMAGE = torch.from_numpy(np.random.default_rng(1).integers(0, 255, (3, 128, 128), np.uint8))
OTHER = torch.from_numpy(np.random.default_rng(2).integers(0, 255, (3, 128, 128), np.uint8))
ROWS = 16
FIELDS = [tq.Field("image", "uint8", (3, 128, 128)), tq.Field("ids", "int64", (None,))]
TASKS = [tq.Task("train", needs=["image", "ids"])]
SLACK = 8 * 1024
"""Everything else of a row, and of the requests."""


def ids(row: int) -> list[np.ndarray[Any, Any]]:
    return [np.arange(20) + row]


def counted(between: Between) -> dict[bool, int]:
    """Bytes that pass between clients and the shard from now on, by whether they go up."""
    passed = {True: 0, False: 0}

    def count(_passed: int, data: bytes, up: bool) -> bytes:
        passed[up] += len(data)
        return data

    between.bulk.meddle = count
    return passed


def test_a_group_that_is_put_row_by_row_crosses_and_is_stored_once(server: Served, name: str) -> None:
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        table = queue.create_table(name, fields=FIELDS, tasks=TASKS)
        passed = counted(between)
        for row in range(ROWS):
            table.put(image=tq.Repeat([IMAGE.clone()]), ids=ids(row))
        assert table.stats().bytes < IMAGE.nbytes + ROWS * SLACK
        assert IMAGE.nbytes < passed[True] < IMAGE.nbytes + ROWS * 1024
        for row in range(ROWS):
            with table.lease("train", rows=1) as batch:
                (image,) = batch["image"].torch()
                assert torch.equal(image, IMAGE)
                assert batch["ids"].list() == [ids(row)[0].tolist()]
                image += 1  # a reader's rows are its own
        assert IMAGE.nbytes < passed[False] < IMAGE.nbytes + ROWS * 1024
        assert table.stats().bytes == 0


@pytest.mark.parametrize("image", [tq.Repeat([IMAGE], ROWS), tq.Repeat([IMAGE.clone() for _ in range(ROWS)])])
def test_a_group_that_is_put_together_crosses_and_is_stored_once(server: Served, name: str, image: tq.Repeat) -> None:
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        table = queue.create_table(name, fields=FIELDS, tasks=TASKS)
        passed = counted(between)
        table.put(image=image, ids=[ids(row)[0] for row in range(ROWS)])
        assert table.stats().bytes < IMAGE.nbytes + SLACK
        with table.lease("train", rows=ROWS) as batch:
            images = batch["image"].torch()
            assert torch.equal(images, torch.stack([IMAGE] * ROWS))
            images[0] += 1  # rows of a batch are the reader's own, each for itself
            assert torch.equal(images[1], IMAGE)
        assert all(IMAGE.nbytes < crossed < IMAGE.nbytes + 2 * SLACK for crossed in passed.values())


def test_puts_that_mix_prompts_share_with_all_others(server: Served, name: str) -> None:
    """64 rows of 4 prompts, then other mixes of them: every image is stored once, and crosses once."""
    images = [np.random.default_rng(number).integers(0, 255, (3, 128, 128), np.uint8) for number in range(4)]
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        table = queue.create_table(name, fields=FIELDS, retention=tq.Manual())
        passed = counted(between)
        group = np.repeat(np.stack(images), 16, 0)
        table.put(image=tq.Repeat(group), ids=[ids(row)[0] for row in range(64)])
        mixes = [[2, 0], [1, 1, 3], [3], [0, 1, 2, 3] * 2, [0, 1, 2, 3, 4]]
        images.append(IMAGE.numpy() + 1)
        for mix in mixes:
            table.put(image=tq.Repeat(np.stack([images[number] for number in mix])), ids=ids(0) * len(mix))
        rows = table.put(image=torch.from_numpy(group[:2]), ids=ids(0) * 2)
        table.update(rows, overwrite=True, image=tq.Repeat([images[3], images[1]]))
        stored, undeclared = 5 * IMAGE.nbytes, 2 * IMAGE.nbytes
        update = 2 * IMAGE.nbytes  # of rows with an image beside other columns, so its values are written
        assert table.stats().bytes < stored + undeclared + update + 32 * 1024
        expected = [number // 16 for number in range(64)] + [number for mix in mixes for number in mix] + [3, 1]
        assert np.array_equal(table.read()["image"].numpy(), np.stack([images[number] for number in expected]))
        table.delete(table.read(fields=["ids"]).rows[:64])
        assert np.array_equal(table.read()["image"].numpy(), np.stack([images[number] for number in expected[64:]]))
        assert passed[True] < stored + undeclared + update + 96 * 1024


def test_without_the_word_every_row_stores_and_sends_its_own(server: Served, name: str) -> None:
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        table = queue.create_table(name, fields=FIELDS, tasks=TASKS)
        passed = counted(between)
        for row in range(ROWS):
            table.put(image=[IMAGE], ids=ids(row))
        assert table.stats().bytes > ROWS * IMAGE.nbytes
        for _ in range(ROWS):
            with table.lease("train", rows=1) as batch:
                batch["image"].torch()
        assert min(passed.values()) > ROWS * IMAGE.nbytes


def test_a_batch_of_several_groups_receives_each_value_once(server: Served, name: str) -> None:
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        table = queue.create_table(name, fields=FIELDS, tasks=TASKS, retention=tq.Manual())
        for row in range(8):
            table.put(image=tq.Repeat([OTHER if row % 2 else IMAGE]), ids=ids(row))
        passed = counted(between)
        with table.lease("train", rows=8) as batch:
            assert torch.equal(batch["image"].torch(), torch.stack([IMAGE, OTHER] * 4))
            assert batch["ids"].list() == [ids(row)[0].tolist() for row in range(8)]
        assert passed[False] < 2 * IMAGE.nbytes + SLACK
        again = table.read([5, 0, 1])
        assert torch.equal(again["image"].torch(), torch.stack([OTHER, IMAGE, OTHER]))
        assert passed[False] < 2 * IMAGE.nbytes + 2 * SLACK
        part = table.read([1], fields={"image": tq.Slice((0, 1))})  # a slice is cut at the shard, as ever
        assert torch.equal(part["image"].torch()[0], OTHER[:1])


PIXELS = 1 << 17
"""Bytes of a row in the blocks below."""


def leased(server: Served, name: str, rows: int, sizes: list[int]) -> list[float]:
    """How many rows crossed in each of several leases of these sizes, of `rows` different values."""
    images = [np.full(PIXELS, row, np.uint8) for row in range(rows)]
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        fields, tasks = [tq.Field("image", "uint8", (PIXELS,))], [tq.Task("train", needs=["image"])]
        table = queue.create_table(name, fields=fields, tasks=tasks, retention=tq.Manual())
        table.put(image=tq.Repeat(images))
        passed, crossed, first = counted(between), list[float](), 0
        for size in sizes:
            with table.lease("train", rows=size) as batch:
                assert np.array_equal(batch["image"].numpy(), images[first : first + size])
            crossed.append(passed[False] / PIXELS)
            passed[False], first = 0, first + size
        return crossed


@pytest.mark.parametrize("rows", [16, CONTENTS_MAX + 1])
def test_each_value_crosses_once(server: Served, name: str, rows: int) -> None:
    assert leased(server, name, rows, [1, 2, 13]) == pytest.approx([1, 2, 13], abs=0.1)


def test_a_value_too_large_to_keep_crosses_each_time(
    server: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = []
    for bytes_max in (4 * PIXELS - 4, 4 * PIXELS):
        monkeypatch.setattr(shard_clients, "ReceivedContents", partial(ReceivedContents, bytes_max))
        with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
            table = queue.create_table(f"{name}{bytes_max}", retention=tq.Manual())
            table.put(image=tq.Repeat(np.zeros((1, PIXELS), np.uint8)))
            passed = counted(between)
            for _ in range(3):
                table.read([0])["image"].numpy()
            crossed.append(passed[False] / PIXELS)
    assert crossed == pytest.approx([3, 1], abs=0.1)


def test_more_different_values_than_one_call_may_have_are_stored_as_any_others(server: Served, name: str) -> None:
    images = np.zeros((2 * CONTENTS_MAX + 2, 4096), np.uint8)
    images[:, 0] = np.arange(len(images)) // 2
    with tq.connect(server.ipc) as queue:
        table = queue.create_table(name, retention=tq.Manual())
        table.put(image=tq.Repeat(images[:-2]))
        assert table.stats().bytes == CONTENTS_MAX * 4096
        table.put(image=tq.Repeat(images))
        assert table.stats().bytes == (3 * CONTENTS_MAX + 2) * 4096
        assert np.array_equal(table.read()["image"].numpy(), np.concatenate([images[:-2], images]))


@pytest.mark.parametrize("data", ["remote", *only_long("")])
def test_values_of_every_kind_and_of_many_writers(server: Served, name: str, data: Any) -> None:
    values = {
        "text": ["a prompt " * 2000],
        "ids": [list(range(4000))],
        "array": np.arange(6000.0).reshape(1, 6000),
        "plain": [{"turns": ["x" * 900] * 9}],
        "broadcast": "a prompt " * 2000,
        "empty": ["short"],  # stored with its row
        "scalar": [1.5],
    }
    address = server.tcp if data else server.ipc
    with tq.connect(address, **({"data": data} if data else {})) as queue:
        table = queue.create_table(name, retention=tq.Manual())
        failures: list[tq.TransferQueueError] = []

        def write() -> None:
            try:
                for _ in range(5):
                    table.put(**{field: tq.Repeat(value) for field, value in values.items()})
            except tq.TransferQueueError as error:
                failures.append(error)

        writers = [threading.Thread(target=write) for _ in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert not failures
        assert table.stats().bytes < 130_000 + 20 * 1024
        read = table.read()
        assert read["text"].list() == read["broadcast"].list() == values["text"] * 20
        assert read["ids"].list() == values["ids"] * 20
        assert read["plain"].list() == values["plain"] * 20
        assert np.array_equal(read["array"].numpy(), np.repeat(values["array"], 20, 0))
        table.delete(read.rows[:19])
        assert table.read()["text"].list() == values["text"]
        table.delete(read.rows[19:])
        assert table.stats().bytes == 0


RNG = np.random.default_rng(3)
KINDS: dict[str, list[Any]] = {
    "text": ["ä prompt " * 600, "another " * 700, "a third one " * 900],
    "bytes": [RNG.bytes(5000), RNG.bytes(4100), RNG.bytes(9000)],
    "ids": [RNG.integers(0, 9, count) for count in (700, 512, 2000)],
    "varied": [RNG.random((40, 30)), RNG.random((20, 60)), RNG.random((64, 64))],
    "boxes": [RNG.integers(0, 9, (count, 4), np.int16) for count in (900, 700, 600)],
    "dense": list(RNG.random((3, 700))),
    "bfloat": list(torch.randn(3, 3000, dtype=torch.bfloat16)),
    "plain": [{"turns": [number] * 5000} for number in range(3)],
    "large": list(RNG.integers(0, 255, (3, 1 << 20), np.uint8)),
}


def columns_of(mix: list[int]) -> dict[str, Any]:
    columns: dict[str, Any] = {kind: [values[number] for number in mix] for kind, values in KINDS.items()}
    return columns | {"bfloat": torch.stack(columns["bfloat"])}


def test_a_block_for_each_value_of_every_kind(server: Served, name: str) -> None:
    mixes = [[0, 1, 2], [2, 2, 0, 1, 2], [1, 0], [1]]
    rows = [number for mix in mixes for number in mix]
    with tq.connect(server.ipc) as queue:
        table, once = [queue.create_table(each, retention=tq.Manual()) for each in (name, f"{name}.once")]
        for mix in mixes:
            table.put(**{kind: tq.Repeat(column) for kind, column in columns_of(mix).items()})
        once.put(**columns_of([0, 1, 2]))
        assert table.stats().bytes < once.stats().bytes + 3 * len(KINDS) * 128
        read, expected = table.read(), once.read()
        assert torch.equal(read["bfloat"].torch(), expected["bfloat"].torch()[rows])
        for kind in KINDS.keys() - {"bfloat"}:
            values = list(expected[kind])
            for value, number in zip(read[kind], rows, strict=True):
                same = (
                    np.array_equal(value, values[number]) if isinstance(value, np.ndarray) else value == values[number]
                )
                assert same, kind


def test_one_value_for_all_rows_and_updates(server: Served, name: str) -> None:
    with tq.connect(server.ipc) as queue:
        table = queue.create_table(name, retention=tq.Manual())
        rows = table.put(prompt=tq.Repeat("a prompt " * 2000), number=[1, 2, 3])
        table.put(prompt=tq.Repeat(["a prompt " * 2000] * 2), number=[4, 5])
        assert table.stats().bytes < 19_000
        table.update(rows, overwrite=True, prompt=tq.Repeat("another one " * 2000))
        assert table.stats().bytes < 24_000 + 19_000
        table.update(rows[:1], overwrite=True, prompt=tq.Repeat("a prompt " * 2000))
        table.update(rows[1:2], overwrite=True, prompt=tq.Repeat("a prompt " * 2000), number=[2])
        assert (
            table.read()["prompt"].list()
            == ["a prompt " * 2000] * 2 + ["another one " * 2000] + ["a prompt " * 2000] * 2
        )
        table.update(rows, overwrite=True, prompt=tq.Repeat(["another one " * 2000] * 3))
        assert table.stats().bytes < 24_000 + 19_000
        assert table.read()["prompt"].list() == ["another one " * 2000] * 3 + ["a prompt " * 2000] * 2
        with pytest.raises(tq.SchemaError, match="Repeat of a Repeat"):
            table.put(prompt=tq.Repeat(tq.Repeat(["x"])))
        with pytest.raises(tq.SchemaError, match=r"Repeat\(None\) has no values"):
            tq.Repeat(None)
        with pytest.raises(tq.SchemaError, match="int values do not fit dtype str"):
            table.put(prompt=tq.Repeat([1, 2]))
        with pytest.raises(tq.NotFound):  # not of a value: it stands
            queue.table("nothing").put(prompt=tq.Repeat(["x" * 9000]))


def test_results_of_acks_and_releases_cross_and_are_stored_once(server: Served, name: str) -> None:
    """A teacher that gives each row of a group the same image, row by row; one gives up, and says how far it was."""
    tasks = [tq.Task("teach", needs=["ids"], gives=["image"]), tq.Task("train", needs=["image", "ids"])]
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        fields = [*FIELDS, tq.Field("draft", "uint8", (3, 128, 128))]
        table = queue.create_table(name, fields=fields, tasks=tasks)
        for row in range(ROWS):
            table.put(ids=ids(row))
        passed = counted(between)
        with table.lease("teach", rows=1) as batch:
            batch.release(reason="half done", draft=tq.Repeat([IMAGE.clone()]))
        for _ in range(ROWS):
            with table.lease("teach", rows=1) as batch:
                batch.ack(image=tq.Repeat([IMAGE.clone()]))
        assert table.stats().bytes < 2 * IMAGE.nbytes + ROWS * SLACK
        assert 2 * IMAGE.nbytes < passed[True] < 2 * IMAGE.nbytes + ROWS * 1024
        with table.lease("train", rows=ROWS) as batch:
            assert torch.equal(batch["image"].torch(), torch.stack([IMAGE] * ROWS))
        assert table.stats().bytes == 0


def test_rows_that_have_a_value_beside_others_get_new_bytes(server: Served, name: str) -> None:
    """The table has the value in a block that is older than theirs, so the first attempt is refused, and the second
    writes it."""
    with tq.connect(server.ipc) as queue:
        table = queue.create_table(name, fields=FIELDS, retention=tq.Manual())
        first = table.put(image=tq.Repeat([IMAGE]), ids=ids(0))
        rows = table.put(image=torch.stack([OTHER, OTHER]), ids=[*ids(1), *ids(2)])
        table.update(rows[:1], overwrite=True, image=tq.Repeat([IMAGE]))
        table.update(rows[1:], overwrite=True, image=tq.Repeat([IMAGE]))
        assert torch.equal(table.read()["image"].torch(), torch.stack([IMAGE] * 3))
        table.update(first, overwrite=True, image=tq.Repeat([OTHER]))
        assert torch.equal(table.read()["image"].torch(), torch.stack([OTHER, IMAGE, IMAGE]))
        assert table.read()["ids"].list() == [ids(row)[0].tolist() for row in range(3)]


def test_a_server_that_starts_anew_gets_the_bytes_again(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path))
    value = "a prompt " * 2000
    for _ in range(2):
        with tq.connect("embedded") as queue:
            table = queue.create_table(name, retention=tq.Manual())
            for _ in range(3):
                table.put(prompt=tq.Repeat([value]))
            assert table.stats().bytes < 19_000
            queue.snapshot(str(tmp_path / "snapshot")) if not (tmp_path / "snapshot").exists() else None
    with tq.connect("embedded") as queue:
        queue.restore(str(tmp_path / "snapshot"))
        table = queue.table(name)
        assert table.stats().bytes < 19_000  # restored rows share their value
        table.put(prompt=tq.Repeat([value]))  # which puts do not find: they store it once more
        table.put(prompt=tq.Repeat([value]))
        assert table.stats().bytes < 2 * 19_000
        assert table.read()["prompt"].list() == [value] * 5


def test_puts_go_on_over_a_kill_of_the_server(tmp_path: Path, name: str) -> None:
    """References of before and after the kill, and retries of puts that it interrupted, name one value."""
    value = "a prompt " * 2000
    with Supervised(tmp_path, "process") as server, tq.connect(server.address) as queue:
        table = queue.create_table(name, retention=tq.Manual())
        table.put(prompt=tq.Repeat([value]), key=["first"])
        begun, killed = threading.Event(), threading.Event()

        def write() -> None:
            number = 0
            while not killed.is_set() or number < 20:
                table.put(prompt=tq.Repeat([value]), key=[f"row {number}"])
                number += 1
                begun.set()
            counts.append(number)

        counts: list[int] = []
        writer = threading.Thread(target=write)
        writer.start()
        begun.wait(60)
        server.kill()
        killed.set()
        writer.join()
        read = table.read()
        assert len(read) == counts[0] + 1
        assert set(read["prompt"].list()) == {value}
        assert table.stats().bytes < 19_000
        table.delete(read.rows)
        assert table.stats().bytes == 0
        assert queue.audit().balanced


@pytest.mark.slow
def test_a_value_with_copies_outlives_the_death_of_its_shard(tmp_path: Path, name: str) -> None:
    value = "a prompt " * 2000
    with (
        served(tmp_path, "256MiB") as server,
        ShardProcess(server.ipc) as dying,
        ShardProcess(server.ipc),
        tq.connect(server.tcp, data="remote") as queue,
    ):
        await_shards(queue, 2)
        table = queue.create_table(name, tasks=[tq.Task("train", needs=["prompt"])], replicas=2, retention=tq.Manual())
        for _ in range(4):
            table.put(prompt=tq.Repeat([value]), timeout_s=PATIENCE_S)
        assert table.stats().bytes < 2 * 19_000
        dying.kill()
        await_shards(queue, 1)
        for _ in range(4):
            table.put(prompt=tq.Repeat([value]), timeout_s=PATIENCE_S)
        with table.lease("train", rows=8, timeout_s=PATIENCE_S) as batch:
            assert batch["prompt"].list() == [value] * 8
        assert queue.audit().tables[name].rows_lost == 0


def test_a_pipeline_copies_what_it_is_given_and_keeps_the_order():
    image = np.random.default_rng(0).integers(0, 255, 48 << 10, np.uint8)
    with tq.connect("embedded") as queue:
        fields = [tq.Field("image", "uint8", (image.size,)), tq.Field("ids", "int64", (4096,))]
        table = queue.create_table("t", fields=fields, retention=tq.Manual())
        ids = np.full((1, 4096), 7, np.int64)
        with table.pipeline() as pipeline:
            promises = [pipeline.put(image=tq.Repeat([image]), ids=ids)]
            ids[:] = 8
            promises.append(pipeline.put(image=tq.Repeat([image]), ids=ids))
            ids[:] = 9
            promises.append(pipeline.put(image=[image + 1], ids=ids))
            ids[:] = 10
            promises[0].result()
            updated = pipeline.update([0], overwrite=True, image=tq.Repeat([image]), ids=ids)
            ids[:] = 11
        updated.result()
        rows = [int(promise.result()[0]) for promise in promises]
        assert rows == [0, 1, 2]
        assert table.read([0])["ids"].numpy()[0, 0] == 10
        table.update([0], overwrite=True, ids=ids - 4)
        assert table.read(rows)["ids"].numpy()[:, 0].tolist() == [7, 8, 9]
        assert queue.stats().tables["t"].bytes < 3 * (image.size + ids.nbytes)
