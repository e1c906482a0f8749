"""A table of a snapshot, read without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue.adapters.snapshots import read_table
from transferqueue.errors import Corruption, NotFound


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path))
    with tq.connect() as queue:
        table = queue.create_table("rollouts", tasks=[tq.Task("train", needs=["rewards"])], retention=tq.Manual())
        queue.create_table("empty", fields=[tq.Field("x", "int64", (None,)), tq.Field("y", "float32")])
        rows = table.put(
            prompt_ids=tq.Repeat([[1, 2], [3]], 2), text=["a", "b", "c", "d"], fate=[7, 8, 9, 10], policy_version=5
        )
        table.update(rows[:3], rewards=[0.5, 1.0, 1.5])
        table.update(rows[1:2], notes=[{"a": 1}])
        with table.lease("train", rows=1):
            pass
        return Path(queue.snapshot("run")[0])


def test_what_is_not_there_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no snapshot"):
        read_table(tmp_path / "other", "rollouts")
    with pytest.raises(NotFound, match=r"table 'rows' is not in snapshot .*; it has empty, rollouts"):
        read_table(path, "rows")
    with pytest.raises(NotFound, match=r"fields \['reward'\] are not in table .* rewards"):
        read_table(path, "rollouts", fields=["reward", "text"])


def test_a_file_that_is_not_as_it_was_written_is_refused(path: Path) -> None:
    file = path / "tables" / "0" / "field-0.arrow"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(Corruption, match=r"field-0.arrow changed after it was written"):
        read_table(path, "rollouts", fields=["text"])


def test_facts_fields_and_tasks(path: Path) -> None:
    rows = read_table(path.parent, "rollouts")  # the newest there
    assert rows["prompt_ids"].to_pylist() == [[1, 2], [1, 2], [3], [3]]
    assert rows["text"].to_pylist() == ["a", "b", "c", "d"]
    assert rows["rewards"].to_pylist() == [0.5, 1.0, 1.5, None]
    assert [value is None for value in rows["notes"].to_pylist()] == [True, False, True, True]
    assert rows["policy_version"].to_pylist() == [5] * 4
    assert rows["fate"].to_pylist() == ["done", "live", "live", "live"]  # the fact
    assert rows["field/fate"].to_pylist() == [7, 8, 9, 10]
    assert len(set(rows["task/train/state"].to_pylist())) == 3  # done, ready, and one lacks its reward
    some = read_table(path, "rollouts", fields=["rewards", "text"])
    assert {"prompt_ids", "notes", "field/fate"} & set(some.column_names) == set()
    assert {"rewards", "text", "row_id", "task/train/order"} <= set(some.column_names)


def test_a_table_without_rows(path: Path) -> None:
    rows = read_table(path, "empty")
    assert rows.num_rows == 0
    assert {"x", "y", "row_id"} <= set(rows.column_names)
