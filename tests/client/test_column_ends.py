"""Columns that end before their rows, through the whole client: where puts lay them, and what memory returns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.limits import COLUMN_APART_BYTES, KIB, MIB

TASKS = (
    tq.Task("score", needs=["image"], gives=["reward"]),
    tq.Task("train", needs=["ids", "reward"]),
)


def used(queue: tq.Queue) -> int:
    return int(queue.stats().server.used_bytes)


def score(table: tq.Table, rows: int) -> None:
    with table.lease("score", rows=rows) as batch:
        assert batch["image"].numpy().shape[0] == rows
        batch.ack(reward=np.ones(rows, np.float32))


def images(rows: int, nbytes: int = MIB) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 255, (rows, nbytes), np.uint8)


def test_memory_of_a_large_column_returns_with_its_last_task() -> None:
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.AckedColumns())
        table.put(image=images(8), ids=[np.arange(600)] * 8)
        full = used(queue)
        score(table, 8)
        assert full - used(queue) == 8 * MIB
        stats = table.stats()
        assert (stats.columns_freed, stats.column_bytes_freed, stats.rows_live) == (8, 8 * MIB, 8)
        with table.lease("train", rows=8) as batch:
            assert batch["ids"].lengths.tolist() == [600] * 8
        assert table.stats().bytes == 0


def test_small_columns_that_end_early_share_extents_of_their_own() -> None:
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.AckedColumns())
        puts = 300
        for _ in range(puts):
            table.put(image=images(1, 20 * KIB), ids=[np.arange(16)])
        full = used(queue)
        score(table, puts)
        freed = full - used(queue)
        assert puts * 20 * KIB - 3 * MIB < freed  # all but the extents that are still open
        assert table.stats().column_bytes_freed == puts * 20 * KIB


def test_a_put_that_finds_no_room_for_two_extents_writes_one() -> None:
    with tq.connect("embedded", arena_bytes="8MiB") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.AckedColumns())
        keeper = queue.create_table("keeper", retention=tq.Manual())
        kept = 5 * MIB + 3 * MIB // 4
        keeper.put(blob=np.zeros((1, kept), np.uint8))  # a byte in eight is kept for results: 1.25 MiB are free
        with pytest.raises(tq.Full):
            table.put(image=images(2), ids=[[1], [2]], timeout_s=0)
        assert (used(queue), table.stats().rows_put) == (kept, 0)
        table.put(image=images(2, 400 * KIB), ids=[[1], [2]])  # no room for an extent that small puts share
        assert used(queue) < kept + MIB
        score(table, 2)
        assert (table.stats().columns_freed, table.stats().bytes) == (2, 128)


def test_free_columns_returns_the_memory_of_a_large_column_at_once() -> None:
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        for retention, freed in ((tq.Manual(), 0), (tq.ManualColumns(), 4 * MIB)):
            table = queue.create_table(type(retention).__name__, retention=retention)
            rows = table.put(image=images(4), ids=[np.arange(16)] * 4, mask=images(4, COLUMN_APART_BYTES // 4))
            full = used(queue)
            assert table.free_columns(rows, ["image"]) == 4
            assert full - used(queue) == freed
            with pytest.raises(tq.ColumnFreed, match=r'column "image" of rows 0, 1, 2, 3 .* by free_columns'):
                table.read(rows, fields=["image"])
            read = table.read(rows)
            assert read.left_out == ("image",)
            with pytest.raises(tq.NotFound, match="it is not there yet, or was freed"):
                read["image"]
            read.release()
            assert table.free_columns(rows, ["ids", "mask"]) == 8


def test_free_columns_refuses_what_it_cannot_do() -> None:
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.Manual())
        rows = table.put(image=images(1, 16), ids=[[1]])
        for fields, error, match in (
            ("image", tq.UsageError, "one string"),
            ([], tq.UsageError, "give at least one field"),
            (["pictures"], tq.NotFound, 'field "pictures" is not in table "t"'),
            (["image"], tq.UsageError, 'task "score" may still need it'),
        ):
            with pytest.raises(error, match=match):
                table.free_columns(rows, fields)
        assert table.stats().columns_freed == 0


def test_columns_are_freed_from_asyncio_too() -> None:
    async def free() -> None:
        async with await tq.aconnect("embedded", arena_bytes="64MiB") as queue:
            table = await queue.create_table("t", retention=tq.ManualColumns())
            rows = await table.put(text=["a", "b"])
            assert await table.free_columns(rows[:1], ["text"]) == 1
            assert (await table.read(rows[1:], fields=["text"]))["text"].list() == ["b"]

    asyncio.run(free())


def test_a_snapshot_remembers_what_was_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path))
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.AckedColumns())
        table.put(image=images(2, 16), ids=[[1], [2]])
        score(table, 1)
        queue.snapshot("kept")
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        queue.restore("kept")
        table = queue.table("t")
        assert (table.stats().columns_freed, table.retention) == (1, tq.AckedColumns())
        with pytest.raises(tq.ColumnFreed):
            table.read([0, 1], fields=["image"])
        score(table, 1)
        assert table.stats().columns_freed == 2
