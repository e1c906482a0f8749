# ruff: noqa: E402  (imports after a check that they are there)
"""Values that stacks put through the drop-in come back as they were, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

import numpy as np

from tests.storage.values_of_stacks import ToolCall, kinds, same
from transferqueue.adapters import transfer_queue as shim
from transferqueue.errors import SchemaError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack
KINDS = kinds()


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
        shim.init({"controller": {"polling_mode": True}})
        yield
        shim.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_every_kind_comes_back_as_it_was(kind: str) -> None:
    given = KINDS[kind]()
    shim.kv_put("a", f"kind {kind}", {"inside": {"value": given}})
    if not isinstance(given, torch.Tensor):
        shim.kv_put("a", f"kind {kind}", {"alone": given})
        assert same(given, values("alone", f"kind {kind}")[0])
    assert same({"value": given}, values("inside", f"kind {kind}")[0])


def values(field: str, partition: str, keys: tuple[str, ...] = ("a",)) -> list[Any]:
    return list(shim.kv_batch_get(list(keys), partition).get(field).tolist())


def test_the_multimodal_inputs_of_verl() -> None:
    """One dict of tensors a sample, of other shapes in each, and none for a sample of text alone."""
    given = [
        {"pixel_values": torch.randn(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])},
        {"pixel_values": torch.randn(24, 1176), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])},
        {},
    ]
    ids = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 5, 2)], layout=torch.jagged)
    fields = TensorDict({"multi_modal_inputs": NonTensorStack(*given), "ids": ids}, batch_size=[3])
    meta = shim.get_client().put(fields, partition_id="multimodal")
    found = shim.get_client().get_data(meta.select_samples([2, 0, 1]))
    assert all(map(same, [given[2], given[0], given[1]], found["multi_modal_inputs"].tolist()))
    assert [each.tolist() for each in found["ids"].unbind()] == [[0, 1], [0, 1, 2], [0, 1, 2, 3, 4]]


def test_object_columns_of_roll() -> None:
    """A numpy column of objects, a list or a dict of arrays a sample."""
    column = np.empty(2, object)
    column[0], column[1] = [np.ones(2), {"a": 1}], {"image": np.zeros((2, 2), np.uint8), 3: "x"}
    fields = TensorDict({"ids": torch.ones(2, 3), "extra": NonTensorStack(*column)}, batch_size=[2])
    shim.kv_batch_put(["a", "b"], "roll", fields)
    assert all(map(same, column, values("extra", "roll", ("a", "b"))))


def test_what_cannot_be_kept_is_refused_by_name_and_nothing_is_put() -> None:
    with pytest.raises(SchemaError, match=r'field "x", row 0: a value holds builtins.object'):
        shim.kv_put("a", "refused", {"x": {"deep": [object()]}})
    with pytest.raises(UsageError, match="a tag has the name 3; names of tags are text"):
        shim.kv_put("a", "refused", {"x": 1}, tag={3: 1})
    assert "refused" not in shim.kv_list() or shim.kv_list("refused")["refused"] == {}


TAGS = {"n": 1, "long": 1 << 70, "pair": (1, 2), "by_number": {1: "a"}, "text": "\x01value:", "when": None, "half": 0.5}


def test_tags_come_back_as_they_were() -> None:
    shim.kv_put("a", "tags", {"x": 1}, tag=TAGS)
    assert same(TAGS, shim.kv_list("tags")["tags"]["a"])


def test_values_are_merged_and_checkpointed_as_they_are(tmp_path: Path) -> None:
    shim.kv_put("a", "kept", {"calls": [ToolCall("one")]}, tag=TAGS)
    shim.kv_update("a", "kept", {"calls": [ToolCall("two", {1: np.ones(2)})]}, lambda old, new: old + new)
    wanted = [ToolCall("one"), ToolCall("two", {1: np.ones(2)})]
    shim.save_checkpoint(tmp_path / "ck")
    shim.kv_put("a", "kept", {"calls": []})
    shim.load_checkpoint(tmp_path / "ck")
    assert same(wanted, values("calls", "kept")[0])
    assert same(TAGS, shim.kv_list("kept")["kept"]["a"])


@pytest.mark.parametrize("make", [lambda: torch.arange(2.0), lambda: torch.ones(2, 3)], ids=["scalars", "rows"])
def test_samples_of_several_partitions_come_in_the_order_of_the_metadata(make: Callable[[], Any]) -> None:
    client = shim.get_client()
    for partition in ("one", "two"):
        client.clear_partition(partition)
    first = client.put(TensorDict({"x": make(), "y": NonTensorStack("a", {1: 2})}, batch_size=[2]), partition_id="one")
    second = client.put(
        TensorDict({"x": make() + 10, "y": NonTensorStack("c", (1,))}, batch_size=[2]), partition_id="two"
    )
    meta = shim.BatchMeta.concat([first, second])
    meta.reorder([3, 0, 2, 1])
    found = client.get_data(meta)
    rows = [make()[1] + 10, make()[0], make()[0] + 10, make()[1]]
    assert all(map(torch.equal, found["x"].unbind(), rows))
    assert found["y"].tolist() == [(1,), "a", "c", {1: 2}]


def test_partitions_without_a_common_field_are_named() -> None:
    client = shim.get_client()
    first = client.put(TensorDict({"x": torch.ones(1), "z": torch.ones(1)}, batch_size=[1]), partition_id="with z")
    second = client.put(TensorDict({"x": torch.ones(1)}, batch_size=[1]), partition_id="without z")
    meta = shim.BatchMeta.concat([first, second], validate=False)
    with pytest.raises(shim.StorageKeyNotFoundError, match=r"fields \['z'\] are not in each of the partitions"):
        client.get_data(meta)
