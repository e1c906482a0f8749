"""What a person sees: reprs, the order of columns, tables in and out, and tracebacks that show the caller's line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import transferqueue as tq
from tests.client.deployments import LoopThread


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


@pytest.fixture
def table(queue: tq.Queue, name: str) -> tq.Table:
    found = queue.create_table(
        name, tasks=[tq.Task("reward", needs=["ids"], gives=["rewards"]), tq.Task("all", needs=["ids"])]
    )
    found.put(
        text=["a", "b" * 100],
        ids=[np.arange(2), np.arange(9)],
        score=[1, 2],
        image=np.zeros((2, 3, 4), np.float32),
        value=[{"a": 1}, ["x"] * 100],
        key=["k", "l"],
        policy_version=7,
    )
    return found


def test_a_column_shows_its_first_values(table: tq.Table) -> None:
    with table.lease("all", rows=2, fields=["text", "ids", "score", "image", "value"]) as batch:
        assert repr(batch["ids"]) == "Column('ids', int64, shape=(2, None), [[0, 1], [0, 1, 2, 3, ...]])"
        assert repr(batch["score"]) == "Column('score', int64, shape=(2,), [1, 2])"
        assert repr(batch["text"]) == f"Column('text', str, shape=(2,), ['a', '{'b' * 48}'...])"
        assert repr(batch["value"]) == "Column('value', value, shape=(2,), [{'a': 1}, <value of 203 bytes>])"
        assert repr(batch["image"]).endswith(
            "shape=(2, 3, 4), [[0.0, 0.0, 0.0, 0.0, ...] of shape [3, 4], [0.0, 0.0, 0.0, 0.0, ...] of shape [3, 4]])"
        )
        image = batch["image"]
        assert (image.dtype, image.shape, len(image)) == ("float32", (2, 3, 4), 2)
        assert batch["ids"].shape == (2, None)
    assert repr(image).endswith("ended)")


def test_only_the_first_rows_are_shown(queue: tq.Queue, name: str) -> None:
    table = queue.create_table(name)
    rows = table.put(x=np.arange(1000), half=np.zeros((1000, 2), np.float16))
    with table.read(rows) as found:
        assert repr(found["x"]) == "Column('x', int64, shape=(1000,), [0, 1, 2, 3, ...])"
        assert repr(found["half"][5:]).startswith("Column('half', float16, shape=(995, 2), [[0.0, 0.0], ")


def test_a_batch_is_a_mapping_of_its_columns(table: tq.Table) -> None:
    def names(**columns: tq.Column) -> list[str]:
        return list(columns)

    with table.lease("all", rows=2, fields=["text", "score"]) as batch:
        assert list(dict(batch)) == ["text", "score"] == names(**batch) == list(batch.keys())
        assert dict(batch)["score"].numpy().tolist() == [1, 2]
        assert [name for name, _ in batch.items()] == ["text", "score"]
        assert [column.field.name for column in batch.values()] == ["text", "score"]
        assert (len(batch), batch.keys) == (2, ["k", "l"])


def test_columns_come_in_the_order_of_the_table(queue: tq.Queue, name: str) -> None:
    table = queue.create_table(name, fields=[tq.Field("z", "int64"), tq.Field("text", "str"), tq.Field("a", "int64")])
    table.put(a=[1], text=["x"], z=[2])
    with table.read() as found:
        assert found.fields == ("z", "text", "a")
    with queue.table(name).read(fields=["a", "text"]) as found:
        assert found.fields == ("text", "a")
    assert table.read().arrow().column_names == ["z", "text", "a"]


def test_a_read_says_what_it_left_out(table: tq.Table) -> None:
    table.update([0], rewards=[1.0])
    with table.read() as found:
        assert found.left_out == ("rewards",)
        assert (
            repr(found)
            == "<Rows of 2 rows: text, ids, score, image, value; left out, as not all rows have them: rewards>"
        )
        with pytest.raises(tq.NotFound, match=r'"rewards" is left out of these rows .* not all of them have it'):
            found["rewards"]
    assert repr(found).endswith("rewards, was released>")
    with table.read([0]) as found:
        assert found.left_out == ()


def test_arrow_with_facts_comes_back_as_it_went(queue: tq.Queue, table: tq.Table, name: str) -> None:
    told = table.read().arrow(facts=True)
    assert told.column_names[:3] == ["row_id", "key", "group_id"]
    assert told["row_id"].to_pylist() == [0, 1]
    assert told["policy_version"].to_pylist() == [7, 7]
    assert told["key"].to_pylist() == ["k", "l"]
    again = queue.create_table(f"{name}_again")
    with pytest.raises(tq.UsageError, match=r'column "row_id".*drop_columns'):
        again.put(told)
    part = told.select(["key", "policy_version", "tokens", "score", "text"])
    again.put(part)
    with again.read() as found:
        assert found.arrow(facts=True).select(part.column_names).equals(part)


@pytest.mark.parametrize("make", [lambda c: pa.table(c), lambda c: pa.RecordBatch.from_pydict(c), dict])
def test_a_table_is_put_whole(queue: tq.Queue, name: str, make: Any) -> None:
    table = queue.create_table(name)
    rows = table.put(make({"x": [1, 2], "text": ["a", "b"]}), y=[3, 4], key=["k", "l"])
    with table.read(rows) as found:
        assert {name: column.list() for name, column in dict(found).items()} == {
            "x": [1, 2],
            "text": ["a", "b"],
            "y": [3, 4],
        }


def test_what_is_no_table_is_refused(queue: tq.Queue, name: str) -> None:
    table = queue.create_table(name)
    with pytest.raises(tq.UsageError, match="put was given list without a name, which is no table"):
        table.put([1, 2])
    with pytest.raises(tq.SchemaError, match=r"a single value, which is for all rows, was given for table \(dict\)"):
        table.put(table={"x": [1]})
    with pytest.raises(
        tq.UsageError, match=r"put has a parameter timeout_s, so no column of a table .* rename the column"
    ):
        table.put({"x": [1], "timeout_s": [1.0]})
    with pytest.raises(tq.UsageError, match="'x' was given in the table and beside it"):
        table.put({"x": [1]}, x=[2])
    with pytest.raises(tq.UsageError, match="'key' was given in the table and beside it"):
        table.put({"x": [1], "key": ["k"]}, key="k")
    with pytest.raises(tq.UsageError, match="two columns of one name"):
        table.put(pa.table([[1], [2]], names=["x", "x"]))
    assert table.audit().rows_put == 0


def test_tables_and_queues_show_what_is_known_and_whether_they_are_closed(name: str) -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table(name, tasks=[tq.Task("work", needs=["x"])], limits=tq.Limits(rows=8))
        table.put(x=[1], y=[2])
        at = queue.address
        assert repr(table) == f"<Table '{name}' at {at}: 2 fields, tasks work, at most 8 rows>"
        assert repr(queue) == f"<Queue at {at}: 1 table used here>"
    assert repr(table) == f"<Table '{name}' at {at}: 2 fields, tasks work, at most 8 rows, closed>"
    assert repr(queue) == f"<Queue at {at}: 1 table used here, closed>"


def test_an_error_shows_the_line_of_the_caller_and_little_else(table: tq.Table) -> None:
    with table.loader("reward", rows=100, timeout_s=0.01) as loader:
        calls = [
            lambda: table.lease("reward", rows=100, timeout_s=0.01),
            lambda: next(iter(loader)),
            lambda: table.put(ids=["text"]),
            lambda: table.put(polcy_version=3),
        ]
        for call in calls:
            with pytest.raises(tq.TransferQueueError) as raised:
                call()
            frames = traceback.extract_tb(raised.tb)
            assert frames[1].filename == __file__
            assert len(frames) <= 5
    with LoopThread() as loop, loop.connect(address=None) as queue:
        found = queue.create_table("t", tasks=[tq.Task("work", needs=["x"])])
        with pytest.raises(tq.DeadlineExceeded) as raised:
            found.lease("work", rows=1, timeout_s=0.01)
        assert not any("leasing" in frame.filename for frame in traceback.extract_tb(raised.tb))
