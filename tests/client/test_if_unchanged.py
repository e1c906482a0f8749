"""`Table.update(if_unchanged=)`: what was read, in this process or over tcp, is what an update may depend on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import Served

FIELDS = [
    tq.Field("ids", "int64", (None,)),
    tq.Field("image", "uint8", (2, 3)),
    tq.Field("score", "float32"),
    tq.Field("text", "str"),
]


@pytest.fixture(params=["local", "remote"])
def queue(request: pytest.FixtureRequest, server: Served) -> Iterator[tq.Queue]:
    how: dict[str, Any] = {"data": "remote"} if request.param == "remote" else {}
    with tq.connect(server.tcp if how else server.ipc, **how) as found:
        yield found


def filled(queue: tq.Queue, name: str, puts: int = 3) -> tq.Table:
    table = queue.create_table(name, fields=FIELDS, tasks=[tq.Task("train", needs=["ids"])], retention=tq.Manual())
    for at in range(puts):
        table.put(
            ids=[np.arange(at + 1), np.arange(2)], image=np.full((2, 2, 3), at, np.uint8), score=[0.5, np.nan],
            text=["a", "b"], key=[f"{at}.0", f"{at}.1"], tags=[{"n": at}, {}],
        )  # fmt: skip
    return table


def test_what_is_no_read_of_these_rows_is_refused(queue: tq.Queue, name: str) -> None:
    table = filled(queue, name)
    with table.read([0, 1], fields=["score"]) as read, table.read([0, 1], fields=[]) as bare:
        for given, text in (
            (7, "if_unchanged is int; give the rows as table.read or a lease brought them"),
            ({"score": [1.0]}, "if_unchanged is dict"),
            (bare, "if_unchanged has no columns"),
        ):
            with pytest.raises(tq.UsageError, match=text):
                table.update([0, 1], overwrite=True, if_unchanged=given, score=[1.0, 1.0])  # type: ignore[arg-type]
        for rows in ([0], [1, 0], [0, 1, 2]):
            with pytest.raises(tq.UsageError, match=r"if_unchanged has rows \[0, 1\], and the update names others"):
                table.update(rows, overwrite=True, if_unchanged=read, score=[1.0] * len(rows))
        with pytest.raises(tq.UsageError, match="if_unchanged"):
            table.put(if_unchanged=[1.0])
    assert table.read([0, 1])["score"].list()[0] == 0.5


def test_an_update_that_replaces_what_was_not_read_is_refused(queue: tq.Queue, name: str) -> None:
    """The write of another process would be lost. A column that is only added needs no read: a second writer is
    `AlreadyExists`."""
    table = queue.create_table(name, fields=FIELDS, tasks=[tq.Task("train", needs=["ids"])], retention=tq.Manual())
    table.put(ids=[[1], [2, 3]])
    refused = r"if_unchanged has ids, and the update replaces score, text too, .*fields=\['ids', 'score', 'text'\]"
    with table.read([0, 1]) as read, table.lease("train", rows=2) as batch:
        table.update([0, 1], score=[1.0, 1.0], text=["a", "b"])  # by another process
        for given in (read, batch):
            with pytest.raises(tq.UsageError, match=refused):
                table.update([0, 1], overwrite=True, if_unchanged=given, score=[2.0, 2.0], text="c", tags={"n": 2})
            with pytest.raises(tq.AlreadyExists), table.pipeline() as pipeline:
                pipeline.update([0, 1], if_unchanged=given, score=[2.0, 2.0])
            with pytest.raises(tq.UsageError, match="compares columns and tags, and the update sets priority, tokens"):
                table.update([0, 1], if_unchanged=given, priority=2.0, tokens=7)
        table.update([0, 1], overwrite=True, if_unchanged=read, ids=[[1], [2, 3]], priority=2.0)
        with pytest.raises(tq.RowsChanged):
            table.update([0, 1], overwrite=True, if_unchanged=batch, ids=[[1], [2, 3]])
    found = table.read([0, 1])
    assert (found["score"].list(), found["text"].list(), found.tags) == ([1.0, 1.0], ["a", "b"], [{}, {}])


def test_rows_without_a_column_yet_are_not_all_that_may_be_replaced(queue: tq.Queue, name: str) -> None:
    """Tags alone are compared where the caller reads no fields, not where the rows have none."""
    table = queue.create_table(name, fields=FIELDS)
    table.put(key=["a"])
    with table.read([0]) as read, pytest.raises(tq.UsageError, match="has none, and the update replaces score too"):
        table.update([0], overwrite=True, if_unchanged=read, score=[1.0], tags={"n": 1})
    with table.read([0], fields=()) as read:
        table.update([0], overwrite=True, if_unchanged=read, score=[1.0], tags={"n": 1})
    assert table.read([0])["score"].list() == [1.0]


def test_an_update_of_rows_that_nobody_wrote_goes_through(queue: tq.Queue, name: str) -> None:
    table = filled(queue, name)
    rows = [4, 0, 3]
    read = table.read(rows)
    table.update(rows, overwrite=True, if_unchanged=read, score=[1.0, 2.0, 3.0], tags=[{"n": 9}] * 3)
    assert table.read(rows)["score"].list() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("field", ["ids", "image", "score", "text", "tags"])
def test_whoever_read_before_a_write_is_told_so(queue: tq.Queue, name: str, field: str) -> None:
    table = filled(queue, name)
    rows, told = [4, 0, 3], {"tags": [{"n": 1}] * 3}
    read = table.read(rows, fields=[] if field == "tags" else ["ids", field])
    new: Any = {
        "ids": [np.arange(9)],
        "image": np.ones((1, 2, 3), np.uint8),
        "score": [4.0],
        "text": ["c"],
        "tags": {"x": 1},
    }
    table.update([3], overwrite=True, **{field: new[field]})
    with pytest.raises(
        tq.RowsChanged, match=r"(field|the tags).* of row 3 in table .* changed after the read"
    ) as refused:
        table.update(
            rows, overwrite=True, if_unchanged=read, **(told if field == "tags" else {}), ids=[np.arange(5)] * 3
        )
    assert isinstance(refused.value, tq.FlowSignal)
    assert [len(each) for each in table.read([4, 0])["ids"]] == [3, 1]


def test_a_lease_is_a_read_too(queue: tq.Queue, name: str) -> None:
    table = filled(queue, name)
    with table.lease("train", rows=6) as batch:
        table.update(batch.rows, overwrite=True, if_unchanged=batch, ids=[np.arange(1)] * 6)
        with pytest.raises(tq.RowsChanged):
            table.update(batch.rows, overwrite=True, if_unchanged=batch, ids=[np.arange(2)] * 6)


def test_a_pipeline_tells_it_where_the_answer_comes(queue: tq.Queue, name: str) -> None:
    table = filled(queue, name)
    read = table.read([0], fields=["score"])
    with table.pipeline() as pipeline:
        promises = [pipeline.update([0], overwrite=True, if_unchanged=read, score=[value]) for value in (1.0, 2.0)]
        promises[0].result()
        with pytest.raises(tq.RowsChanged):
            promises[1].result()
    assert table.read([0])["score"].list() == [1.0]


def test_threads_that_append_lose_nothing(server: Served, name: str) -> None:
    """Four clients append 15 numbers each to one ragged value."""
    with tq.connect(server.ipc) as queue:
        filled(queue, name, 1)

    def append(worker: int) -> None:
        with tq.connect(server.ipc) as mine:
            table = mine.table(name)
            for number in range(15):
                while True:
                    read = table.read([0], fields=["ids"])
                    try:
                        table.update(
                            [0],
                            overwrite=True,
                            if_unchanged=read,
                            ids=[np.append(read["ids"][0], [100 * worker + number])],
                        )
                        break
                    except tq.RowsChanged:
                        continue

    threads = [threading.Thread(target=append, args=(worker,)) for worker in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with tq.connect(server.ipc) as queue:
        values = queue.table(name).read([0])["ids"][0].tolist()
    assert sorted(values) == sorted([0, *(100 * worker + number for worker in range(1, 5) for number in range(15))])
