"""A snapshot in polars and duckdb."""

from __future__ import annotations

from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue.adapters.snapshots import read_table

polars = pytest.importorskip("polars", reason="make test-engines installs it")
duckdb = pytest.importorskip("duckdb", reason="make test-engines installs it")


def test_polars_and_duckdb_read_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path))
    with tq.connect() as queue:
        table = queue.create_table("rollouts", tasks=[tq.Task("train")])
        rows = table.put(prompt_ids=tq.Repeat([[1, 2], [3]], 2), text=["a", "b", "c", "d"])
        table.update(rows[:3], rewards=[0.5, 1.0, 1.5])
        (path,) = queue.snapshot("run")
    found = read_table(path, "rollouts")
    frame = polars.from_arrow(found)
    assert frame["rewards"].sum() == 3.0
    assert frame["prompt_ids"].list.len().to_list() == [2, 2, 1, 1]
    with duckdb.connect() as connection:
        connection.register("rows", found)
        query = "select fate, max(text), sum(rewards), sum(len(prompt_ids)) from rows group by fate"
        assert connection.sql(query).fetchall() == [("live", "d", 3.0, 6)]
