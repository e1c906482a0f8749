"""The files of ended rows and their reader: damage is named and the rest is read, bounds hold, SQL only reads."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import transferqueue as tq
from tests.client.test_recorded import wait_until_recorded
from tests.markdown import ROOT, blocks
from transferqueue.cli.app import app
from transferqueue.cli.app import run as command
from transferqueue.cli.commands.looking.query import check_names
from transferqueue.storage.row_files import files

STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> tq.Run:
    """A record of four steps of 100 rows, a file each: each fills so much of the table that its rows wait for none."""
    with tq.connect("embedded") as queue:
        tasks = [tq.Task("train", needs=["ids"])]
        limits = tq.Limits(rows=800)
        table = queue.create_table("a/b", tasks=tasks, limits=limits, retention=tq.Recorded(str(tmp_path)))
        for step in range(STEPS):
            table.put(ids=[list(range(step, step + n % 7)) for n in range(100)], reward=[float(step)] * 100)
            table.lease("train", rows=100).ack(step=step)
            table.checkpointed(step)
            wait_until_recorded(table, 100 * (step + 1))
    return tq.open_run(tmp_path)


def change_a_value(path: Path) -> None:
    """Flip a bit in the last page of the rewards."""
    group = pq.read_metadata(path).row_group(0)
    (column,) = (c for at in range(group.num_columns) if (c := group.column(at)).path_in_schema == "reward")
    first = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(path.read_bytes())
    data[first + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)


def test_files_are_in_the_order_in_which_their_rows_ended(run: tq.Run) -> None:
    assert run.tables == ["a/b"]
    assert [set(pq.read_table(path)["_step"].to_pylist()) for path in run.table().files] == [{0}, {1}, {2}, {3}]
    assert run.table("a/b").arrow(["_step"])["_step"].to_pylist() == [step for step in range(STEPS) for _ in range(100)]


def test_the_folder_of_a_jobs_run_opens_the_tables_in_its_rows(run: tq.Run, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rows").mkdir()
    (tmp_path / "a%2Fb").rename(tmp_path / "job" / "rows" / "a%2Fb")
    assert tq.open_run(tmp_path / "job").tables == ["a/b"]


def test_a_table_whose_files_are_gone_is_one_without_rows(run: tq.Run) -> None:
    for path in run.table().files:
        path.unlink()
    assert (run.tables, run.table().arrow(["_row", "_step"]).num_rows) == (["a/b"], 0)


def test_a_cut_file_is_named_and_the_rest_is_read(run: tq.Run) -> None:
    rows = run.table()
    cut = rows.files[1]
    os.truncate(cut, cut.stat().st_size - 100)
    assert rows.arrow(["_row"]).num_rows == 300
    (damage,) = rows.damaged
    assert (damage.file, damage.row_group) == (cut, None)
    assert "was cut or overwritten" in str(damage)


def test_a_changed_page_is_named_by_its_row_group(run: tq.Run) -> None:
    rows = run.table()
    changed = rows.files[2]
    change_a_value(changed)
    found = rows.arrow()
    assert found.num_rows == 300
    (damage,) = rows.damaged
    assert (damage.file, damage.row_group) == (changed, 0)


def test_a_changed_footer_is_refused(run: tq.Run) -> None:
    rows = run.table()
    data = bytearray(rows.files[0].read_bytes())
    data[-40] ^= 1
    rows.files[0].write_bytes(data)
    assert rows.arrow(["reward"]).num_rows == 300
    assert "its footer does not match its name" in str(rows.damaged[0])


def test_the_oldest_files_go_first(run: tq.Run) -> None:
    rows = run.table()
    sizes = [path.stat().st_size for path in rows.files]
    for age, path in enumerate(reversed(rows.files)):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert files.remove_old(rows.files[0].parent, sizes[2] + sizes[3], None) == 2
    assert rows.arrow(["_step"])["_step"].unique().to_pylist() == [2, 3]
    assert files.remove_old(rows.files[0].parent, 1, None) == 1  # the newest is larger than the bound
    assert files.remove_old(rows.files[0].parent, None, 60.0) == 1
    assert rows.arrow(["_row"]).num_rows == 0


def test_bad_names_say_what_there_is(run: tq.Run, tmp_path: Path) -> None:
    with pytest.raises(tq.NotFound, match=r'table "c" has no files in .*; it has a/b'):
        run.table("c")
    with pytest.raises(tq.NotFound, match=r'column "rewards" is not in the record of "a/b"; it has _attempts, '):
        run.table().arrow(["rewards"])
    with pytest.raises(tq.NotFound, match="is no directory"):
        tq.open_run(tmp_path / "none")


def test_frames_of_others_take_it(run: tq.Run) -> None:
    polars = pytest.importorskip("polars")
    assert polars.from_arrow(run.table().arrow(["reward"]))["reward"].sum() == 600.0
    assert run.table().arrow(["reward"]).to_pandas()["reward"].sum() == 600.0


# ---------------------------------------------------------------- SQL


def test_sql_reads_and_only_reads(run: tq.Run, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    answer = run.sql('select _step, sum(len(ids)) as tokens from "a/b" where _step > 1 group by 1 order by 1')
    assert answer.to_pylist() == [{"_step": 2, "tokens": 295}, {"_step": 3, "tokens": 295}]
    for refused, why in {
        'delete from "a/b"': "the query is DELETE; give one SELECT",
        "select 1; select 2": "the query is SELECT, SELECT; give one SELECT",
        f"copy (select 1) to '{tmp_path}/x.csv'": "the query is COPY; give one SELECT",
        "select * from read_csv('/etc/passwd')": "the query failed: Permission Error",
        "select * from nothing": "the query failed: Catalog Error",
        "select": "the query failed: Parser Error",
        "": "the query is nothing; give one SELECT",
    }.items():
        with pytest.raises(tq.UsageError, match=why):
            run.sql(refused)
    assert not (tmp_path / "x.csv").exists()


def test_the_three_questions_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give what the page prints, and its Python runs."""
    pytest.importorskip("duckdb")
    monkeypatch.chdir(tmp_path)
    page = blocks(ROOT / "docs" / "how-to" / "record.md")
    (made,) = (block.code for block in page if block.info == "python")
    exec(compile(made, "record.md", "exec"), {})  # noqa: S102  (the page)
    asked = [(one.code, told.code) for one, told in pairwise(page) if (one.info, told.info) == ("sql", "text")]
    assert len(asked) == 3
    for question, answer in asked:
        said = CliRunner().invoke(app, ["query", "record", question])
        assert said.exit_code == 0, said.output
        assert [line.rstrip() for line in said.stdout.splitlines()] == answer.splitlines()
    if find_spec("polars") and find_spec("datasets"):
        (read,) = (block.code for block in page if block.info == "py")
        exec(compile(read, "record.md", "exec"), {})  # noqa: S102  (the page)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_query_whose_columns_have_one_name_is_refused(
    form: list[str], run: tq.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.chdir(run.path)
    joined = 'from "a/b" a join "a/b" b on a._row = b._row order by a._row limit 1'
    assert command(["query", ".", f"select a._row, b._row {joined}", *form]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "name them, select a._row as a, b._row as b, or {'row': _row, 'step': _step}" in said.err
    named = "a._row as a, b._row as b, {'row': a._row, 'step': b._step} as c"
    assert command(["query", ".", f"select {named} {joined}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"a": 0, "b": 0, "c": {"row": 0, "step": 0}}]


def test_struct_fields_of_one_name_are_refused_at_any_depth() -> None:
    """DuckDB before 2.0 gives the fields of `row(_row, _step)` no names."""
    twice, named = (pa.struct([(name, pa.int64()) for name in names]) for names in (["", ""], ["row", "step"]))
    for kind in (twice, pa.list_(twice), pa.map_(pa.int64(), twice), pa.struct([("x", pa.list_(twice))])):
        with pytest.raises(tq.UsageError, match="two columns or struct fields with one name"):
            check_names(pa.schema([("x", kind)]))
    check_names(pa.schema([("x", named), ("y", pa.list_(pa.map_(pa.int64(), named)))]))


def test_sql_leaves_out_what_is_damaged(run: tq.Run) -> None:
    pytest.importorskip("duckdb")
    change_a_value(run.table().files[2])
    assert run.sql('select count(reward) as n, max(reward) as most from "a/b"').to_pylist() == [{"n": 300, "most": 3.0}]
    assert [damage.row_group for damage in run.damaged] == [0]


def test_a_wrong_query_reads_no_file(run: tq.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.setattr(tq.RecordedRows, "_check_named", lambda *_: pytest.fail("the record is checked"))
    for wrong in ('select nope from "a/b"', """select cast(_fate as int) from "a/b" """):
        with pytest.raises(tq.UsageError, match=r"the query failed: (Binder|Conversion) Error"):
            run.sql(wrong)


def test_a_file_that_is_removed_during_a_read_has_nothing_checked(run: tq.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, whole = run.table(), tq.RecordedRows.dataset
    monkeypatch.setattr(tq.RecordedRows, "_check_named", lambda *_: pytest.fail("the record is checked"))
    for read, left in (
        (lambda: rows.arrow(["reward"]).num_rows, 300),
        (lambda: run.sql('select count(reward) as n from "a/b"').to_pylist()[0]["n"], 200),
    ):
        if left == 200:
            pytest.importorskip("duckdb")
        oldest = rows.files[0]

        def removed(self: tq.RecordedRows, oldest: Path = oldest) -> Any:
            found = whole(self)
            oldest.unlink(missing_ok=True)
            return found

        monkeypatch.setattr(tq.RecordedRows, "dataset", removed)
        assert read() == left


def test_sql_refuses_names_that_differ_in_case_alone(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with tq.connect("embedded") as queue:
        for name, fields in {"A": ["x"], "a": ["x"], "b": ["y", "Y"]}.items():
            table = queue.create_table(name, tasks=[tq.Task("t")], retention=tq.Recorded(str(tmp_path / name[0])))
            table.put(**{field: [1] for field in fields})
            table.drop([0], reason="over")
    (tmp_path / "a" / "a").rename(tmp_path / "A" / "a")
    for directory, names in {"A": '"A" and "a"', "b": '"y" and "Y"'}.items():
        with pytest.raises(tq.UsageError, match=f"SQL cannot tell {names} of .* apart, since it ignores case"):
            tq.open_run(tmp_path / directory).sql("select 1")


def test_sql_writes_nothing_and_loads_nothing(run: tq.Run) -> None:
    """A query that exceeds its memory fails; it does not go on in the working directory."""
    pytest.importorskip("duckdb")
    names = ["temp_directory", "autoinstall_known_extensions", "autoload_known_extensions"]
    answer = run.sql("select " + ", ".join(f"current_setting('{name}')::varchar as {name}" for name in names))
    assert list(answer.to_pylist()[0].values()) == ["", "false", "false"]


def test_half_floats_are_asked_as_floats(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    halves = np.array([1.5, 6e-8], np.float16)
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("a")], retention=tq.Recorded(str(tmp_path)))
        table.put(
            one=halves,
            ragged=[halves, halves[:1]],
            fixed=halves.reshape(2, 1),
            deep=[halves.reshape(1, 2)] * 2,
            x=[1, 2],
        )
        table.drop([0, 1], reason="over")
    answer = tq.open_run(tmp_path).sql("select * from t where one > 1 and x = 1").to_pylist()
    tiny = float(halves[1])
    assert [(row["one"], row["ragged"], row["fixed"], row["deep"]) for row in answer] == [
        (1.5, [1.5, tiny], [1.5], [[1.5, tiny]])
    ]


def test_values_of_a_query_are_values_and_never_sql(run: tq.Run) -> None:
    pytest.importorskip("duckdb")
    counted = 'select count(*) as n from "a/b" where _step >= ? and reward <= ?'
    assert run.sql(counted, [1, 2.0]).to_pylist() == [{"n": 200}]
    assert run.sql('select ? as text from "a/b" limit 1', ["' or 1=1 --"]).to_pylist() == [{"text": "' or 1=1 --"}]
    with pytest.raises(tq.UsageError, match="the query failed"):
        run.sql(counted, [1])


def test_a_query_ends_at_its_deadline(run: tq.Run) -> None:
    pytest.importorskip("duckdb")
    endless = 'select count(*) from "a/b" a, "a/b" b, "a/b" c, "a/b" d where a._row + b._row + c._row + d._row = -1'
    with pytest.raises(tq.DeadlineExceeded, match=r"longer than timeout_s=0\.2; name _step or _fate in where"):
        run.sql(endless, timeout_s=0.2)
    assert run.sql('select count(*) as n from "a/b"', timeout_s=60).to_pylist() == [{"n": 400}]


@pytest.mark.slow
def test_no_changed_bit_goes_unseen(run: tq.Run) -> None:
    """`check` names the file, wherever in it the bit is."""
    path = run.table().files[0]
    whole = path.read_bytes()
    for at in range(0, len(whole), 397):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert {damage.file for damage in tq.open_run(run.path).table().check()} == {path}, at
    path.write_bytes(whole)
    assert tq.open_run(run.path).table().check() == []


@pytest.mark.skipif(find_spec("duckdb") is not None, reason="DuckDB is installed")
def test_sql_says_what_to_install(run: tq.Run) -> None:
    with pytest.raises(tq.UsageError, match=r"SQL needs DuckDB: pip install .*\[query\].*open_run\(PATH\)"):
        run.sql("select 1")


def test_tables_of_folders_with_quotes_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])], retention=tq.Recorded(str(tmp_path)))
        table.put(x=[1, 2])
        table.lease("train", rows=2).ack(step=1)
        table.checkpointed(1)
    (tmp_path / "t").rename(tmp_path / "its%20%22%27")
    said = CliRunner().invoke(app, ["query", str(tmp_path), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout) == [{"table": "its \"'", "rows": 2, "steps": 1}]
