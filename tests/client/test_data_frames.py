"""Data frames go in and batches come out by Arrow's C data interface.

The frames here are pyarrow's behind classes that have nothing but the interface;
`test_data_frame_libraries.py` has polars, pandas, duckdb and datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import LoopThread


class Stream:
    """A frame or a column in chunks, which can be read once, as the stream of a query is."""

    def __init__(self, data: pa.Table | pa.ChunkedArray) -> None:
        self._data: Any = data

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        data, self._data = self._data, None
        if data is None:
            raise RuntimeError("this stream was read before")
        return data.__arrow_c_stream__(requested_schema)


class Single:
    """A column in one piece."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return self._array.__arrow_c_array__(requested_schema)


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


@pytest.fixture
def table(queue: tq.Queue, name: str) -> tq.Table:
    return queue.create_table(name, tasks=[tq.Task("work", needs=["x"], gives=["y"])])


FRAME = pa.concat_tables(
    [
        pa.table({"x": [1, 2], "text": ["a", "b"], "ids": [[1], [2, 3]]}),
        pa.table({"x": [3], "text": ["c"], "ids": pa.array([[]], pa.list_(pa.int64()))}),
    ]
)


def test_a_frame_that_can_be_read_once_is_put_in_chunks(table: tq.Table) -> None:
    rows = table.put(Stream(FRAME), y=Single(pa.array([0.5, 1.5, 2.5])))
    with table.read(rows) as read:
        assert read.arrow().to_pylist() == [
            {"x": 1, "text": "a", "ids": [1], "y": 0.5},
            {"x": 2, "text": "b", "ids": [2, 3], "y": 1.5},
            {"x": 3, "text": "c", "ids": [], "y": 2.5},
        ]


def test_a_call_that_is_checked_twice_reads_a_stream_once(queue: tq.Queue, table: tq.Table) -> None:
    """The table has another field than this client knew, so a refused column is checked again."""
    table.put(x=[1])
    with tq.connect(queue.address) as other:
        other.table(table.name).add_fields([tq.Field("z", "int64")])
    with pytest.raises(tq.SchemaError, match="but the values are float64"):
        table.put(x=Stream(pa.chunked_array([[1.5]])))


def test_columns_of_frames_go_into_every_verb(table: tq.Table) -> None:
    rows = table.put(
        x=Single(pa.array([1, 2])), key=Single(pa.array(["k", "l"])), policy_version=Single(pa.array([3, 4]))
    )
    table.update(rows, note=Stream(pa.chunked_array([["n"], ["m"]])), tags=Single(pa.array([{"a": "u"}, {"a": "v"}])))
    with table.lease("work", rows=2) as batch:
        batch.release(so_far=Single(pa.array([1, 2])))
    with table.lease("work", rows=2) as batch:
        assert (batch.keys, batch.policy_version.tolist(), [tags["a"] for tags in batch.tags]) == (
            ["k", "l"],
            [3, 4],
            ["u", "v"],
        )
        batch.ack(y=Single(pa.array([0.5, 1.5])), priority=Single(pa.array([1, 2])))
    with table.pipeline() as pipeline:
        more = pipeline.put(Stream(FRAME)).result()
    assert table.read(more, fields=["text"])["text"].list() == ["a", "b", "c"]


def test_values_that_rows_share_may_be_a_frames_column(table: tq.Table) -> None:
    rows = table.put(
        x=tq.Repeat(Single(pa.array([1, 2])), 2), big=tq.Repeat(Stream(pa.chunked_array([["a" * 9000, "b"] * 2])))
    )
    with table.read(rows) as read:
        assert read["x"].list() == [1, 1, 2, 2]
        assert [len(text) for text in read["big"].list()] == [9000, 1, 9000, 1]


def test_columns_with_names_of_facts_are_facts(table: tq.Table) -> None:
    facts = {
        "key": pa.array(["a", "b"]).dictionary_encode(),
        "group_id": [7, 7],
        "group_size": [2, 2],
        "ordinal": [0, 1],
        "policy_version": pa.array([3, 4], pa.uint8()),
        "policy_version_max": [5, 6],
        "tokens": [8, 9],
        "priority": [0.5, 1.5],
        "tags": [{"level": "easy"}, {"level": "hard"}],
    }
    rows = table.put(Stream(pa.table({"x": [1, 2]} | facts)))
    with table.read(rows) as read:
        assert read.fields == ("x",)
        told = read.arrow(facts=True)
        for name in facts.keys() - {"tags"}:
            wanted = facts[name]
            assert told[name].to_pylist() == (wanted.to_pylist() if isinstance(wanted, pa.Array) else wanted), name
        assert read.tags == facts["tags"]


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.chunked_array([pa.array(["a"]).dictionary_encode(), pa.array(["b"]).dictionary_encode()]), ["a", "b"]),
        (pa.array(["a", "long enough to lie outside"], pa.string_view()), ["a", "long enough to lie outside"]),
        (pa.array([b"a", b""], pa.binary_view()), [b"a", b""]),
        (
            pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.uint32()), pa.array(["a", "b"], pa.string_view())),
            ["b", "a"],
        ),
        (pa.array([1, 2]).dictionary_encode(), [1, 2]),
        (pa.array([["a"], []]), [["a"], []]),
        (pa.array([[["a"], []]], pa.list_(pa.list_(pa.string_view()))), [[["a"], []]]),
        (pa.array([[{"role": "user", "name": None}]]), [[{"role": "user", "name": None}]]),
        (pa.chunked_array([], pa.list_(pa.string())), "has no rows"),
        (pa.array([dict.fromkeys("ab", 1), None]), "2|row 1"),
        (pa.array(["a", None]).dictionary_encode(), 'field "x": 1 nulls, the first in row 1; a column has none'),
    ],
)
def test_encodings_are_decoded(queue: tq.Queue, name: str, column: Any, wanted: Any) -> None:
    table = queue.create_table(name)
    given = Single(column) if isinstance(column, pa.Array) else Stream(column)
    if isinstance(wanted, str):
        with pytest.raises(tq.SchemaError, match=wanted):
            table.put(x=given, y=[1, 2])
        return
    rows = table.put(Stream(pa.table({"x": column})))
    assert table.read(rows)["x"].list() == wanted
    assert table.read(table.put(x=given))["x"].list() == wanted


@pytest.mark.parametrize(
    ("frame", "columns", "error"),
    [
        (pa.table({"x": [1, None, 2]}), {}, 'field "x": 1 nulls, the first in row 1; a column has none: fill them'),
        (pa.table({"x": [1, 2], "group_id": [1, None]}), {}, "group_id: 1 nulls, the first in row 1"),
        (pa.table({"x": [1, 2], "key": [None, "k"]}), {}, "key: 1 nulls, the first in row 0"),
        (
            pa.table({"x": [1], "key": pa.array([b"\xff"]).view(pa.string())}),
            {},
            "key: text that is not Unicode",
        ),
        (pa.table({"x": [1], "row_id": [1]}), {}, 'column "row_id" is the id that rows had before'),
        (pa.table([[1], [2]], names=["x", "x"]), {}, "two columns of one name"),
        (pa.chunked_array([[1, 2]]), {}, r"Stream cannot be read as an Arrow table: .*put\(name=column\)"),
        (pa.table({"x": [1], "polcy_version": [2]}), {}, "policy_version"),
        (pa.table({"x": [1]}), {"x": [1]}, "'x' was given in the table and beside it"),
    ],
)
def test_what_does_not_fit_is_refused(table: tq.Table, frame: Any, columns: dict[str, Any], error: str) -> None:
    with pytest.raises(tq.UsageError, match=error):
        table.put(Stream(frame), **columns)
    assert table.audit().rows_put == 0


def test_a_library_that_fails_is_named(table: tq.Table) -> None:
    spent = Stream(FRAME)
    table.put(spent)
    with pytest.raises(
        tq.SchemaError, match="Stream cannot be read as an Arrow table: this stream was read before; give a data frame"
    ):
        table.put(spent)
    with pytest.raises(
        tq.SchemaError, match=r'field "x": .*Stream cannot be read as an Arrow column: this stream was read before'
    ):
        table.put(x=spent)


def test_a_whole_table_is_no_column(table: tq.Table) -> None:
    rows = table.put(FRAME)
    for whole in (FRAME, FRAME.to_reader(), table.read(rows)):
        with pytest.raises(
            tq.SchemaError, match=r'field "x": a \w+ is many columns; give one of them, or put the whole'
        ):
            table.put(x=whole)


def test_an_index_of_pandas_without_a_name_is_left_out(table: tq.Table) -> None:
    rows = table.put(Stream(pa.table({"x": [1], "__index_level_0__": [7]})))
    assert table.read(rows).fields == ("x",)


def test_a_batch_and_its_columns_are_read_as_arrow(table: tq.Table) -> None:
    table.put(
        FRAME, dense=np.ones((3, 2), np.float32), value=[{"a": 1}, None, 2], half=torch.ones(3, 2, dtype=torch.bfloat16)
    )
    with table.lease("work", rows=3, fields=["x", "ids", "dense", "value", "half"]) as batch:
        frame = pa.table(Stream(batch))
        assert frame.equals(batch.arrow())
        assert pa.table(batch).equals(frame)
        assert pa.schema(batch) == frame.schema
        for name, column in batch.items():
            assert pa.array(column).equals(column.arrow())
            assert pa.array(column).type == frame.schema.field(name).type
        narrow = pa.schema([pa.field("x", pa.int32())])
        with table.read(fields=["x"]) as read:
            assert pa.table(read, narrow).schema == narrow
        batch.release()
    assert frame["ids"].to_pylist() == [[1], [2, 3], []]  # still there after the end
    with pytest.raises(tq.BatchEnded):
        pa.table(batch)
    assert pa.schema(batch) == frame.schema


def test_rows_in_one_block_are_viewed(table: tq.Table) -> None:
    rows = table.put(x=np.arange(1000), ids=[[1, 2]] * 1000)
    with table.read(rows) as read:
        for name in read:
            first, again = (pa.array(read[name]).flatten() if name == "ids" else pa.array(read[name]) for _ in range(2))
            assert first.buffers()[-1].address == again.buffers()[-1].address
        assert pa.array(read["x"]).buffers()[-1].address == read["x"].numpy().__array_interface__["data"][0]


@pytest.mark.slow  # torch imports its nested tensors
def test_a_batch_is_put_as_it_is(queue: tq.Queue, table: tq.Table, name: str) -> None:
    columns: dict[str, Any] = {
        "x": [1, 2],
        "text": ["a", "b"],
        "ids": [[1], [2, 3]],
        "value": [{"a": 1}, None],
        "half": torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16),
        "halves": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], dtype=torch.bfloat16, layout=torch.jagged),
        "varied": [np.zeros((1, 2)), np.zeros((2, 1))],
        "wave": np.array([1j, 2j]),
        "waves": [np.array([1j]), np.array([1j, 2j])],
        "flag": [True, False],
        "raw": [b"", b"\xff"],
    }
    table.put(columns)
    again = queue.create_table(f"{name}_again")
    with table.read() as read:
        again.put(read, key=["k", "l"])
        with again.read() as copied:
            assert copied.fields == read.fields
            for field in read:
                assert copied[field].field == read[field].field
                assert copied[field].arrow().equals(read[field].arrow())


def test_numpy_and_pandas_do_not_get_the_names_of_the_columns(table: tq.Table) -> None:
    table.put(FRAME)
    with (
        table.read() as read,
        pytest.raises(tq.UsageError, match=r"no array; take one column.*DataFrame\.from_arrow\(batch\)"),
    ):
        np.asarray(read)


def test_a_notebook_shows_and_completes_a_batch(table: tq.Table) -> None:
    table.put({"x": np.arange(3), "markup": ["<b>&", "b" * 10**6, "c"], "half": torch.ones(3, dtype=torch.bfloat16)})
    with table.read() as read:
        assert read._ipython_key_completions_() == ["x", "markup", "half"]
        html = read._repr_html_()
        assert "<td>row_id</td><td>x</td><td>markup</td><td>half</td>" in html
        assert "<td>1</td><td>1</td>" in html
        assert "&lt;b&gt;&amp;" in html
        assert "<b>" not in html
        assert "not shown" not in html
        assert len(html) < 2000
    assert "<td>ended</td>" in read._repr_html_()


def test_what_a_notebook_shows_is_bounded(table: tq.Table) -> None:
    table.put({f"{'n' * 100}{at}": ['"' * 1000] * 100 for at in range(200)})
    with table.read() as read:
        html = read._repr_html_()
    assert "<p>not shown: 92 rows and 184 columns</p>" in html
    assert html.count("<tr>") == 9
    assert html.count("<td>") == 9 * 17
    assert len(html) < 100_000


def test_batches_of_event_loops_do_too(name: str) -> None:
    with LoopThread() as loop, loop.connect(address=None) as queue:
        table = queue.create_table(name, tasks=[tq.Task("work", needs=["x"])])
        table.put(Stream(FRAME))
        batch = table.lease("work", rows=3)
        assert pa.table(batch)["x"].to_pylist() == [1, 2, 3]
        assert re.search("<td>x</td>", batch._repr_html_())
        batch.release()
