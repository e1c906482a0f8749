"""Partitions as several processes see them: each remembers the tables that it opened, none is misled by what it
remembers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("tensordict", "omegaconf")):
    pytest.skip("the drop-in needs tensordict and omegaconf: make test-shim", allow_module_level=True)

import numpy as np
import torch
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples.columns import interleaved
from transferqueue.adapters.transfer_queue.samples.partitions import Partitions
from transferqueue.errors import NotFound

KEYS = ["a", "b"]


@pytest.fixture
def queues() -> Iterator[list[tq.Queue]]:
    with tq.connect() as first, tq.connect(first.address) as second:
        yield [first, second]


@pytest.fixture
def both(queues: list[tq.Queue]) -> list[Partitions]:
    return [Partitions(queue, rows_max=100) for queue in queues]


def of(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[2])


def test_what_is_not_there_is_refused(both: list[Partitions]) -> None:
    with pytest.raises(NotFound, match="partition 'p' not found; a put makes it"):
        both[0].get("p", KEYS, None)
    both[0].put_keyed("p", KEYS, of(x=torch.arange(2)), None)
    with pytest.raises(NotFound, match=r"keys \['c'\] not found"):
        both[0].get("p", ["a", "c"], None)
    assert both[0].names() == ["p"]


def test_a_field_that_another_process_added_is_not_passed_over(both: list[Partitions]) -> None:
    both[0].put_keyed("p", KEYS, of(x=torch.arange(2)), None)
    both[1].put_keyed("p", KEYS, of(y=torch.ones(2, 3)), None)
    found = both[0].get("p", KEYS, ["y", "unknown"])
    assert list(found.keys()) == ["y"]
    assert torch.equal(torch.stack(list(found["y"].unbind())), torch.ones(2, 3))


def test_names_make_no_rules_for_the_values_of_the_drop_in(both: list[Partitions]) -> None:
    """TransferQueue takes NaN and any lengths, and its callers cannot declare a field."""
    given = {
        "advantages": torch.tensor([float("nan"), 1.0]),
        "response_ids": torch.ones(2, 3),
        "values": torch.ones(2, 1),
    }
    both[0].put_keyed("p", KEYS, of(**given), None)
    both[1].put_keyed("p", KEYS, of(values=torch.full((2, 2), float("inf"))), None)
    found = both[0].get("p", KEYS, ["advantages", "values"])
    assert found["advantages"].isnan().tolist() == [True, False]
    assert torch.stack(list(found["values"].unbind())).isinf().all()


@pytest.mark.parametrize("again", [torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([0.5, 1.5])])
def test_a_partition_that_was_dropped_and_made_again_with_another_field(
    both: list[Partitions], queues: list[tq.Queue], again: torch.Tensor
) -> None:
    both[0].put_keyed("p", KEYS, of(x=torch.arange(2)), None)
    queues[1].drop_table("p.p")
    with pytest.raises(NotFound):
        both[0].get("p", KEYS, ["x"])
    both[1].put_keyed("p", KEYS, of(x=again), None)
    both[0].put_keyed("p", KEYS, of(x=again + 1), [{"tag": 1}, {}])
    found = both[0].get("p", KEYS, ["x"])["x"]
    assert torch.equal(torch.stack(list(found.unbind())), again + 1)


def test_a_put_into_a_partition_that_was_dropped_makes_it_again(both: list[Partitions], queues: list[tq.Queue]) -> None:
    for put in (
        lambda: both[0].put("p", of(x=torch.arange(2))),
        lambda: both[0].put_keyed("p", KEYS, of(x=torch.arange(2)), None),
        lambda: both[0].keyed("p", KEYS),
    ):
        put()
        queues[1].drop_table("p.p")
        put()
        with queues[1].table("p.p").read(fields=()) as rows:
            assert len(rows) == 2
        queues[1].drop_table("p.p")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_values_of_every_layout_come_back(both: list[Partitions]) -> None:
    ragged = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    second = torch.nested.narrow(
        torch.arange(8).reshape(2, 4), 1, torch.tensor([1, 0]), torch.tensor([2, 3]), torch.jagged
    )
    strided = torch.nested.nested_tensor([torch.zeros(2, 1), torch.zeros(1, 3)])
    data = of(s=torch.arange(2.0), d=torch.ones(2, 2, 2, requires_grad=True), r=ragged, n=second, v=strided)
    objects = np.empty(2, object)
    objects[:] = [{"role": "user"}, {"role": "tool"}]
    data["o"] = objects
    for turn in range(2):
        both[turn].put_keyed("p", KEYS, data, None)
        found = both[1].get("p", KEYS, None)
        assert [row.tolist() for row in found["r"].unbind()] == [[0, 1, 2], [0]]
        assert [row.tolist() for row in found["n"].unbind()] == [[1, 2], [4, 5, 6]]
        assert [tuple(row.shape) for row in found["v"].unbind()] == [(2, 1), (1, 3)]
        assert [row.tolist() for row in found["d"].unbind()] == [[[1, 1], [1, 1]]] * 2
        assert found["s"].tolist() == [0, 1]
        assert found.get("o").tolist() == list(objects)


def test_a_value_that_samples_share_is_read_by_each(both: list[Partitions]) -> None:
    images = torch.arange(2 * 65536, dtype=torch.int32).reshape(2, 65536)
    keys = [f"k{row}" for row in range(8)]
    for name, column in (
        ("expanded", images[:1].expand(8, -1)),
        ("repeated", images.repeat_interleave(4, 0)),
        ("nested", torch.nested.as_nested_tensor([images[0]] * 8, layout=torch.jagged)),
    ):
        both[0].put_keyed(name, keys, TensorDict({"image": column}, batch_size=[8]), None)
        found = both[1].get(name, keys, ["image"])["image"]
        assert all(torch.equal(one, other) for one, other in zip(found.unbind(), column.unbind(), strict=True))


def test_a_put_of_fields_returns_the_tags_that_samples_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer goes on with the metadata that the put of its results returned, and asks it for tags of the rollout."""
    from transferqueue.adapters import transfer_queue as drop_in

    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    drop_in.init()
    try:
        drop_in.kv_batch_put(KEYS, "p", of(x=torch.arange(2)), [{"version": 3, "spans": [1, 2]}, {"version": 4}])
        written = drop_in.kv_batch_put(KEYS[::-1], "p", of(y=torch.ones(2)))
    finally:
        drop_in.close()
    assert written.tags == [{"version": 4}, {"version": 3, "spans": [1, 2]}]
    assert written.fields == ["x", "y"]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [3, 0, 4, 1, 5, 2], [1, 2, 0, 5, 4, 3], [4, 5, 0, 1, 2, 3]])
def test_jagged_samples_of_two_partitions_come_in_the_order_of_the_metadata(order: list[int]) -> None:
    rows = [torch.arange(count) + 10 * place for place, count in enumerate([3, 0, 2, 1, 4, 0])]
    parts = [
        TensorDict({"x": torch.nested.nested_tensor(some, layout=torch.jagged)}, batch_size=[3])
        for some in (rows[:3], rows[3:])
    ]
    found = interleaved(parts, np.array(order), ["x"])["x"]
    assert [row.tolist() for row in found.unbind()] == [rows[at].tolist() for at in order]
