# ruff: noqa: E402  (imports after a check that they are there)
"""Samples by key to a directory and back: what is there stays, what is damaged changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

from tests.storage.values_of_stacks import same
from transferqueue.adapters import transfer_queue as shim
from transferqueue.errors import AlreadyExists, Corruption, SchemaError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    shim.init({"controller": {"polling_mode": True}})
    yield
    shim.close()


GIVEN: dict[str, Any] = {"pixel_values": torch.ones(2, 3), "grid": (1, 2)}


def fill() -> None:
    for number, key in enumerate("abc"):
        fields = {"ids": torch.arange(number + 1), "inputs": {**GIVEN, "number": number}}
        shim.kv_put(key, "train", fields, tag={"n": number, "pair": (number,)})
    shim.kv_put("a", "train", {"reward": torch.tensor(0.5)})


def ids(key: str) -> list[int]:
    (row,) = shim.kv_batch_get([key], "train", ["ids"])["ids"].unbind()
    return list(row.tolist())


def test_chosen_samples_come_back_beside_what_is_there(tmp_path: Path) -> None:
    fill()
    shim.dump_data_by_key(tmp_path / "dump", ["a", "c"], "train")
    shim.kv_clear("a", "train")
    shim.kv_put("b", "train", {"ids": torch.tensor([7])}, tag={"n": 70})
    shim.kv_put("c", "train", {"ids": torch.tensor([8]), "later": torch.tensor(1.0)}, tag={"other": 1})
    assert shim.load_data_by_key(tmp_path / "dump") == {"partition_id": "train", "keys": 2}
    assert [ids(key) for key in "abc"] == [[0], [7], [0, 1, 2]]
    assert shim.kv_batch_get(["a"], "train", ["reward"])["reward"].tolist() == [0.5]
    assert shim.kv_batch_get(["c"], "train", ["later"])["later"].tolist() == [1.0]
    (found,) = shim.kv_batch_get(["c"], "train", ["inputs"])["inputs"].tolist()
    assert same(found, {**GIVEN, "number": 2})
    assert shim.kv_list("train")["train"] == {
        "a": {"n": 0, "pair": (0,)},
        "b": {"n": 70, "pair": (1,)},
        "c": {"n": 2, "pair": (2,), "other": 1},
    }


def test_the_index_of_a_dump_needs_no_service(tmp_path: Path) -> None:
    fill()
    shim.dump_data_by_key(tmp_path / "dump", ["c", "a"], "train")
    shim.dump_data_by_key(tmp_path / "empty", [], "train")
    shim.close()
    index = shim.read_row_index(tmp_path / "dump")
    assert index["partition_id"] == "train"
    assert dict(zip(index["keys"], index["tags"], strict=True)) == {
        "a": {"n": 0, "pair": (0,)},
        "c": {"n": 2, "pair": (2,)},
    }
    assert index["fields"] == {"a": ["ids", "inputs", "reward"], "c": ["ids", "inputs"]}
    assert shim.read_row_index(tmp_path / "empty") == {"partition_id": "train", "keys": [], "tags": [], "fields": {}}


def test_what_cannot_be_dumped_or_loaded_is_refused(tmp_path: Path) -> None:
    fill()
    with pytest.raises(ValueError, match=r"keys \['x'\] not found"):
        shim.dump_data_by_key(tmp_path / "dump", ["a", "x"], "train")
    shim.dump_data_by_key(tmp_path / "dump", ["a"], "train")
    with pytest.raises(AlreadyExists, match="a dump never changes one; name a new directory"):
        shim.dump_data_by_key(tmp_path / "dump", ["b"], "train")
    shim.get_client().clear_partition("train")
    shim.kv_put("a", "train", {"ids": torch.ones(2)})
    with pytest.raises(SchemaError, match=r'field "ids" is int64.* in the dump, and float32'):
        shim.load_data_by_key(tmp_path / "dump")
    (file,) = (tmp_path / "dump" / "storage").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(Corruption, match="take another checkpoint"):
        shim.load_data_by_key(tmp_path / "dump")
    assert ids("a") == [1.0, 1.0]
