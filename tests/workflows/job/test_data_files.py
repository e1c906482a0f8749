"""Data files: the rows of every kind are the same, and what is broken is refused by name."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from transferqueue.errors import Impossible, NotFound, UsageError
from transferqueue.workflows.job.data import data_rows, files
from transferqueue.workflows.job.data.files import open_data

ROWS = [{"question": f"{n}+1?", "answer": n + 1, "more": {"n": n, "list": [n]}} for n in range(5)]


def stream(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)


def ipc_file(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)


def lines(path: Path, values: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in values))


def write(path: Path, values: list[dict] = ROWS) -> Path:
    table = pa.Table.from_pylist(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    writers = {
        ".parquet": lambda: pyarrow.parquet.write_table(table, path, row_group_size=2),
        ".arrow": lambda: stream(path, table),
        ".ipc": lambda: ipc_file(path, table),
        ".feather": lambda: pyarrow.feather.write_feather(table, path),
        ".jsonl": lambda: lines(path, values),
        ".json": lambda: path.write_text(json.dumps(values)),
    }
    writers[path.suffix]()
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".ipc", ".feather", ".jsonl", ".json"])
def test_every_kind_gives_the_same_rows(tmp_path, suffix):
    data = open_data(write(tmp_path / f"some{suffix}"))
    assert data.columns == ("question", "answer", "more")
    chosen = data.select(["more", "answer"])
    assert (len(chosen), chosen.columns) == (5, ("more", "answer"))
    assert [chosen.row(at) for at in range(5)] == [{"more": row["more"], "answer": row["answer"]} for row in ROWS]
    assert chosen.first_missing("more") is None
    assert str(tmp_path) in chosen.place(3)
    with pytest.raises(NotFound, match='has no column "solution"; it has answer, more, question'):
        data.select(["solution"])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl", ".json"])
def test_the_first_row_without_a_value_is_found(tmp_path, suffix):
    values = [*ROWS[:3], ROWS[3] | {"answer": None}, ROWS[4]]
    data = open_data(write(tmp_path / f"some{suffix}", values))
    assert data.first_missing("answer") == 3
    assert data.first_missing("question") is None


def test_several_files_are_one_data_set_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[2:])
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("about the data")
    data = open_data(tmp_path).select(["answer"])
    assert [data.row(at)["answer"] for at in range(len(data))] == [1, 2, 3, 4, 5]
    assert data.place(2).endswith("train-00001-of-00002.parquet, row 0")
    assert len(open_data(tmp_path, split="test")) == 1
    with pytest.raises(NotFound, match='has no split "validation": it has test, train'):
        open_data(tmp_path, split="validation")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("gsm8k_test.jsonl", "test"),
        ("dev.jsonl", "validation"),
        ("train_sft-00000-of-00001.jsonl", "train_sft"),
        ("train/part-0.jsonl", "train"),
        ("train/data-00000-of-00002.jsonl", "train"),
        ("data-00000-of-00002.jsonl", "train"),
        ("main/train-00000-of-00001.jsonl", "train"),
        ("prompts.jsonl", "train"),
    ],
)
def test_names_of_files_tell_the_split(tmp_path, name, split):
    write(tmp_path / name)
    assert len(open_data(tmp_path, split=split)) == 5


def test_several_data_sets_in_one_directory_are_not_mixed(tmp_path):
    for folder in ("main", "socratic"):
        write(tmp_path / folder / "train-00000-of-00001.jsonl")
    with pytest.raises(
        UsageError, match=r'has the split "train" in several folders: main, socratic; give the path of one'
    ):
        open_data(tmp_path)
    assert len(open_data(tmp_path / "main")) == 5
    for part in ("a", "b"):
        write(tmp_path / "parts" / "train" / part / "0.jsonl")
    assert len(open_data(tmp_path / "parts")) == 10


def test_files_of_one_directory_must_have_the_same_columns_and_kind(tmp_path):
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", [{"question": "?"}])
    with pytest.raises(NotFound, match=r'b.jsonl has no column "answer"; it has question'):
        open_data(tmp_path).select(["question", "answer"])
    write(tmp_path / "c.parquet")
    with pytest.raises(UsageError, match=r"files of several kinds: .jsonl, .parquet"):
        open_data(tmp_path)


def save(path: Path, values: list[dict]) -> None:
    """As datasets.save_to_disk does."""
    write(path / "data-00000-of-00002.arrow", values[:2])
    write(path / "data-00001-of-00002.arrow", values[2:])
    write(path / "cache-1234.arrow", values)
    listed = [{"filename": f"data-0000{n}-of-00002.arrow"} for n in range(2)]
    (path / "state.json").write_text(json.dumps({"_data_files": listed, "_fingerprint": "x", "_split": None}))
    (path / "dataset_info.json").write_text("{}")


def test_what_datasets_saved_is_read_without_datasets(tmp_path):
    save(tmp_path / "one", ROWS)
    assert len(open_data(tmp_path / "one", split="anything")) == 5
    save(tmp_path / "dict" / "train", ROWS)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    data = open_data(tmp_path / "dict")
    assert [data.row(at) for at in range(5)] == ROWS
    with pytest.raises(NotFound, match='no split "test"; it has train'):
        open_data(tmp_path / "dict", split="test")


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ('{"_data_files": [{"filename": "../out.arrow"}]}', "is not a name in this directory"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "lists gone.arrow, which is not there"),
        ('{"_data_files": []}', "has no rows"),
        ('{"_data_files": 3}', "is not what datasets.save_to_disk writes"),
        ("{", "is not what datasets.save_to_disk writes"),
        ('{"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "b"}]}', "flatten_indices"),
    ],
)
def test_a_saved_directory_that_is_broken_is_refused(tmp_path, state, match):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UsageError, match=match):
        open_data(tmp_path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": 1}\n{"a": 2\n', r"line 2 is not JSON: .*one object a line: '\{\"a\": 2'"),
        ('{"a": 1}\n\n[1]\n', "line 3 is list; a row is an object"),
        ('{"a": "\xff"}'.encode("latin-1"), "line 1 is not JSON"),
        ("\n \n", "has no rows"),
        ("", "has no rows"),
        ('[{"a": 1}, 2]', "is not a JSON array of objects"),
        ('[{"a": 1},', "is not a JSON array of objects"),
        ("[]", "has no rows"),
    ],
)
def test_broken_json_is_refused_with_its_line(tmp_path, text, match):
    path = tmp_path / "some.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=match):
        open_data(path)


def test_json_with_a_mark_of_byte_order_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')
    data = open_data(tmp_path / "a.jsonl").select(["a"])
    assert [data.row(0), data.row(1)] == [{"a": 1}, {"a": 2}]
    (tmp_path / "b.json").write_bytes(b'\xef\xbb\xbf [{"a": 1}]')
    assert open_data(tmp_path / "b.json").row(0) == {"a": 1}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".ipc"])
@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_a_file_that_was_cut_is_refused_by_name(tmp_path, suffix, keep):
    path = write(tmp_path / f"some{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(UsageError, match=f"some{suffix}"):
        open_data(path).select(["question"])


def test_paths_that_are_no_data_are_refused(tmp_path):
    with pytest.raises(NotFound, match="there is no such file or directory; a data set of the hub is given by its id"):
        open_data(tmp_path / "gone")
    with pytest.raises(NotFound, match=r"has no data files; it has none; read are Parquet"):
        open_data(tmp_path)
    (tmp_path / "some.xml").write_text("a,b")
    with pytest.raises(UsageError, match=r"ends in '.xml'; read are Parquet"):
        open_data(tmp_path / "some.xml")
    with pytest.raises(NotFound, match=r"has no data files; it has some.xml"):
        open_data(tmp_path)
    write(tmp_path / "none.parquet", [{"a": 1}])
    pyarrow.parquet.write_table(pa.table({"a": []}), tmp_path / "none.parquet")
    with pytest.raises(UsageError, match="has no rows"):
        open_data(tmp_path / "none.parquet")


def test_sizes_are_bounded_before_anything_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a" / "some.parquet")
    monkeypatch.setattr(data_rows, "PARQUET_BYTES_MAX", 50)
    with pytest.raises(Impossible, match=r"columns answer, more, question decode to .* write the data as Arrow IPC"):
        open_data(path).select(["question", "answer", "more"])
    write(tmp_path / "a" / "other.parquet")
    with pytest.raises(Impossible, match=r"columns more of 2 Parquet files decode to"):
        open_data(tmp_path / "a").select(["more"])
    write(tmp_path / "c.json")
    monkeypatch.setattr(data_rows, "JSON_BYTES_MAX", 10)
    with pytest.raises(Impossible, match="is one JSON array of"):
        open_data(tmp_path / "c.json")
    monkeypatch.setattr(data_rows, "COLUMNS_MAX", 2)
    with pytest.raises(UsageError, match="over 2 different keys"):
        open_data(write(tmp_path / "d.jsonl"))
    monkeypatch.setattr(data_rows, "LINE_BYTES_MAX", 64)
    with pytest.raises(UsageError, match="line 1: over"):
        open_data(write(tmp_path / "b.jsonl", [{"a": "x" * 100}]))
    monkeypatch.setattr(files, "FILES_MAX", 1)
    with pytest.raises(UsageError, match="has 2 files, over 1"):
        open_data(tmp_path / "a")
    monkeypatch.setattr(files, "ENTRIES_MAX", 1)
    with pytest.raises(UsageError, match="over 1 entries"):
        open_data(tmp_path / "a")


# ---------------------------------------------------------------- CSV and ids of the hub


def test_each_value_of_a_csv_file_is_a_text_and_an_empty_one_is_none(tmp_path):
    (tmp_path / "some.csv").write_text('id,answer\n007,"one, ""two""\nthree"\n1.50,\n')
    data = open_data(tmp_path / "some.csv").select(["id", "answer"])
    assert [data.row(at) for at in range(len(data))] == [
        {"id": "007", "answer": 'one, "two"\nthree'},
        {"id": "1.50", "answer": None},
    ]
    assert data.first_missing("answer") == 1
    (tmp_path / "some.tsv").write_text("a\tb\n1,5\t2\n")
    assert open_data(tmp_path / "some.tsv").row(0) == {"a": "1,5", "b": "2"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "cannot be read as a CSV file"),
        ("a,a\n1,2\n", "names a column twice"),
        ("a;b\n1;2\n", r"has one column, 'a;b': its values are not separated by commas"),
        ("a,b\n1,2\n1,2,3\n", r"Row #3: Expected 2 columns, got 3"),
        ("a,b\n" + "1,2\n" * 400_000 + "1\n", r"Row #400002: Expected 2 columns, got 1"),
    ],
    ids=["empty", "twice", "semicolons", "long row", "late row"],
)
def test_a_csv_file_that_is_none_is_refused_with_the_row(tmp_path, text, match):
    (tmp_path / "some.csv").write_text(text)
    with pytest.raises(UsageError, match=match):
        open_data(tmp_path / "some.csv")


def test_a_csv_file_is_bounded_before_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "some.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(data_rows, "JSON_BYTES_MAX", 4)
    with pytest.raises(Impossible, match="write it as Parquet"):
        open_data(tmp_path / "some.csv")


def test_an_id_of_the_hub_needs_the_library_and_a_path_has_no_subset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"data.path openai/gsm8k is no path here, and .* needs the library datasets"):
        open_data("openai/gsm8k", subset="main")
    (tmp_path / "openai").mkdir()
    with pytest.raises(UsageError, match=r"data.subset='main' with data.path openai/gsm8k, which is no id of the hub"):
        open_data("openai/gsm8k", subset="main")
    with pytest.raises(NotFound, match=r"data.path openai/gsm8k: there is no such file or directory"):
        open_data("openai/gsm8k")
