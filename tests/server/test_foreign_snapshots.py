"""Snapshot files whose checksums are right, and which no server has written: refused with the file and the reason."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

import transferqueue as tq
from tests.damage.restoring import Restorer
from tests.scale import only_long
from transferqueue.adapters.snapshots import read_table
from transferqueue.errors import Corruption
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(SNAPSHOTS_VARIABLE, str(root))
        with tq.connect() as queue:
            table = queue.create_table(
                "t", tasks=[tq.Task("train")], fields=[tq.Field("image", "uint8", (None, None))], extra_fields=True
            )
            table.put(
                ids=[np.arange(n) for n in (1, 2, 3)], text=["a", "b", "c"], plain=[{"a": 1}, {}, {}],
                image=[np.zeros((2, n), np.uint8) for n in (1, 2, 3)], group_id=1, group_size=3, tags=[{"n": 1}] * 3,
            )  # fmt: skip
            queue.snapshot("s")
    return root / "s/000001"


@pytest.fixture
def restorer(tmp_path: Path, original: Path) -> Restorer:
    shutil.copytree(original, tmp_path / "s/000001")
    return Restorer(tmp_path, 1 << 20)


def seal(snapshot: Path, change: Callable[[Any], object] = lambda _: None) -> None:
    """Right checksums for what there is now. change: of the manifest."""
    manifest = json.loads((snapshot / "MANIFEST.json").read_bytes())
    for name, entry in manifest["files"].items():
        data = (snapshot / name).read_bytes()
        entry |= {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
    change(manifest)
    data = json.dumps(manifest).encode()
    (snapshot / "MANIFEST.json").write_bytes(data)
    (snapshot / "MANIFEST.xxh3").write_text(xxhash.xxh3_64_hexdigest(data))


def patch(file: Path, column: str, buffer: int, words: dict[int, int], dtype: type = np.int64) -> None:
    """Write words into a buffer of a column's (only) batch, where it lies in the file."""
    data = bytearray(file.read_bytes())
    source = pa.py_buffer(bytes(data))
    found = pa.ipc.open_file(source).get_batch(0).column(column).buffers()[buffer]
    start = found.address - source.address
    view = np.frombuffer(data, dtype, found.size // np.dtype(dtype).itemsize, start)
    for at, word in words.items():
        view[at] = word
    file.write_bytes(data)


def refused(restorer: Restorer, match: str) -> None:
    before = restorer.state()
    error = restorer.restore("s")
    assert isinstance(error, Corruption)
    assert match in str(error)
    assert str(restorer.root / "s/000001") in str(error)
    assert restorer.state() == before


def file_of(restorer: Restorer, name: str) -> Path:
    snapshot = restorer.root / "s/000001"
    about = json.loads((snapshot / "MANIFEST.json").read_bytes())["about"]["tables"][0]
    return snapshot / f"tables/0/field-{about['placed'].index(name)}.arrow"


@pytest.mark.parametrize("offset", [-1, 1 << 20, *only_long(-(1 << 40), 1 << 40, (1 << 63) - 1)])
@pytest.mark.parametrize("column", ["ids", "text", "plain"])
def test_offsets_outside_the_values(restorer: Restorer, column: str, offset: int) -> None:
    file = file_of(restorer, column)
    patch(file, column, 1, {1: offset})
    seal(restorer.root / "s/000001")
    refused(restorer, "it cannot be read (ArrowInvalid")
    with pytest.raises(Corruption, match="it cannot be read"):
        read_table(restorer.root / "s", "t")


def test_text_that_is_not_utf_8(restorer: Restorer) -> None:
    patch(file_of(restorer, "text"), "text", 2, {0: 0xFF}, np.uint8)
    seal(restorer.root / "s/000001")
    refused(restorer, "UTF8")


def test_plain_values_that_are_not_messagepack(restorer: Restorer) -> None:
    patch(file_of(restorer, "plain"), "plain", 2, {0: 0xC1}, np.uint8)
    seal(restorer.root / "s/000001")
    refused(restorer, "is not MessagePack")


@pytest.mark.parametrize("size", [-1, 7, 1 << 62])
def test_shapes_that_are_not_those_of_the_elements(restorer: Restorer, size: int) -> None:
    patch(file_of(restorer, "image"), "image", 3, {0: size})
    seal(restorer.root / "s/000001")
    refused(restorer, "has the shape")


@pytest.mark.parametrize(
    ("column", "word", "match"),
    [
        ("row_id", 1 << 60, "do not ascend"), ("stamped", -7, "a row has stamped -7, which"),
        ("group_id", 5, "not listed"),
        ("at/ids", 99, "has value 99 of field 'ids', of 3"), ("task/train/order", -1, "has order -1, which is out of"),
        ("tokens", -1, "a row has tokens -1, which"), ("task/train/step", 3, "but was not acked with one"),
    ],
)  # fmt: skip
def test_numbers_of_rows(restorer: Restorer, column: str, word: int, match: str) -> None:
    patch(restorer.root / "s/000001/tables/0/rows.arrow", column, 1, {0: word})
    seal(restorer.root / "s/000001")
    refused(restorer, match)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "tables/0/../../x.arrow", "a\0.arrow"])
def test_names_that_lead_elsewhere(restorer: Restorer, name: str) -> None:
    def add(manifest: Any) -> None:
        manifest["files"][name] = manifest["files"]["tables/0/rows.arrow"]

    seal(restorer.root / "s/000001", add)
    refused(restorer, "which is impossible")


def test_sizes_are_compared_before_anything_is_read(restorer: Restorer) -> None:
    seal(restorer.root / "s/000001", lambda manifest: manifest["files"]["tables/0/rows.arrow"].update(bytes=1 << 50))
    refused(restorer, "bytes instead of")


def test_links_and_pipes_are_no_files(restorer: Restorer, tmp_path: Path) -> None:
    rows = restorer.root / "s/000001/tables/0/rows.arrow"
    rows.rename(tmp_path / "elsewhere")
    rows.symlink_to(tmp_path / "elsewhere")
    refused(restorer, "over a link")
    rows.unlink()
    os.mkfifo(rows)
    refused(restorer, "not a regular file")


def test_directories_and_files_are_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, str(tmp_path / "a/b/root"))
    before = os.umask(0)
    try:
        with tq.connect() as queue:
            queue.create_table("t", tasks=[tq.Task("train")]).put(text=["a"])
            queue.snapshot("run/1")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "a").rglob("*") if one.is_file()}
    assert modes == {0o600}
    modes = {stat.S_IMODE(one.stat().st_mode) for one in [tmp_path / "a", *(tmp_path / "a").rglob("*")] if one.is_dir()}
    assert modes == {0o700}
