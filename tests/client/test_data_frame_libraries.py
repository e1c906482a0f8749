"""Frames of polars, pandas, duckdb and datasets go in, and batches come out as theirs. `make test-others` has them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import transferqueue as tq
from tests.markdown import ROOT, blocks

MISSING = [name for name in ("polars", "pandas", "duckdb", "datasets") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: make test-others"),
]

CHATS = [[{"role": "user", "content": "2+2"}], [{"role": "user", "content": "3"}, {"role": "tool", "content": None}]]
COLUMNS: dict[str, Any] = {"x": [1, 2], "text": ["a", "b"], "ids": [[1], [2, 3]], "chat": CHATS, "key": ["k", "l"]}


def polars_frame() -> Any:
    polars = importlib.import_module("polars")
    return polars.DataFrame(COLUMNS).with_columns(kind=polars.Series(["u", "v"], dtype=polars.Categorical))


def polars_chunks() -> Any:
    polars = importlib.import_module("polars")
    frame = polars_frame()
    return polars.concat([frame[:1], frame[1:]], rechunk=False)


def pandas_frame() -> Any:
    pandas = importlib.import_module("pandas")
    return pandas.DataFrame(COLUMNS | {"kind": pandas.Categorical(["u", "v"])}, index=[7, 9])


def duckdb_result() -> Any:
    return importlib.import_module("duckdb").from_arrow(polars_frame().to_arrow())


def dataset() -> Any:
    return importlib.import_module("datasets").Dataset.from_dict(COLUMNS | {"kind": ["u", "v"]}).with_format("arrow")[:]


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


@pytest.mark.parametrize("make", [polars_frame, polars_chunks, pandas_frame, duckdb_result, dataset])
def test_a_frame_is_put_whole(queue: tq.Queue, make: Callable[[], Any]) -> None:
    table = queue.create_table("frames")
    with table.read(table.put(make())) as read:
        assert {name: column.list() for name, column in read.items()} == {
            name: column for name, column in (COLUMNS | {"kind": ["u", "v"]}).items() if name != "key"
        }
        assert read.keys == ["k", "l"]


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_columns_and_nulls(queue: tq.Queue, library: str) -> None:
    series: Callable[[list[Any]], Any] = importlib.import_module(library).Series
    table = queue.create_table("columns")
    rows = table.put(x=series([1, 2]), text=series(["a", "b"]), key=series(["k", "l"]), policy_version=series([3, 4]))
    table.update(rows, y=series([0.5, 1.5]), priority=series([1.0, 2.0]))
    with table.read(rows) as read:
        assert (read["text"].list(), read["y"].list(), read.keys) == (["a", "b"], [0.5, 1.5], ["k", "l"])
    with pytest.raises(tq.SchemaError, match='field "y": 1 nulls, the first in row 1'):
        table.put(x=[1, 2], y=series([1.0, None]))
    with pytest.raises(tq.SchemaError, match=r"Series cannot be read as an Arrow table: .*put\(name=column\)"):
        table.put(series([1]))


def test_what_has_no_arrow_is_refused_with_the_way(queue: tq.Queue) -> None:
    table = queue.create_table("refused")
    for frame in (importlib.import_module("datasets").Dataset.from_dict({"x": [1]}), polars_frame().lazy()):
        with pytest.raises(tq.UsageError, match=r"which is no table; .*with_format"):
            table.put(frame)


def test_pandas_does_not_get_the_names_of_the_columns(queue: tq.Queue) -> None:
    pandas = importlib.import_module("pandas")
    table = queue.create_table("out")
    table.put(x=[1, 2], text=["a", "b"])
    with table.read() as read:
        with pytest.raises(tq.UsageError, match=r"pandas\.DataFrame\.from_arrow\(batch\)"):
            pandas.DataFrame(read)
        assert pandas.DataFrame.from_arrow(read).to_dict("list") == {"x": [1, 2], "text": ["a", "b"]}
        assert pandas.Series.from_arrow(read["x"]).tolist() == [1, 2]


def test_the_recipe_runs(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs" / "how-to" / "data-frames.md")
    (at,) = [number for number, block in enumerate(page) if block.info == "py" and "polars.DataFrame" in block.code]
    code = page[at - 1].code + page[at].code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
