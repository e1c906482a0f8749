# ruff: noqa: E402  (imports after a check that they are there)
"""Checkpoints of the drop-in, without Ray: what comes back, and what is refused with nothing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

import pyarrow as pa

from transferqueue.adapters import transfer_queue as shim
from transferqueue.adapters.transfer_queue.checkpoint import arrow_samples as stored
from transferqueue.adapters.transfer_queue.checkpoint import checksummed_json as sealed
from transferqueue.errors import Corruption, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    shim.init({"controller": {"polling_mode": True, "sampler": "RankAwareSampler"}})
    yield
    shim.close()


def fill() -> None:
    """Samples of three shapes of field, some without `reward`, one cleared; two were given to `train`."""
    texts = NonTensorStack("a", {"b": [1, None]}, b"c", "d")
    nested = torch.nested.as_nested_tensor([torch.arange(n) for n in (1, 3, 0, 2)], layout=torch.jagged)
    fields = TensorDict({"ids": nested, "text": texts, "half": torch.ones(4, 2, dtype=torch.bfloat16)}, batch_size=[4])
    tags = [{"n": n, "deep": {"x": [n]}} for n in range(4)]
    shim.kv_batch_put(["k0", "k1", "k2", "k3"], "train/1", fields, tags)
    shim.kv_put("k1", "train/1", {"reward": torch.tensor(0.5)})
    shim.kv_put("k3", "train/1", {"reward": torch.tensor(1.5)})
    shim.kv_clear("k0", "train/1")
    image = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.zeros(1, 5)])
    shim.get_client().put(TensorDict({"image": image}, batch_size=[2]), partition_id="plain")
    assert len(take(0)) == 2


def take(batch_index: int) -> Any:
    config = {"dp_rank": 0, "batch_index": batch_index}
    return shim.get_client().get_meta(["ids"], 2, "train/1", task_name="train", sampling_config=config)


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {"list": shim.kv_list()}
    for keys in (["k1", "k3"], ["k2"]):
        data = shim.kv_batch_get(keys, "train/1")
        found[str(keys)] = {name: [_plain(each) for each in data.get(name)] for name in sorted(data.keys())}
    meta = shim.get_client().get_meta(["image"], 2, "plain", mode="force_fetch")
    image = shim.get_client().get_data(meta)["image"]
    found["image"] = meta.global_indexes, [each.tolist() for each in image.unbind()]
    indexes, given = shim.get_client().get_consumption_status("train", "train/1")
    assert indexes is not None
    assert given is not None
    found["given"] = indexes.tolist(), given.tolist()
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)


def test_all_comes_back_and_others_go(tmp_path: Path) -> None:
    fill()
    before, batch = everything(), take(0).global_indexes
    shim.save_checkpoint(tmp_path / "ck", metadata={"step": 3, "by rank": {10: 1, 9: 2}})
    assert everything() == before
    shim.kv_put("later", "other", {"x": torch.tensor(1)})
    shim.kv_clear("k2", "train/1")
    shim.load_checkpoint(str(tmp_path / "ck"))
    assert everything() == before
    assert take(0).global_indexes == batch, "the sampler remembers what rank 0 was given"
    assert not len(take(1)), "one sample is left, two are asked for"
    shim.kv_put("k9", "train/1", {"ids": torch.tensor([7])})
    assert take(1).global_indexes == [3, 4], "indexes go on where they were"
    assert json.loads((tmp_path / "ck" / "metadata.json").read_text())["user_metadata"]["step"] == 3


def test_a_checkpoint_moves_to_another_service_and_is_replaced(tmp_path: Path) -> None:
    fill()
    before = everything()
    shim.save_checkpoint(tmp_path / "ck")
    shim.save_checkpoint(tmp_path / "ck")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    shim.close()
    shim.init({"controller": {"polling_mode": True, "sampler": "RankAwareSampler"}})
    shim.load_checkpoint(tmp_path / "ck")
    assert everything() == before


@pytest.mark.parametrize("name", ["metadata.json", "controller.json", "storage/manifest.json", "storage/000000.arrow"])
def test_a_damaged_file_is_named_and_nothing_changes(name: str, tmp_path: Path) -> None:
    fill()
    shim.save_checkpoint(tmp_path / "ck")
    path = tmp_path / "ck" / name
    data = path.read_bytes()
    at = len(data) * 2 // 3
    for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
        path.write_bytes(damaged)
        before = everything()
        with pytest.raises(Corruption, match=f"{Path(name).name} .*take another checkpoint"):
            shim.load_checkpoint(tmp_path / "ck")
        assert everything() == before


def test_a_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    fill()
    shim.save_checkpoint(tmp_path / "one")
    shim.get_client().reset_consumption("train/1")
    shim.save_checkpoint(tmp_path / "two")
    shutil.copy(tmp_path / "one" / "controller.json", tmp_path / "two" / "controller.json")
    with pytest.raises(Corruption, match=r"controller\.json"):
        shim.load_checkpoint(tmp_path / "two")


def test_what_is_foreign_or_missing_is_refused(tmp_path: Path) -> None:
    fill()
    before = everything()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        shim.load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"metadata\.json"):
        shim.load_checkpoint(tmp_path)
    (tmp_path / "metadata.json").write_text('{"storage_saved": true}')
    with pytest.raises(UsageError, match="has format None"):
        shim.load_checkpoint(tmp_path)
    assert everything() == before


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is no checkpoint"):
        shim.save_checkpoint(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_metadata_that_is_not_json_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    fill()
    shim.save_checkpoint(tmp_path / "ck", metadata={"step": 1})
    with pytest.raises(UsageError, match="is not JSON"):
        shim.save_checkpoint(tmp_path / "ck", metadata={"step": object()})
    assert json.loads((tmp_path / "ck" / "metadata.json").read_text())["user_metadata"] == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_another_sampler_or_too_small_a_storage_is_refused(tmp_path: Path) -> None:
    fill()
    shim.save_checkpoint(tmp_path / "ck")
    shim.close()
    shim.init({"controller": {"sampler": "SequentialSampler"}})
    with pytest.raises(UsageError, match="memory of a RankAwareSampler"):
        shim.load_checkpoint(tmp_path / "ck")
    shim.close()
    small = {"storage_backend": "SimpleStorage", "SimpleStorage": {"total_storage_size": 2}}
    shim.init({"controller": {"sampler": "RankAwareSampler"}, "backend": small})
    with pytest.raises(UsageError, match="has 3 samples, here one may have 2"):
        shim.load_checkpoint(tmp_path / "ck")
    assert shim.kv_list() == {}


def test_not_initialized() -> None:
    shim.close()
    for call in (shim.save_checkpoint, shim.load_checkpoint):
        with pytest.raises(RuntimeError, match="not initialized"):
            call("anywhere")


class CountingSampler(shim.BaseSampler):
    """A user's sampler, with state outside of `_states`, written for the original."""

    def __init__(self) -> None:
        super().__init__()
        self.handed_out: dict[tuple[str, str], set[int]] = {}

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], ...]:
        chosen = ready_indexes[:batch_size]
        self.handed_out.setdefault((kwargs["partition_id"], kwargs["task_name"]), set()).update(chosen)
        return chosen, chosen

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "handed_out": self.handed_out}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint({"_states": state["_states"]})
        self.handed_out = state["handed_out"]


def test_the_state_of_a_sampler_of_the_user_s_comes_back(tmp_path: Path) -> None:
    shim.close()
    first, second = CountingSampler(), CountingSampler()
    for sampler, step in ((first, "save"), (second, "load")):
        shim.init({"controller": {"sampler": sampler}})
        if step == "save":
            fill()
            shim.get_client().get_meta(["ids"], 2, "train/1", task_name="t")
            shim.save_checkpoint(tmp_path / "ck")
        else:
            shim.load_checkpoint(tmp_path / "ck")
        shim.close()
    assert second.handed_out == first.handed_out
    assert set(first.handed_out) == {("train/1", "train"), ("train/1", "t")}


def test_state_that_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    shim.close()
    sampler = CountingSampler()
    sampler.handed_out = object()  # type: ignore[assignment]
    shim.init({"controller": {"sampler": sampler}})
    with pytest.raises(UsageError, match=r"save_checkpoint\(\) of CountingSampler: a value holds builtins.object"):
        shim.save_checkpoint(tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def patched(file: Path, column: str, buffer: int, at: int, word: int) -> None:
    """Write a word into a buffer of a column where it lies in the file."""
    data = bytearray(file.read_bytes())
    source = pa.py_buffer(bytes(data))
    found = pa.ipc.open_file(source).get_batch(0).column(column).buffers()[buffer]
    start = found.address - source.address + 8 * at
    data[start : start + 8] = word.to_bytes(8, "little", signed=True)
    file.write_bytes(data)


@pytest.mark.parametrize("word", [-1, 1 << 20, 1 << 62])
@pytest.mark.parametrize(("column", "buffer"), [("index", 1), ("field.ids", 1), ("field.text", 1)])
def test_files_with_right_checksums_that_no_save_writes(tmp_path: Path, column: str, buffer: int, word: int) -> None:
    fill()
    shim.save_checkpoint(tmp_path / "ck")
    before = everything()
    storage = tmp_path / "ck/storage"
    file = next(
        one
        for one in sorted(storage.glob("*.arrow"))
        if column in pa.ipc.open_file(pa.py_buffer(one.read_bytes())).schema.names
    )
    patched(file, column, buffer, 1 if column != "index" else 0, word)
    manifest = json.loads((storage / "manifest.json").read_bytes())
    for partition in manifest["partitions"]:
        for group in partition["groups"]:
            part = sealed.part(storage / group["file"])
            group["part"] = {"bytes": part.bytes, "xxh3": part.xxh3}
    seal = sealed.write(storage / "manifest.json", stored.KIND, {"partitions": manifest["partitions"]})
    metadata = json.loads((tmp_path / "ck/metadata.json").read_bytes())
    content = {name: value for name, value in metadata.items() if name not in ("format", "xxh3")}
    content["storage"] = {"bytes": seal.bytes, "xxh3": seal.xxh3}
    sealed.write(tmp_path / "ck/metadata.json", metadata["format"], content)
    with pytest.raises(Corruption, match=r"\.arrow|samples of partition"):
        shim.load_checkpoint(str(tmp_path / "ck"))
    assert everything() == before
